"""Rows of weights in memory that another process of this machine is let into."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from relax_events.weights.broadcast.channel import ConnectionLost
from relax_events.weights.broadcast.receive_buffers import ReceiveBuffer
from relax_events.weights.broadcast.shared_memory import (
    SameHostProbe,
    is_on_same_host,
    map_remote_buffer,
)


def test_what_is_written_by_the_name_lies_in_the_row() -> None:
    row = ReceiveBuffer(1000)
    assert row.data.tolist() == [0] * 1000
    map_remote_buffer(row.handle, 1000)[3] = 7
    assert row.data[:5].tolist() == [0, 0, 0, 7, 0]


def test_empty_row_is_a_row() -> None:
    row = ReceiveBuffer(0)
    assert len(row.data) == len(map_remote_buffer(row.handle, 0)) == 0


def test_nobody_can_cut_a_row_short() -> None:
    row = ReceiveBuffer(1000)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{row.handle['file']}", 10)


def test_row_that_is_gone_is_not_taken_for_the_one_that_has_its_number() -> None:
    row = ReceiveBuffer(64)
    name = row.handle
    del row
    with pytest.raises(ConnectionLost, match=r"/proc/\d+/fd/\d+ can't be reached: .*No such file"):
        map_remote_buffer(name, 64)
    others = [ReceiveBuffer(64)]
    while others[-1].handle["file"] != name["file"]:
        others.append(ReceiveBuffer(64))
    with pytest.raises(ConnectionLost, match="is another row than the one that was told of"):
        map_remote_buffer(name, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"file": 0}, "is no row of weights"),
        ({"process": 2**30}, "can't be reached"),
        ({"file": "../status"}, "can't be reached"),
        ({"number": 5}, "is another row than the one"),
    ],
)
def test_name_of_something_else_is_refused(change: dict[str, Any], text: str) -> None:
    row = ReceiveBuffer(64)
    with pytest.raises(ConnectionLost, match=text):
        map_remote_buffer(row.handle | change, 64)
    with pytest.raises(ConnectionLost, match="is another row"):
        map_remote_buffer(row.handle, 65)


def test_memory_is_here_when_its_key_is_found_in_it() -> None:
    sample = SameHostProbe()
    assert is_on_same_host(sample.handle)
    assert not is_on_same_host(sample.handle | {"key": "00" * 16})
    assert not is_on_same_host(sample.handle | {"process": 2**30})
    assert not any(
        is_on_same_host(name)
        for name in ({}, None, "memory", [1], sample.handle | {"key": "\u00fc"})
    )
    sample.data[0] = 255 - int(sample.data[0])
    assert not is_on_same_host(sample.handle)


def test_view_outlives_its_row() -> None:
    row = ReceiveBuffer(64)
    view = map_remote_buffer(row.handle, 64)
    data, row = row.data, None  # type: ignore[assignment]
    view.copy_(torch.arange(64, dtype=torch.uint8))
    assert data.tolist() == list(range(64))
