"""Receive buffers that another process of the same host maps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from relax_events.weights.broadcast.channel import NAME, ConnectionLost, ReceiveBuffer
from relax_events.weights.broadcast.shared_memory import (
    SameHostProbe,
    is_on_same_host,
    map_remote_buffer,
)


def test_bytes_written_through_the_handle_are_in_the_buffer() -> None:
    buffer = ReceiveBuffer(1000)
    assert buffer.data.tolist() == [0] * 1000
    map_remote_buffer(buffer.handle, 1000)[3] = 7
    assert buffer.data[:5].tolist() == [0, 0, 0, 7, 0]


def test_buffer_may_be_empty() -> None:
    buffer = ReceiveBuffer(0)
    assert len(buffer.data) == len(map_remote_buffer(buffer.handle, 0)) == 0


def test_receive_buffer_cannot_be_truncated() -> None:
    buffer = ReceiveBuffer(1000)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{buffer.handle['file']}", 10)


def test_buffer_that_its_worker_may_truncate_is_not_mapped() -> None:
    file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 64)
        handle = {"process": os.getpid(), "file": file, "number": os.fstat(file).st_ino}
        with pytest.raises(ConnectionLost, match="has a size that its worker may change"):
            map_remote_buffer(handle, 64)
    finally:
        os.close(file)


def test_handle_of_a_deleted_buffer_does_not_map_a_new_one_with_its_descriptor() -> None:
    buffer = ReceiveBuffer(64)
    handle = buffer.handle
    del buffer
    with pytest.raises(ConnectionLost, match=r"/proc/\d+/fd/\d+ can't be mapped: .*No such file"):
        map_remote_buffer(handle, 64)
    others = [ReceiveBuffer(64)]
    while others[-1].handle["file"] != handle["file"]:
        others.append(ReceiveBuffer(64))
    with pytest.raises(ConnectionLost, match="is not the buffer of the handle"):
        map_remote_buffer(handle, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"file": 0}, "is no receive buffer for weights"),
        ({"process": 2**30}, "can't be mapped"),
        ({"file": "../status"}, "can't be mapped"),
        ({"number": 5}, "is not the buffer of the handle"),
    ],
)
def test_invalid_buffer_handle_is_rejected(change: dict[str, Any], text: str) -> None:
    buffer = ReceiveBuffer(64)
    with pytest.raises(ConnectionLost, match=text):
        map_remote_buffer(buffer.handle | change, 64)
    with pytest.raises(ConnectionLost, match="is not the buffer"):
        map_remote_buffer(buffer.handle, 65)


def test_same_host_is_detected_by_the_key_in_shared_memory() -> None:
    sample = SameHostProbe()
    assert is_on_same_host(sample.handle)
    assert not is_on_same_host(sample.handle | {"key": "00" * 16})
    assert not is_on_same_host(sample.handle | {"process": 2**30})
    assert not any(
        is_on_same_host(handle)
        for handle in ({}, None, "memory", [1], sample.handle | {"key": "\u00fc"})
    )
    sample.data[0] = 255 - int(sample.data[0])
    assert not is_on_same_host(sample.handle)


def test_mapping_outlives_its_buffer() -> None:
    buffer = ReceiveBuffer(64)
    view = map_remote_buffer(buffer.handle, 64)
    data, buffer = buffer.data, None  # type: ignore[assignment]
    view.copy_(torch.arange(64, dtype=torch.uint8))
    assert data.tolist() == list(range(64))
