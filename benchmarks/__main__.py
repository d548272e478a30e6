"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import bus, kernels, stages, trl, weights, workloads

kernels.main()
bus.main()
stages.main()
weights.main()
trl.main()
workloads.main()
