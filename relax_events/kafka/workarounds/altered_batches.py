"""librdkafka aborts the process where a record batch fails its checksum.

Seen with: librdkafka 2.16.0. Report: none.
Test: test_client_never_reads_on_behind_an_altered_batch.

The client parses on at a wrong position of the response, and may abort there before it reports the
batch. With `RELAX_FETCH_SINGLE_BATCHES=1` a response holds one record batch, so that the client
hardly ever aborts: its report ends the worker with an error that names the batch. Reading is slower
by far.
"""

from __future__ import annotations

import os

VARIABLE = "RELAX_FETCH_SINGLE_BATCHES"


def build_fetch_settings() -> dict[str, int]:
    """Return the client's settings, empty unless the variable is set."""
    return {"fetch_message_max_bytes": 1} if os.environ.get(VARIABLE) == "1" else {}
