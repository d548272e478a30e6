"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import bus, codec, footprint, rewards, skip, sync_async, workloads

codec.main()
rewards.main()
bus.main()
skip.main()
footprint.main()
sync_async.main()
workloads.main()
