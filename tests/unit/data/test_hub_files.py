"""Files of a dataset on the hub, by its card and by its layout. The cases are layouts that the
documentation of the library `datasets` gives."""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.config.hub_names import parse_hub_name
from relax_events.data.hub_files import choose_files
from relax_events.errors import ConfigError

GSM8K = {
    "configs": [
        {
            "config_name": "main",
            "data_files": [
                {"split": "train", "path": "main/train-*"},
                {"split": "test", "path": "main/test-*"},
            ],
        },
        {
            "config_name": "socratic",
            "data_files": [{"split": "train", "path": ["socratic/train-*", "more/*.parquet"]}],
        },
    ]
}
GSM8K_FILES = [
    ".gitattributes",
    "README.md",
    "main/test-00000-of-00001.parquet",
    "main/train-00001-of-00002.parquet",
    "main/train-00000-of-00002.parquet",
    "more/a.parquet",
    "more/deeper/b.parquet",
    "socratic/train-00000-of-00001.parquet",
]
MAIN_TRAIN = ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]
PARQUET = ["README.md", "data/train-0.parquet", "data/test-0.parquet", "data/valid-0.parquet"]
CONVERTED = [
    "a/train/0000.parquet",
    "a/train/0001.parquet",
    "a/test/0000.parquet",
    "b/test/0.parquet",
]
CARD_OF_ONE = {"configs": [{"config_name": "default", "data_files": "**/*.jsonl"}]}


def choose(
    files: list[str], name: str, card: dict[str, Any] | None = None, split: str = ""
) -> list[str]:
    return choose_files(
        files, card or {}, parse_hub_name(name, "dataset"), split=split, key="data.source"
    )


@pytest.mark.parametrize(
    ("files", "card", "name", "chosen"),
    [
        (GSM8K_FILES, GSM8K, "hf:o/n:main:train", MAIN_TRAIN),
        (GSM8K_FILES, GSM8K, "hf:o/n:main:test", ["main/test-00000-of-00001.parquet"]),
        (
            GSM8K_FILES,
            GSM8K,
            "hf:o/n:socratic",
            ["more/a.parquet", "socratic/train-00000-of-00001.parquet"],
        ),
        (PARQUET, {}, "hf:o/n:train", ["data/train-0.parquet"]),
        (PARQUET, {}, "hf:o/n:default:validation", ["data/valid-0.parquet"]),
        (CONVERTED, {}, "hf:o/n:a:train", CONVERTED[:2]),
        (CONVERTED, {}, "hf:o/n:b", ["b/test/0.parquet"]),
        (["rows.jsonl", "dataset_infos.json"], {}, "hf:o/n", ["rows.jsonl"]),
        (["x/y/rows.jsonl"], CARD_OF_ONE, "hf:o/n", ["x/y/rows.jsonl"]),
        (["rows.jsonl"], CARD_OF_ONE, "hf:o/n", ["rows.jsonl"]),
        (
            ["d/train.parquet", "d/test.parquet", "e/train.parquet"],
            {"configs": [{"config_name": "one", "data_dir": "d"}]},
            "hf:o/n:one:train",
            ["d/train.parquet"],
        ),
        (
            ["a.parquet", "b.parquet"],
            {
                "configs": [
                    {"config_name": "default", "data_files": "a.parquet"},
                    {"config_name": "other", "data_files": "b.parquet"},
                ]
            },
            "hf:o/n",
            ["a.parquet"],
        ),
    ],
)
def test_files_of_a_name_are_chosen(
    files: list[str], card: dict[str, Any], name: str, chosen: list[str]
) -> None:
    assert choose(files, name, card) == chosen


def test_split_of_the_run_file_is_used_where_the_name_has_none() -> None:
    assert choose(PARQUET, "hf:o/n", split="test") == ["data/test-0.parquet"]
    assert choose(PARQUET, "hf:o/n:train", split="test") == ["data/train-0.parquet"]


@pytest.mark.parametrize(
    ("files", "card", "name", "error"),
    [
        (
            GSM8K_FILES,
            GSM8K,
            "hf:o/n",
            "several configs: main, socratic; name one in hf:o/n:CONFIG",
        ),
        (GSM8K_FILES, GSM8K, "hf:o/n:main", "several splits: train, test; name one"),
        (GSM8K_FILES, GSM8K, "hf:o/n:main:val", "no split 'val', only train, test"),
        (GSM8K_FILES, GSM8K, "hf:o/n:x:train", "no config 'x', only main, socratic"),
        (PARQUET, {}, "hf:o/n", "several splits: train, validation, test"),
        (
            ["README.md", "a.csv"],
            {},
            "hf:o/n",
            "holds no Parquet file.*@refs/convert/parquet:CONFIG",
        ),
        (
            ["a.csv"],
            {"configs": [{"config_name": "d", "data_files": "a.csv"}]},
            "hf:o/n",
            r"a\.csv is of another format.*@refs/convert/parquet:CONFIG:SPLIT",
        ),
        (["a.jsonl", "b.jsonl"], {}, "hf:o/n", r"\(2 files hold it\).*@refs/convert/parquet"),
    ],
)
def test_name_without_files_is_refused_with_what_there_is(
    files: list[str], card: dict[str, Any], name: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=f"^data.source: hf:o/n.*{error}"):
        choose(files, name, card)
