"""Prompts from Parquet files, written by pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from relax_events.config import DataConfig
from relax_events.data import parquet
from relax_events.data.parquet import ParquetSource, parquet_files
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError


def write_table(path: Path, rows: list[dict[str, Any]], *, row_group_size: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def numbered(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{number}", "answer": str(number), "level": number % 2}
        for number in range(first, first + count)
    ]


def source_of(location: object, **settings: object) -> Any:
    return open_source(
        DataConfig.model_validate({"source": f"parquet:{location}", **settings}), seed=0
    )


def answers(source: Any) -> list[str]:
    return [source.row(index).answer for index in range(source.num_rows)]


def test_parquet_reads_rows_of_all_row_groups_in_any_order(tmp_path: Path) -> None:
    source = source_of(write_table(tmp_path / "rows.parquet", numbered(0, 8)))
    assert source.num_rows == 8
    assert [source.row(index).answer for index in (7, 0, 3, 2)] == ["7", "0", "3", "2"]
    assert (source.row(5).messages[0].text, source.row(5).metadata) == ("p5", '{"level":1}')


def test_parquet_reads_a_split_of_a_folder_in_hugging_face_layout(tmp_path: Path) -> None:
    write_table(tmp_path / "data/train-00001-of-00002.parquet", numbered(4, 4))
    write_table(tmp_path / "data/train-00000-of-00002.parquet", numbered(0, 4))
    write_table(tmp_path / "data/test-00000-of-00001.parquet", numbered(90, 2))
    assert answers(source_of(tmp_path, split="train")) == [str(number) for number in range(8)]
    assert answers(source_of(tmp_path, split="test")) == ["90", "91"]
    assert source_of(tmp_path).num_rows == 10
    with pytest.raises(
        ConfigError, match=r"has no split 'validation', only test, train; set data.split"
    ):
        source_of(tmp_path, split="validation")


def test_parquet_takes_a_folder_named_after_the_split(tmp_path: Path) -> None:
    write_table(tmp_path / "main/train/0000.parquet", numbered(0, 1))
    write_table(tmp_path / "main/test/0000.parquet", numbered(1, 1))
    assert parquet_files(tmp_path / "main", "test", section="data") == [
        tmp_path / "main/test/0000.parquet"
    ]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("[2:6]", ["2", "3", "4", "5"]),
        ("[6:]", ["6", "7"]),
        ("[:1]", ["0"]),
        ("[3:99]", ["3", "4", "5", "6", "7"]),
    ],
)
def test_parquet_takes_a_slice_across_row_groups(
    tmp_path: Path, span: str, expected: list[str]
) -> None:
    path = write_table(tmp_path / "rows.parquet", numbered(0, 8))
    assert answers(source_of(f"{path}{span}")) == expected


def test_parquet_skips_invalid_rows_up_to_the_limit(tmp_path: Path) -> None:
    rows = numbered(0, 9)
    rows[0]["prompt"] = rows[4]["prompt"] = rows[8]["prompt"] = ""
    path = write_table(tmp_path / "rows.parquet", rows)
    source = source_of(path, max_invalid_rows=3)
    assert answers(source) == ["1", "2", "3", "5", "6", "7"]
    assert source.invalid_rows.count == 3
    assert source.invalid_rows.examples[1] == (
        f"{path}, row 4: prompt is an empty string; a prompt is a non-empty string or a list "
        "of chat messages"
    )
    assert answers(source_of(f"{path}[1:5]", max_invalid_rows=1)) == ["1", "2", "3"]
    with pytest.raises(
        ConfigError,
        match=r"row 8: prompt is an empty .* it is invalid row number 3, and data.max_invalid_rows is 2",
    ):
        source_of(path, max_invalid_rows=2)
    with pytest.raises(ConfigError, match=r"rows.parquet, row 0: prompt is an empty string"):
        source_of(path)


def test_parquet_caches_no_more_row_groups_than_its_memory_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{number:04d}" + "x" * 1000, "answer": ""} for number in range(40)]
    path = write_table(tmp_path / "rows.parquet", rows, row_group_size=4)
    monkeypatch.setattr(parquet, "CACHE_BYTES", 3 * 4 * 1100)
    source = ParquetSource(path, DataConfig(source="parquet:x"))
    held = []
    for index in range(0, 40, 3):
        assert source.row(index).messages[0].text.startswith(f"{index:04d}")
        held.append(sum(table.nbytes for table in source._cache.values()))
    assert max(held) <= 3 * 4 * 1100
    assert len(source._cache) == 3


def test_parquet_reads_only_the_columns_that_a_row_needs(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "image": b"\x00", "extra": {"level": 3, "id": "q"}}]
    path = write_table(tmp_path / "rows.parquet", rows)
    assert source_of(path, metadata_keys=["extra.level"]).row(0).metadata == '{"extra.level":3}'
    with pytest.raises(
        ConfigError,
        match=r"row 0: image holds a bytes, .*; set metadata_keys to the columns to keep",
    ):
        source_of(path)


def test_parquet_rejects_invalid_missing_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    write_table(tmp_path / "empty.parquet", numbered(0, 1))
    with pytest.raises(
        ConfigError, match=r"text.parquet can't be read as Parquet: .*; set data.source"
    ):
        source_of(tmp_path / "text.parquet")
    with pytest.raises(
        ConfigError, match=r"nowhere does not exist; set data.source = 'parquet:<file or folder>'"
    ):
        source_of(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder holds no .parquet file"):
        source_of(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"has no rows from 1 on, of 1; set data.source"):
        source_of(f"{tmp_path / 'empty.parquet'}[5:]")


def test_parquet_names_the_file_whose_pages_are_damaged(tmp_path: Path) -> None:
    path = write_table(tmp_path / "rows.parquet", numbered(0, 2000), row_group_size=2000)
    whole = bytearray(path.read_bytes())
    whole[100:1000] = bytes(900)
    path.write_bytes(whole)
    with pytest.raises(
        ConfigError, match=r"rows.parquet can't be read as Parquet: .*; set data.source"
    ):
        source_of(path)


@pytest.mark.parametrize("index", [-1, 2])
def test_parquet_row_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    source = source_of(write_table(tmp_path / "rows.parquet", numbered(0, 2)))
    with pytest.raises(IndexError, match=r"it has 2 rows"):
        source.row(index)
