"""Assignment of the long tests to shards, and the report of a shard that ran out of time."""

from __future__ import annotations

import pytest

from tests.shards import (
    DEFAULT_SECONDS,
    DURATIONS,
    TESTS,
    durations_in,
    seconds_of,
    shard_named,
    shards_of,
    verdict,
)

NAMES = [f"tests/e2e/test_a.py::test_one[{number}]" for number in range(7)] + [
    "tests/engines/test_b.py::test_x",
    "tests/engines/test_b.py::test_y",
]
WORK = {
    "tests/e2e/test_a.py": 10.0,
    "tests/engines/test_b.py": 30.0,
    "tests/e2e/test_a.py::test_one[0]": 65.0,
}


def test_each_test_is_in_one_shard_and_shards_have_similar_durations() -> None:
    shards = shards_of(reversed(NAMES), 3, WORK)
    assert sorted(name for shard in shards for name in shard) == sorted(NAMES)
    assert [sum(seconds_of(name, WORK) for name in shard) for shard in shards] == [65.0, 60.0, 60.0]
    assert shards == shards_of(NAMES, 3, WORK)


def test_tests_sharing_a_server_are_in_one_shard() -> None:
    assert ["tests/engines/test_b.py::test_x", "tests/engines/test_b.py::test_y"] in shards_of(
        NAMES, 3, WORK
    )


def test_duration_falls_back_from_test_to_function_to_file_to_default() -> None:
    durations = durations_in("# comment\n5 t.py\n6 t.py::test_f\n7 t.py::test_f[a b]\n")
    names = ("t.py::test_f[a b]", "t.py::test_f[c]", "t.py::test_g", "u.py::test_g")
    assert [seconds_of(name, durations) for name in names] == [7, 6, 5, DEFAULT_SECONDS]


def test_recorded_durations_name_existing_files() -> None:
    names = durations_in(DURATIONS.read_text())
    assert [name for name in names if not (TESTS.parent / name.partition("::")[0]).exists()] == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "-1/3"])
def test_invalid_shard_is_rejected(text: str) -> None:
    assert shard_named("3/3") == (3, 3)
    with pytest.raises(ValueError, match="a shard is k/N"):
        shard_named(text)


@pytest.mark.parametrize(("outcome", "status"), [("done", 0), ("failed", 1)])
def test_timed_out_shard_lists_unrun_tests_and_fails_only_on_test_failures(
    outcome: str, status: int
) -> None:
    assert verdict(f"chosen a\nchosen b[x y]\n{outcome} a\n") == (status, ["b[x y]"])
