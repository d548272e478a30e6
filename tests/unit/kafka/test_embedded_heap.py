"""The embedded broker's heap follows the memory, and its request buffers follow the heap."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.kafka.embedded.java import (
    Java,
    build_broker_command,
    compute_heap_mib,
    compute_request_bytes,
)
from relax_events.kafka.embedded.settings import build_server_properties

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "heap"),
    [(4 * GIB, 512), (16 * GIB, 1024), (24 * GIB, 1536), (512 * GIB, 4096), (float("inf"), 4096)],
)
def test_broker_heap_is_a_bounded_fraction_of_memory(memory: float, heap: int) -> None:
    assert compute_heap_mib(memory) == heap


def test_broker_gets_the_heap_size_and_queues_requests_up_to_a_quarter_of_it(
    tmp_path: Path,
) -> None:
    command = build_broker_command(
        Java(Path("java"), 17, "17"),
        [],
        tmp_path / "server.properties",
        archive=tmp_path / "a",
        archive_at_exit=None,
        heap_mib=1536,
    )
    assert [word for word in command if word.startswith("-Xmx")] == ["-Xmx1536m"]
    text = build_server_properties(
        tmp_path / "data", port=1, controller_port=2, overrides={}, heap_mib=1536
    )
    assert f"queued.max.request.bytes={compute_request_bytes(1536)}" in text.splitlines()
    assert compute_request_bytes(1536) == 384 << 20
