"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import bus, codec, curves, footprint, kernels, rewards, skip, sync_async, trl, workloads

codec.main()
rewards.main()
kernels.main()
bus.main()
skip.main()
footprint.main()
sync_async.main()
trl.main()
curves.main()
workloads.main()
