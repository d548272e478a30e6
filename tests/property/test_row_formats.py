"""JSON lines and Parquet give the same rows, and JSON text keeps integers of any size."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from relax_events.config import DataConfig
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.events.json_text import format_json, parse_json

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = {"string": TEXTS, "integer": INTEGERS, "number": st.floats(allow_nan=False, width=32)}
NAMES = st.text("abcdefgh_", min_size=1, max_size=4)
SHAPES = st.recursive(
    st.sampled_from(["string", "integer", "boolean"]),
    lambda parts: (
        parts.map(lambda part: [part]) | st.dictionaries(NAMES, parts, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
"""A type of values: a name, a list of one type, or an object of types by key."""


def values(shape: Any, *, is_whole: bool = False) -> st.SearchStrategy[Any]:
    """Return values of a type; objects lack some keys unless they are whole."""
    if isinstance(shape, list):
        return st.lists(values(shape[0], is_whole=is_whole), min_size=int(is_whole), max_size=3)
    if isinstance(shape, dict):
        fields = {key: values(part, is_whole=is_whole) for key, part in shape.items()}
        if is_whole:
            return st.fixed_dictionaries(fields)
        return st.fixed_dictionaries({}, optional=fields)
    return st.booleans() if shape == "boolean" else SCALARS[shape]


@st.composite
def metadata_columns(draw: st.DrawFn) -> list[Any]:
    """Draw a column of objects and lists, the first of which has every key of its type."""
    shape = draw(
        st.lists(SHAPES, min_size=1, max_size=1) | st.dictionaries(NAMES, SHAPES, min_size=1)
    )
    return [draw(values(shape, is_whole=True)), *draw(st.lists(values(shape), max_size=3))]


def read_both(rows: list[dict[str, Any]], **keys: Any) -> tuple[list[PromptRow], list[PromptRow]]:
    """Read rows from JSON lines and from Parquet."""
    with TemporaryDirectory() as name:
        lines, table = Path(name, "rows.jsonl"), Path(name, "rows.parquet")
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), table)
        sources = [
            open_source(DataConfig.model_validate({"source": source, **keys}), seed=0)
            for source in (f"jsonl:{lines}", f"parquet:{table}")
        ]
        first, second = (
            [source.row(index) for index in range(source.num_rows)] for source in sources
        )
    return first, second


@settings(max_examples=60, deadline=None)
@given(metadata_columns(), st.sampled_from(["string", "integer", "boolean"]), st.data())
def test_metadata_and_labels_are_the_same_in_both_formats(
    column: list[Any], kind: str, data: st.DataObject
) -> None:
    labels = [data.draw(st.none() | values(kind)) for _ in column]
    rows = [
        {"prompt": "p", "answer": label, "extra": value}
        for label, value in zip(labels, column, strict=True)
    ]
    lines, table = read_both(rows)
    assert [row.answer for row in lines] == [row.answer for row in table]
    assert [parse_json(row.metadata) for row in lines] == [{"extra": value} for value in column]
    assert [parse_json(row.metadata) for row in table] == [{"extra": value} for value in column]


PROPERTIES = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "array"])},
    optional={"description": TEXTS, "items": st.just({"type": "string"})},
)
NULLABLE = st.fixed_dictionaries(
    {"type": st.just(["string", "null"]), "default": st.none() | TEXTS},
    optional={"enum": st.just(["a", None])},
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(NAMES, PROPERTIES, max_size=3)
        | st.dictionaries(NAMES.map("N{}".format), NULLABLE, max_size=2),
        min_size=2,
        max_size=5,
    )
)
def test_tools_are_the_same_in_both_formats(schemas: list[dict[str, Any]]) -> None:
    schemas = [{"first": {"type": "string", "description": "d"}}, *schemas]
    rows = [
        {
            "prompt": "p",
            "answer": "x",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": f"f{index}",
                        "parameters": {"type": "object", "properties": schema},
                    },
                }
            ],
        }
        for index, schema in enumerate(schemas)
    ]
    lines, table = read_both(rows, tools_key="tools")
    expected = [row["tools"] for row in rows]
    assert [parse_json(row.tools) for row in lines] == expected
    assert [parse_json(row.tools) for row in table] == expected


@given(
    st.recursive(
        st.integers(-(10**60), 10**60) | TEXTS | st.none() | st.booleans(),
        lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
    )
)
def test_json_text_keeps_integers_of_any_size(value: Any) -> None:
    text = format_json(value)
    assert parse_json(text) == json.loads(text) == value
