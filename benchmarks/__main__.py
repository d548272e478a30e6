"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    bus,
    curves,
    kernels,
    log_size,
    stages,
    sync_async,
    trl,
    weights,
    workloads,
)

kernels.main()
bus.main()
stages.main()
log_size.main()
sync_async.main()
weights.main()
trl.main()
curves.main()
workloads.main()
