"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    bus,
    codec,
    curves,
    elastic,
    endurance,
    footprint,
    kernels,
    log_size,
    media,
    rewards,
    scrape,
    shared_prompts,
    skip,
    starting,
    sync_async,
    trl,
    weight_changes,
    weights,
    workloads,
)

codec.main()
rewards.main()
kernels.main()
shared_prompts.main()
bus.main()
skip.main()
footprint.main()
log_size.main()
media.main()
scrape.main()
sync_async.main()
weights.main()
weight_changes.main()
trl.main()
curves.main()
workloads.main()
starting.main()
elastic.main()
endurance.main()
