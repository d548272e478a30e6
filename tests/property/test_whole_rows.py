"""Rows of any content reach label and metadata exactly, or are refused by their column's name.

Kinds K2, K10 and K11 of users' reports; test_row_formats.py has K3.
"""

from __future__ import annotations

import codecs
import copy
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from relax_events.config import DataConfig
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import Modality

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTEGERS = st.integers(-(10**40), 10**40) | st.sampled_from([2**63 - 1, 2**63, 2**64, -(2**63) - 1])
SCALARS = (
    st.none() | st.booleans() | INTEGERS | TEXTS | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
    max_leaves=8,
)


def read_lines(content: bytes, **keys: Any) -> list[PromptRow]:
    with TemporaryDirectory() as name:
        path = Path(name, "rows.jsonl")
        path.write_bytes(content)
        source = open_source(DataConfig.model_validate({"source": f"jsonl:{path}", **keys}), seed=0)
        return [source.row(index) for index in range(source.num_rows)]


def read_labels(column: pa.Array) -> list[str]:
    with TemporaryDirectory() as name:
        path = Path(name, "rows.parquet")
        pq.write_table(pa.table({"prompt": ["p"] * len(column), "answer": column}), path)
        source = open_source(DataConfig(source=f"parquet:{path}"), seed=0)
        return [source.row(index).answer for index in range(source.num_rows)]


@settings(max_examples=150, deadline=None)
@given(VALUES, VALUES, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_line_reaches_label_and_metadata_exactly(
    label: Any, value: Any, is_ascii: bool, has_mark: bool, end: str
) -> None:
    columns = {"prompt": "p", "answer": label, "extra": value}
    line = (json.dumps(columns, ensure_ascii=is_ascii) + end).encode()
    first, second = read_lines((codecs.BOM_UTF8 if has_mark else b"") + line + line)
    assert first == second
    assert repr(parse_json(first.metadata)) == repr({"extra": value})
    if isinstance(label, str) or label is None:
        assert first.answer == (label or "")
    else:
        assert repr(parse_json(first.answer)) == repr(label)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]))
def test_file_in_another_encoding_is_refused_by_its_name(value: Any, encoding: str) -> None:
    line = json.dumps({"prompt": "p", "extra": value}, ensure_ascii=False) + "\n"
    with pytest.raises(ConfigError, match=f"rows.jsonl:1 is {encoding.upper()[:6]}; convert"):
        read_lines(line.encode(encoding), answer_key="")


@settings(max_examples=60, deadline=None)
@given(st.text("ab", max_size=9), st.sampled_from("éüñ"), st.text("cd", max_size=9))
def test_byte_of_latin_1_is_named_with_its_position(
    before: str, character: str, after: str
) -> None:
    line = json.dumps({"prompt": before + character + after}, ensure_ascii=False).encode("latin-1")
    position = line.index(character.encode("latin-1")) + 1
    text = f"is not UTF-8: byte {ord(character):#04x} at position {position}; convert"
    with pytest.raises(ConfigError, match=text):
        read_lines(line, answer_key="")


def bury(draw: st.DrawFn, value: Any) -> Any:
    """Put a value into objects and lists."""
    for _ in range(draw(st.integers(0, 4))):
        neighbour = draw(SCALARS)
        value = [neighbour, value] if draw(st.booleans()) else {"a": neighbour, "b": value}
    return value


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e400"]))
def test_number_outside_of_json_is_null_or_named(data: st.DataObject, number: str) -> None:
    value = bury(data.draw, "THE MARK")
    column = json.dumps({"prompt": "p", "answer": "x", "extra": value})
    line = column.replace('"THE MARK"', number).encode()
    (row,) = read_lines(line)
    expected = json.loads(json.dumps({"extra": value}).replace('"THE MARK"', "null"))
    assert repr(parse_json(row.metadata)) == repr(expected)
    assert read_lines(line, metadata_keys=[])[0].metadata == "{}"
    for keys in ({"metadata_keys": ["extra"]}, {"answer_key": "extra"}):
        if keys == {"answer_key": "extra"} and value == "THE MARK" and "e" in number:
            continue  # a label of 1e999 is its text
        with pytest.raises(ConfigError, match=f"rows.jsonl:1: extra holds {number}"):
            read_lines(line, **keys)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(0xD800, 0xDFFF), TEXTS, st.booleans())
