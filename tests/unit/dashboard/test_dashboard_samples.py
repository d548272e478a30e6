"""The columns of samples: filters, order, pages, and how prompt groups ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
from event_samples import ended

from relax_events.errors import ConfigError
from relax_events.events.parts import Outcome
from relax_events.packages.dashboard.sample_columns import (
    Columns,
    NewSample,
    SampleQuery,
    SampleTable,
    decode_group,
    encode_group,
)

FINISHES = ("stop", "length")


def add(table: SampleTable, number: int, **changes: Any) -> int:
    """Add a sample of prompt group `number`; return its row."""
    fields: dict[str, Any] = {
        "key": number,
        "group": encode_group(f"{number:06d}-0000-0"),
        "index": 0,
        "version": number,
        "min_version": number,
        "tokens": 10 * number,
        "finish": FINISHES[number % 2],
        "worker": f"rollout-{number % 3}",
        "source": "math",
        "at": 1_000_000 * number,
        "partition": number % 4,
        "offset": number,
    }
    return table.add(NewSample(**fields | changes))


@pytest.fixture
def table() -> SampleTable:
    """Return six samples: rewards 0, 0.2, 0.4, none, 0.8, 1."""
    table = SampleTable()
    for number, reward in enumerate((0.0, 0.2, 0.4, None, 0.8, 1.0)):
        table.set_reward(add(table, number), reward)
    table.newest_version = 5
    return table


def rows(table: SampleTable, **query: Any) -> list[int]:
    """Return the rows that a query finds."""
    return table.select(SampleQuery(**query)).rows.tolist()


def test_newest_samples_come_first(table: SampleTable) -> None:
    assert rows(table) == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({"reward": (0.4, 0.8)}, [4, 2]),
        ({"reward": (0.0, math.inf)}, [5, 4, 2, 1, 0]),
        ({"tokens": (-math.inf, 10)}, [1, 0]),
        ({"staleness": (4, 4)}, [1]),
        ({"version": (2, 3), "tokens": (30, 30)}, [3]),
    ],
)
def test_bounds_select_and_include_both_ends(
    table: SampleTable, bounds: dict[str, tuple[float, float]], found: list[int]
) -> None:
    assert rows(table, bounds=bounds) == found


def test_samples_without_reward_come_last_in_both_directions(table: SampleTable) -> None:
    assert rows(table, sort="reward", descending=True) == [5, 4, 2, 1, 0, 3]
    assert rows(table, sort="reward", descending=False) == [0, 1, 2, 4, 5, 3]


def test_words_select(table: SampleTable) -> None:
    assert rows(table, finish="length") == [5, 3, 1]
    assert rows(table, worker="rollout-1") == [4, 1]
    assert rows(table, source="unknown") == []
    assert rows(table, group="000003-0000-0") == [3]
    assert rows(table, group="nonsense") == []


def test_pages_of_equal_values_hold_each_sample_once() -> None:
    table = SampleTable()
    for number in range(200):
        table.set_reward(add(table, number, group=encode_group("000000-0000-0")), 1.0)
    found = [
        row
        for first in range(0, 200, 16)
        for row in rows(table, sort="reward", first=first, count=16)
    ]
    assert sorted(found) == list(range(200))


def test_many_samples_are_kept_beyond_the_first_capacity() -> None:
    table = SampleTable()
    for number in range(10_000):
        add(table, number)
    assert len(table) == 10_000
    assert rows(table, count=2) == [9_999, 9_998]
    assert table.columns.num_bytes < 100 * 2 * 10_000


@pytest.mark.parametrize("comes_first", ["sample", "outcome"])
def test_outcome_joins_the_samples_of_its_group(comes_first: str) -> None:
    table = SampleTable()
    event = ended("000002-0000-0", Outcome.TRAINED, version=2)
    if comes_first == "sample":
        add(table, 2)
        assert table.describe(rows(table))[0]["outcome"] == "open"
    table.end(event)
    if comes_first == "outcome":
        add(table, 2)
    add(table, 3)
    shown = {row["prompt_group_id"]: row["outcome"] for row in table.describe(rows(table))}
    assert shown == {"000002-0000-0": "trained", "000003-0000-0": "open"}
    assert table.describe([0])[0]["train_step"] == event.trainer_version


def test_other_generation_of_a_trained_group_is_superseded() -> None:
    table = SampleTable()
    add(table, 2, version=1)
    table.end(ended("000002-0000-0", Outcome.TRAINED, version=2))
    assert table.describe(rows(table))[0]["outcome"] == "superseded"
    assert table.describe([0])[0]["train_step"] is None


def test_sample_is_found_by_id_the_trained_generation_first() -> None:
    table = SampleTable()
    add(table, 2, version=1, at=9_000_000)
    add(table, 2, version=2, at=1_000_000)
    table.end(ended("000002-0000-0", Outcome.TRAINED, version=2))
    assert table.find("000002-0000-0/0") == 1
    with pytest.raises(ConfigError, match="is not known"):
        table.find("000002-0000-0/7")
    with pytest.raises(ConfigError, match="is not known"):
        table.find("<script>")


@pytest.mark.parametrize("name", ["000000-0000-0", "123456-0042-3", "000007-1000000-0"])
def test_group_ids_survive_their_number(name: str) -> None:
    assert decode_group(encode_group(name)) == name


@pytest.mark.parametrize("name", ["", "x", "999999999999-0000-0", "000000-999999999999-0"])
def test_ids_that_no_run_gives_have_no_number(name: str) -> None:
    assert encode_group(name) == -1


@pytest.mark.parametrize("query", [{"sort": "colour"}, {"outcome": "lost"}, {"finish": "never"}])
def test_unknown_word_is_refused_with_those_that_there_are(query: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        SampleQuery(**query)


def test_rows_of_a_prompt_group_are_those_of_its_version_by_index(
    table: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = encode_group("000007-0003-0")
    second = add(table, 7, group=group, index=1)
    add(table, 8, group=group, index=0)  # generated once more, at another version
    first = add(table, 7, group=group, index=0)
    unknown = add(table, 9, group=-1)
    plain = Columns.__getitem__

    def guarded(columns: Columns, name: str) -> Any:
        assert table._lock.locked(), "a sample that is added now would make the columns unequal"
        return plain(columns, name)

    monkeypatch.setattr(Columns, "__getitem__", guarded)
    assert table.group_rows(second) == table.group_rows(first) == [first, second]
    assert table.group_rows(unknown) == [unknown]
