"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import bus, codec, footprint, skip, sync_async, workloads

codec.main()
bus.main()
skip.main()
footprint.main()
sync_async.main()
workloads.main()
