"""Records in a file: what is read is what was written, and the digest tells records apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import CorruptRecord
from relax_events.events.container import ContainerWriter, LoggedRecord, RecordsDigest, read_container

MAYBE = st.none() | st.binary(max_size=20)
RECORDS = st.lists(
    st.builds(
        LoggedRecord,
        st.integers(0, 2**62),
        st.integers(0, 2**62),
        MAYBE,
        MAYBE,
        st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5), MAYBE), max_size=3).map(tuple),
    ),
    max_size=8,
)
RECORD = LoggedRecord(3, 1_700_000_000_000, b"k", b"v", (("h", b"1"), ("h", None)))


@given(records=RECORDS)
def test_container_gives_back_what_was_written(records: list[LoggedRecord], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "given.avro"
    with ContainerWriter(path) as writer:
        for record in records:
            writer.write(record)
    assert list(read_container(path)) == records


def test_container_is_read_by_any_avro_reader(tmp_path: Path) -> None:
    with ContainerWriter(tmp_path / "a.avro") as writer:
        writer.write(RECORD)
    with (tmp_path / "a.avro").open("rb") as file:
        (row,) = fastavro.reader(file)
    assert row == {
        "offset": 3,
        "timestamp_ms": 1_700_000_000_000,
        "key": b"k",
        "value": b"v",
        "headers": [{"name": "h", "value": b"1"}, {"name": "h", "value": None}],
    }


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40], lambda data: b"no avro"], ids=["torn", "head", "foreign"])
def test_damaged_file_is_named(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.avro"
    with ContainerWriter(path) as writer:
        for offset in range(100):
            writer.write(dataclasses.replace(RECORD, offset=offset))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CorruptRecord, match=r"a\.avro can't be read as records of a partition"):
        list(read_container(path))


def digest(*records: LoggedRecord, with_offsets: bool = True) -> str:
    found = RecordsDigest(with_offsets=with_offsets)
    for record in records:
        found.add(record)
    return found.hex()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 4},
        {"timestamp_ms": 1},
        {"key": None},
        {"key": b""},
        {"value": None},
        {"value": b"v2"},
        {"headers": ()},
        {"headers": (("h", b"1"), ("h", b""))},
    ],
)
def test_digest_changes_with_every_field(change: dict[str, object]) -> None:
    assert digest(dataclasses.replace(RECORD, **change)) != digest(RECORD)  # type: ignore[arg-type]


def test_digest_tells_where_a_field_ends_and_minds_order() -> None:
    moved = dataclasses.replace(RECORD, key=b"kv", value=b"")
    assert digest(moved) != digest(RECORD)
    other = dataclasses.replace(RECORD, offset=4)
    assert digest(RECORD, other) != digest(other, RECORD)


def test_digest_without_offsets_is_that_of_the_content() -> None:
    assert digest(RECORD, with_offsets=False) == digest(dataclasses.replace(RECORD, offset=9), with_offsets=False)
