"""Receive buffers that another process of the same host maps: their memory, and the form of a
handle."""

from __future__ import annotations

import os
from typing import Any

import pytest

from relax_events.weights.broadcast.channel import ConnectionLost, ReceiveBuffer
from relax_events.weights.broadcast.shared_memory import is_on_same_host, map_remote_buffer

KEY = "0f" * 16
HANDLE = {"socket": f"relax-weights-{KEY}", "key": KEY, "number": 1}


def test_receive_buffer_cannot_be_truncated() -> None:
    buffer = ReceiveBuffer(1000)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.file.descriptor, 10)


@pytest.mark.parametrize("handle", [None, "memory", [1], 7, {}])
def test_handle_that_is_no_object_or_empty_is_rejected(handle: object) -> None:
    with pytest.raises(ConnectionLost, match="handle"):
        map_remote_buffer(handle, 64)
    assert not is_on_same_host(handle)


@pytest.mark.parametrize("value", [None, 5, [KEY], "", "ü" * 32, KEY + "\n", KEY * 4096, b"\0"])
@pytest.mark.parametrize("field", ["socket", "key"])
def test_invalid_field_of_a_handle_is_rejected_without_a_connection(field: str, value: Any) -> None:
    prefix = "relax-weights-" if field == "socket" and isinstance(value, str) else ""
    handle = HANDLE | {field: prefix + value if prefix else value}
    with pytest.raises(ConnectionLost, match=f"the field '{field}' .* does not match") as caught:
        map_remote_buffer(handle, 64)
    assert KEY not in str(caught.value)
    assert not is_on_same_host(handle)


@pytest.mark.parametrize(
    "name", ["", "relax-weights-", "/run/docker.sock", f"other-{KEY}", "x" * 108]
)
def test_socket_of_another_program_is_never_contacted(name: str) -> None:
    with pytest.raises(ConnectionLost, match="does not match"):
        map_remote_buffer(HANDLE | {"socket": name}, 64)
