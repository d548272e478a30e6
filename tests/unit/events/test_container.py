"""Records in a file are read as they were written, and the digest distinguishes records."""

from __future__ import annotations

import dataclasses
import io
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import CorruptRecord
from relax_events.events import container
from relax_events.events.container import (
    ContainerWriter,
    LoggedRecord,
    RecordsDigest,
    read_container,
)

MAYBE = st.none() | st.binary(max_size=20)
RECORDS = st.lists(
    st.builds(
        LoggedRecord,
        st.integers(0, 2**62),
        st.integers(0, 2**62),
        MAYBE,
        MAYBE,
        st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5), MAYBE
            ),
            max_size=3,
        ).map(tuple),
    ),
    max_size=8,
)
RECORD = LoggedRecord(3, 1_700_000_000_000, b"k", b"v", (("h", b"1"), ("h", None)))


@given(records=RECORDS)
def test_container_returns_the_records_that_were_written(
    records: list[LoggedRecord], tmp_path_factory: pytest.TempPathFactory
) -> None:
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


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-9], lambda data: data[:40], lambda data: b"no avro"],
    ids=["torn", "head", "foreign"],
)
def test_error_names_the_damaged_container_file(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.avro"
    with ContainerWriter(path) as writer:
        for offset in range(100):
            writer.write(dataclasses.replace(RECORD, offset=offset))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CorruptRecord, match=r"a\.avro can't be read as records of a partition"):
        list(read_container(path))


def number(value: int) -> bytes:
    """Return a number as Avro writes it."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, "long", value)
    return buffer.getvalue()


def packed_zeros(num_mib: int, *, behind: bytes = b"") -> bytes:
    """Return bytes and so many MiB of zeros, deflated; these zeros are packed once, so that making
    a bomb takes no room either."""
    packing = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packing.compress(behind) + packing.flush(zlib.Z_FULL_FLUSH)
    one = packing.compress(bytes(2**20)) + packing.flush(zlib.Z_FULL_FLUSH)
    return start + one * num_mib + packing.flush()


def with_block(path: Path, num_records: int, data: bytes) -> Path:
    """Write a container of one valid record, and behind it a block of unknown unpacked contents."""
    with ContainerWriter(path) as writer:
        writer.write(RECORD)
    valid_bytes = path.read_bytes()
    path.write_bytes(
        valid_bytes + number(num_records) + number(len(data)) + data + valid_bytes[-16:]
    )
    return path


BOMBS: dict[str, tuple[Callable[[], tuple[int, bytes]], str]] = {
    "value": (
        lambda: (1, packed_zeros(1024, behind=number(0) * 2 + b"\0\2" + number(2**30))),
        r"its \d+ bytes unpack to more than 67371008 bytes",
    ),
    "headers": (
        lambda: (1, packed_zeros(8, behind=number(0) * 2 + b"\0\0" + number(2**22))),
        r"it has more than 524288 values",
    ),
    "records": (lambda: (2**40, packed_zeros(8)), r"it has more than 524288 values"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_decompression_bomb_is_rejected_before_it_fills_the_memory(
    bomb: str, tmp_path: Path
) -> None:
    make, what = BOMBS[bomb]
    path = with_block(tmp_path / "bomb.avro", *make())
    assert path.stat().st_size < 2 * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptRecord,
            match=rf"bomb\.avro can't be read as records of a partition: block 1 \(byte \d+\): ValueError {what}",
        ):
            for _ in read_container(path):
                pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * container.MAX_BLOCK_BYTES


def test_block_of_the_largest_record_is_read(tmp_path: Path) -> None:
    before, largest = (
        dataclasses.replace(RECORD, value=bytes(size))
        for size in (container.BLOCK_BYTES - 200, 64 * 2**20 - 1000)
    )
    with ContainerWriter(tmp_path / "a.avro") as writer:
        writer.write(before)
        writer.write(largest)
    assert list(read_container(tmp_path / "a.avro")) == [before, largest]


def test_block_of_the_smallest_records_is_read(tmp_path: Path) -> None:
    smallest = [LoggedRecord(0, 0, None, None)] * container.BLOCK_BYTES
    with ContainerWriter(tmp_path / "a.avro") as writer:
        for record in smallest:
            writer.write(record)
    assert list(read_container(tmp_path / "a.avro")) == smallest


@pytest.mark.parametrize(
    ("num_records", "data", "what"),
    [
        (-1, b"\3\0", "it says that it has -1 records in 2 bytes"),
        (1, b"\3\0", "EOFError"),
        (0, packed_zeros(1), "it has 1048576 bytes after its 0 records"),
        (1, packed_zeros(1)[:-9], "end before what is packed in them does"),
    ],
    ids=["negative", "fewer", "more", "cut"],
)
def test_error_names_the_block_whose_data_contradict_its_header(
    num_records: int, data: bytes, what: str, tmp_path: Path
) -> None:
    path = with_block(tmp_path / "a.avro", num_records, data)
    with pytest.raises(CorruptRecord, match=rf"block 1 \(byte \d+\): .*{what}"):
        list(read_container(path))


def test_block_beyond_the_file_end_or_of_unknown_codec_is_rejected(tmp_path: Path) -> None:
    path = with_block(tmp_path / "a.avro", 1, b"")
    path.write_bytes(path.read_bytes()[: -16 - 1] + number(2**60) + bytes(16))
    with pytest.raises(
        CorruptRecord,
        match=r"block 1 .*records in 1152921504606846976 bytes, and 16 bytes are left",
    ):
        list(read_container(path))
    with path.open("wb") as file:
        fastavro.writer(file, container.PARSED, [], codec="xz")
    assert list(read_container(path)) == []
    path.write_bytes(path.read_bytes() + number(0) + number(0) + bytes(16))
    with pytest.raises(
        CorruptRecord, match=r"block 0 .*packed by b'xz'; relax topics export packs by deflate"
    ):
        list(read_container(path))


def test_file_of_another_avro_writer_is_read(tmp_path: Path) -> None:
    """Without packing, and with a field more."""
    schema = container.SCHEMA | {
        "fields": [*container.SCHEMA["fields"], {"name": "more", "type": "string"}]
    }
    row = {
        "offset": 3,
        "timestamp_ms": 1,
        "key": b"k",
        "value": None,
        "headers": [{"name": "h", "value": b"1"}],
        "more": "x",
    }
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, schema, [row] * 3, codec="null")
    assert (
        list(read_container(tmp_path / "a.avro"))
        == [LoggedRecord(3, 1, b"k", None, (("h", b"1"),))] * 3
    )


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


def test_digest_depends_on_field_boundaries_and_record_order() -> None:
    moved = dataclasses.replace(RECORD, key=b"kv", value=b"")
    assert digest(moved) != digest(RECORD)
    other = dataclasses.replace(RECORD, offset=4)
    assert digest(RECORD, other) != digest(other, RECORD)


def test_digest_without_offsets_depends_only_on_the_content() -> None:
    assert digest(RECORD, with_offsets=False) == digest(
        dataclasses.replace(RECORD, offset=9), with_offsets=False
    )
