"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import codec, sync_async

codec.main()
sync_async.main()
