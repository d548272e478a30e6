"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    bus,
    compute,
    curves,
    elastic,
    footprint,
    kernels,
    log_size,
    shared_prefixes,
    skip,
    stages,
    starting,
    sync_async,
    trl,
    weight_changes,
    weights,
    workloads,
)

kernels.main()
shared_prefixes.main()
bus.main()
skip.main()
footprint.main()
stages.main()
compute.main()
log_size.main()
sync_async.main()
weights.main()
weight_changes.main()
trl.main()
curves.main()
workloads.main()
starting.main()
elastic.main()