def test_half_of_a_character_is_named_with_its_column(
    data: st.DataObject, half: int, text: str, is_key: bool
) -> None:
    part = chr(half) + text
    value = bury(data.draw, {part: 1} if is_key else part)
    line = json.dumps({"prompt": "p", "answer": "x", "extra": value}).encode()
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: extra holds \\u{half:x} alone"):
        read_lines(line)
    assert read_lines(line, metadata_keys=[])[0].answer == "x"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 20).flatmap(
        lambda scale: st.tuples(
            st.just(scale),
            st.lists(st.none() | st.integers(-(10**40), 10**40), min_size=1, max_size=4),
        )
    )
)
def test_decimal_label_keeps_all_its_digits(column: tuple[int, list[int | None]]) -> None:
    scale, digits = column
    exact = [
        None if one is None else Decimal((int(one < 0), tuple(map(int, str(abs(one)))), -scale))
        for one in digits
    ]
    labels = read_labels(pa.array(exact, pa.decimal256(70, scale)))
    for label, number in zip(labels, exact, strict=True):
        if number is None:
            assert label == ""
        else:
            assert Decimal(label) == number
            assert ("." in label) == (number != number.to_integral_value())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([pa.float32(), pa.float64()]),
)
def test_float_label_is_the_shortest_number_of_its_column(
    numbers: list[float | None], kind: pa.DataType
) -> None:
    for label, number in zip(read_labels(pa.array(numbers, kind)), numbers, strict=True):
        if number is None:
            assert label == ""
            continue
        assert np.float32(label) == np.float32(number)
        assert not label.endswith(".0") or abs(number) >= 2**53
        if kind == pa.float64():
            assert float(label) == number


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | st.datetimes(), min_size=1, max_size=4),
    st.sampled_from(["s", "ms", "us"]),
    st.booleans(),
)
def test_time_label_is_its_text(times: list[datetime | None], unit: str, has_zone: bool) -> None:
    digits = {"s": 0, "ms": 3, "us": 6}[unit]
    rounded = [
        None
        if one is None
        else one.replace(microsecond=one.microsecond // 10 ** (6 - digits) * 10 ** (6 - digits))
        for one in times
    ]
    column = pa.array(rounded, pa.timestamp(unit, tz="UTC" if has_zone else None))
    for label, moment in zip(read_labels(column), rounded, strict=True):
        if moment is None:
            assert label == ""
        else:
            assert datetime.fromisoformat(label) == (
                moment.replace(tzinfo=UTC) if has_zone else moment
            )


FILES = st.sampled_from(
    [
        ({"type": "image", "image": "a.png"}, Modality.IMAGE, "a.png"),
        (
            {"type": "image_url", "image_url": {"url": "https://h/b.png"}},
            Modality.IMAGE,
            "https://h/b.png",
        ),
        ({"type": "video", "video": "c.mp4"}, Modality.VIDEO, "c.mp4"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            Modality.AUDIO,
            "data:audio/wav;base64,UklG",
        ),
    ]
)
MENTIONS = TEXTS | st.sampled_from(["<image>", "an <audio> tag", "<video><image>", "[image]"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(MENTIONS | FILES, min_size=1, max_size=5), min_size=1, max_size=3))
def test_media_and_texts_that_mention_them_keep_their_order(contents: list[list[Any]]) -> None:
    messages = [
        {
            "role": "user",
            "content": [
                copy.deepcopy(part[0])
                if isinstance(part, tuple)
                else {"type": "text", "text": part}
                for part in content
            ],
        }
        for content in contents
    ]
    row = {"prompt": messages, "answer": "x"}
    (read,) = read_lines(json.dumps(row).encode(), media_root="/data")
    files = [part for content in contents for part in content if isinstance(part, tuple)]
    assert [(item.modality, item.source) for item in read.media] == [part[1:] for part in files]
    for message, content in zip(read.messages, contents, strict=True):
        shown = "".join(
            f"\0{part.kind}" if part.text is None else part.text for part in message.parts
        )
        assert shown == "".join(
            f"\0{part[1]}" if isinstance(part, tuple) else part for part in content
        )
