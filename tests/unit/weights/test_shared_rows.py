"""Rows of weights in memory that another process of this machine is let into."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from relax_events.weights.broadcast.channel import LinkLost
from relax_events.weights.broadcast.receive_buffers import Row
from relax_events.weights.broadcast.shared_memory import Sample, is_here, reached


def test_what_is_written_by_the_name_lies_in_the_row() -> None:
    row = Row(1000)
    assert row.data.tolist() == [0] * 1000
    reached(row.name, 1000)[3] = 7
    assert row.data[:5].tolist() == [0, 0, 0, 7, 0]


def test_empty_row_is_a_row() -> None:
    row = Row(0)
    assert len(row.data) == len(reached(row.name, 0)) == 0


def test_nobody_can_cut_a_row_short() -> None:
    row = Row(1000)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{row.name['file']}", 10)


def test_row_that_is_gone_is_not_taken_for_the_one_that_has_its_number() -> None:
    row = Row(64)
    name = row.name
    del row
    with pytest.raises(LinkLost, match=r"/proc/\d+/fd/\d+ can't be reached: .*No such file"):
        reached(name, 64)
    others = [Row(64)]
    while others[-1].name["file"] != name["file"]:
        others.append(Row(64))
    with pytest.raises(LinkLost, match="is another row than the one that was told of"):
        reached(name, 64)


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
    row = Row(64)
    with pytest.raises(LinkLost, match=text):
        reached(row.name | change, 64)
    with pytest.raises(LinkLost, match="is another row"):
        reached(row.name, 65)


def test_memory_is_here_when_its_key_is_found_in_it() -> None:
    sample = Sample()
    assert is_here(sample.name)
    assert not is_here(sample.name | {"key": "00" * 16})
    assert not is_here(sample.name | {"process": 2**30})
    assert not any(
        is_here(name) for name in ({}, None, "memory", [1], sample.name | {"key": "\u00fc"})
    )
    sample.data[0] = 255 - int(sample.data[0])
    assert not is_here(sample.name)


def test_view_outlives_its_row() -> None:
    row = Row(64)
    view = reached(row.name, 64)
    data, row = row.data, None  # type: ignore[assignment]
    view.copy_(torch.arange(64, dtype=torch.uint8))
    assert data.tolist() == list(range(64))
