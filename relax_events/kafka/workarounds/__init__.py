"""Workarounds for bugs of Kafka, librdkafka and its Python client, one file a bug.

The first lines of each file say with which versions the bug was seen, where it is reported, what it
does and what the file does instead. `tests/unit/kafka/test_workarounds.py` fails once another
version is pinned, so that an upgrade ends in the question whether the bug is gone.
"""
