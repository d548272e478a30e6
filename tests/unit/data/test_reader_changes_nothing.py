"""Values of rows reach labels, metadata, tools and messages as the file has them.

The cases K2, K3, K10 and K11 are reports of users of other engines.
"""

from __future__ import annotations

import base64
import codecs
import gzip
import json
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from relax_events.config import DataConfig
from relax_events.data import row_values
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import Modality

HUGE = 2**100
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": HUGE}}}
PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def read_lines(folder: Path, content: str | bytes, **settings: Any) -> PromptSource:
    path = folder / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(DataConfig.model_validate({"source": f"jsonl:{path}", **settings}), seed=0)


def read_line(folder: Path, line: str, **settings: Any) -> PromptRow:
    return read_lines(folder, line + "\n", **settings).row(0)


def read_table(folder: Path, table: pa.Table, **settings: Any) -> list[PromptRow]:
    path = folder / "rows.parquet"
    pq.write_table(table, path)
    source = open_source(
        DataConfig.model_validate({"source": f"parquet:{path}", **settings}), seed=0
    )
    return [source.row(index) for index in range(source.num_rows)]


def labels(rows: list[PromptRow]) -> list[str]:
    return [row.answer for row in rows]


@pytest.mark.parametrize(
    ("written", "label"),
    [
        (str(HUGE), str(HUGE)),  # K2a
        (str(HUGE + 1), str(HUGE + 1)),
        (str(2**63), str(2**63)),
        (str(-(2**63) - 1), str(-(2**63) - 1)),
        (str(2**64), str(2**64)),
        ("9" * 400, "9" * 400),
        ("0", "0"),
        ("3.10", "3.10"),
        ("3.14159265358979323846264338327950288", "3.14159265358979323846264338327950288"),
        ("1e400", "1e400"),
        ("18.0", "18.0"),
        ("true", "true"),
        ("null", ""),  # K2b
        (f"[{HUGE}, null]", f"[{HUGE},null]"),
        (f'{{"a": {HUGE}}}', f'{{"a":{HUGE}}}'),
        ('"null"', "null"),
    ],
)
def test_label_of_json_lines_is_as_written(tmp_path: Path, written: str, label: str) -> None:
    assert read_line(tmp_path, f'{{"prompt": "p", "answer": {written}}}').answer == label


def test_integers_keep_their_digits_in_metadata_tools_and_calls(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "maximum": HUGE}}
    chat = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    columns = {"prompt": chat, "answer": "x", "tools": [tool], "big": 2**64, "deep": [{"n": HUGE}]}
    row = read_line(tmp_path, json.dumps(columns), tools_key="tools")
    assert parse_json(row.metadata) == {"big": 2**64, "deep": [{"n": HUGE}]}
    assert parse_json(row.tools) == [tool]
    assert row.messages[1].tool_calls[0].arguments == f'{{"a":{HUGE}}}'
    texts = columns | {"tools": json.dumps([tool])}
    assert read_line(tmp_path, json.dumps(texts), tools_key="tools").tools == row.tools


def test_integer_of_too_many_digits_is_refused_by_its_length(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:1 is not JSON: an integer has more than 4,300 digits; write a string",
    ):
        read_line(tmp_path, f'{{"prompt": "p", "answer": {"9" * 5000}}}')


def test_null_on_the_way_to_a_label_is_no_reference(tmp_path: Path) -> None:
    row = read_line(
        tmp_path,
        '{"prompt": "p", "reward_model": null}',
        answer_key="reward_model.ground_truth",
    )
    assert row.answer == ""
    table = pa.Table.from_pylist(
        [
            {"prompt": "p", "reward_model": {"ground_truth": None, "style": "rule"}},
            {"prompt": "p", "reward_model": {"ground_truth": "7", "style": "rule"}},
        ]
    )
    assert labels(read_table(tmp_path, table, answer_key="reward_model.ground_truth")) == ["", "7"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([18.0, 19.0, None]), ["18", "19", ""]),  # K2c
        (pa.array([18.0, 19.5, None]), ["18", "19.5", ""]),
        (pa.array([2.0**53, 1e300, -0.0]), ["9007199254740992.0", "1e+300", "0"]),
        (pa.array([18.0, 19.0, None], pa.float32()), ["18", "19", ""]),
        (pa.array([1, None, 2**63 - 1]), ["1", "", str(2**63 - 1)]),
        (pa.array([2**64 - 1, 0, None], pa.uint64()), [str(2**64 - 1), "0", ""]),
        (
            pa.array([Decimal(10**37), None, Decimal(-1)], pa.decimal128(38, 0)),
            [str(10**37), "", "-1"],
        ),
        (pa.array([Decimal(HUGE), Decimal(2), None], pa.decimal256(60, 0)), [str(HUGE), "2", ""]),
        (
            pa.array([Decimal("3.10"), Decimal("18.00"), None], pa.decimal128(10, 2)),
            ["3.10", "18", ""],
        ),
        (pa.array(["x", None, "y"]).dictionary_encode(), ["x", "", "y"]),
        (pa.array([True, None, False]), ["true", "", "false"]),
        (pa.array([0.1, 3.14, None], pa.float32()), ["0.1", "3.14", ""]),
        (pa.array([np.float16(0.1), None, np.float16(2)]), ["0.1", "", "2"]),
        (pa.array([date(2020, 1, 2), None, date(1, 1, 1)]), ["2020-01-02", "", "0001-01-01"]),
        (
            pa.array([1577934245000006, None, None], pa.timestamp("us")),
            ["2020-01-02T03:04:05.000006", "", ""],
        ),
    ],
)
def test_label_of_parquet_is_the_number_that_the_column_means(
    tmp_path: Path, column: pa.Array, expected: list[str]
) -> None:
    table = pa.table({"prompt": ["a", "b", "c"], "answer": column})
    assert labels(read_table(tmp_path, table)) == expected


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([1], pa.timestamp("ns")), r"column answer of type timestamp\[ns\] can't be read"),
        (pa.array([3 * 10**17], pa.timestamp("us")), "can't be read: date value out of range"),
        (pa.array([b"x"]), "row 0: answer holds a bytes"),
        (pa.array([timedelta(1)]), "row 0: answer holds a timedelta"),
    ],
)
def test_label_without_a_text_is_named(tmp_path: Path, column: pa.Array, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_table(tmp_path, pa.table({"prompt": ["p"], "answer": column}))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["p"]), pa.array(["x"]), pa.array(["y"])]
    table = pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    with pytest.raises(ConfigError, match=r"rows.parquet has two columns answer; rename one"):
        read_table(tmp_path, table)


def test_parquet_without_the_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 0 has no key 'prompt'"):
        read_table(tmp_path, pa.table({"answer": ["x"]}), metadata_keys=[], answer_key="")


def test_whole_floats_of_a_parquet_column_are_integers_in_templates_and_metadata(
    tmp_path: Path,
) -> None:
    table = pa.table({"n": [3.0, None], "answer": ["x", "y"], "level": [2.0, None]})
    row = read_table(tmp_path, table.slice(0, 1), prompt_template="{n} apples")[0]
    assert row.messages[0].text == "3 apples"
    rows = read_table(tmp_path, table, prompt_key="answer", metadata_keys=["level"])
    assert [row.metadata for row in rows] == ['{"level":2}', '{"level":null}']


def build_tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "tools",
    [
        [
            [build_tool("add", a={"type": "integer"})],
            [build_tool("find", text={"type": "string"})],
        ],  # K3a
        [[build_tool("add", a={"type": "integer"}), build_tool("find", text={"type": "string"})]],
        [
            [build_tool("add", a={"type": ["string", "null"], "default": None})],
            [build_tool("add", a={"type": ["string", "null"], "default": "x"})],
        ],
        [[build_tool("add", a={"anyOf": [{"type": "string"}, {"type": "null"}], "default": None})]],
        [[build_tool("add", a={"type": "string", "default": None})]],
        [[build_tool("add", a={"const": None}, b={"const": "x"})]],
        [[build_tool("add", a={"anyOf": [{"const": None}, {"type": "string"}]})]],
        [[build_tool("add", a={"enum": ["x", None]}, b={"type": "string"})]],
        [[build_tool("add", a={"enum": ["x", None], "default": None}, b={"default": "y"})]],
        [[build_tool("add", a={"type": "string", "nullable": True, "default": None})]],
        [[build_tool("none")], [build_tool("one", a={"type": "string", "required": True})]],
        [
            [build_tool("add", a={"oneOf": [{"type": "null"}, {"type": "integer"}]})],
            [build_tool("add", a={"type": "object", "properties": {"b": {"type": "string"}}})],
        ],
    ],
)
def test_tools_of_parquet_are_those_of_json_lines(
    tmp_path: Path, tools: list[list[dict[str, Any]]]
) -> None:
    rows = [{"prompt": "p", "answer": "x", "tools": one} for one in tools]
    lines = read_lines(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), tools_key="tools")
    from_table = read_table(tmp_path, pa.Table.from_pylist(rows), tools_key="tools")
    for index, row in enumerate(from_table):
        assert parse_json(row.tools) == parse_json(lines.row(index).tools) == tools[index]


def test_padding_of_messages_calls_and_metadata_is_removed(tmp_path: Path) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    rows = [
        {
            "prompt": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "tool_calls": [call(a=1), call(b=[{"c": "x"}, {"d": 2}])]},
                {"role": "tool", "content": "ok", "name": "f"},
            ],
            "answer": "x",
            "extra": {"tests": [{"input": 1}, {"output": "y"}]},
        },
        {"prompt": [{"role": "user", "content": "two"}], "answer": "y", "extra": {"level": 3}},
    ]
    lines = read_lines(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    for index, row in enumerate(read_table(tmp_path, pa.Table.from_pylist(rows))):
        assert row == lines.row(index)


def test_nulls_that_a_row_means_are_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "answer": "x", "level": None, "extra": {"hint": None, "tags": ["a", None]}},
        {"prompt": "p", "answer": "x", "level": 2, "extra": {"hint": None, "tags": []}},
    ]
    expected = [{key: row[key] for key in ("level", "extra")} for row in rows]
    lines = read_lines(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    table = read_table(tmp_path, pa.Table.from_pylist(rows))
    assert [parse_json(row.metadata) for row in table] == expected
    assert [parse_json(lines.row(index).metadata) for index in range(2)] == expected
    padded = '{"prompt": "p", "answer": "x", "tools": [{"a": {"text": null}}]}'
    assert read_line(tmp_path, padded, tools_key="tools").tools == '[{"a":{"text":null}}]'


def test_map_of_arrow_is_an_object(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct({"type": pa.string(), "default": pa.string()}))
    column = pa.array([[("a", {"type": "integer"}), ("b", None)]], kind)
    table = pa.table({"prompt": ["p"], "answer": ["x"], "properties": column})
    (row,) = read_table(tmp_path, table)
    assert parse_json(row.metadata) == {"properties": {"a": {"type": "integer"}, "b": None}}


ROW = '{"prompt": "p", "answer": "é"}\n'


@pytest.mark.parametrize(
    "content",
    [
        codecs.BOM_UTF8 + ROW.encode(),  # K10c
        codecs.BOM_UTF8 + ROW.replace("\n", "\r\n").encode(),
        codecs.BOM_UTF8 + b"\n" + ROW.encode(),
        codecs.BOM_UTF8 + ROW.encode() + codecs.BOM_UTF8 + ROW.encode(),
    ],
)
def test_byte_order_mark_is_no_part_of_a_row(tmp_path: Path, content: bytes) -> None:
    source = read_lines(tmp_path, content)
    assert [source.row(index).answer for index in range(source.num_rows)] == (
        ["é"] * content.count(b"prompt")
    )
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(content))
    assert open_source(DataConfig(source=f"jsonl:{packed}"), seed=0).row(0).answer == "é"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (ROW.encode("utf-16"), "rows.jsonl:1 is UTF-16; convert the file to UTF-8"),  # K10d
        (ROW.encode("utf-16-le"), "rows.jsonl:1 is UTF-16; convert the file to UTF-8"),
        (ROW.encode("utf-16-be"), "rows.jsonl:1 is UTF-16; convert the file to UTF-8"),
        (ROW.encode("utf-32"), "rows.jsonl:1 is UTF-32; convert the file to UTF-8"),
        (
            ROW.encode("latin-1"),
            "rows.jsonl:1 is not UTF-8: byte 0xe9 at position 28; convert the file to UTF-8",
        ),
        (
            (ROW + ROW.replace("é", "中")).encode("gbk"),
            "rows.jsonl:1 is not UTF-8: byte 0xa8 at position 28",
        ),
        (ROW.replace("é", "\\ud83d").encode(), r"rows.jsonl:1: answer holds \ud83d alone"),
        (ROW.replace('"p"', '"\\ude00 p"').encode(), r"rows.jsonl:1: prompt holds \ude00 alone"),
        (ROW.replace("}", ', "a\\udc00": 1}').encode(), r"rows.jsonl:1: a\udc00 holds"),
        (
            ROW.replace("}", ', "deep": [{"x": "\\ud800\\ud800"}]}').encode(),
            r"rows.jsonl:1: deep holds \ud800 alone",
        ),
        (ROW.replace('"é"', "NaN").encode(), "rows.jsonl:1: answer holds NaN, which is no number"),
        (ROW.replace('"é"', "[-Infinity]").encode(), "rows.jsonl:1: answer holds -Infinity"),
        (
            ROW.replace('"p"', '[{"role": "user", "tool_calls": [NaN]}]').encode(),
            "a tool call without a function's name",
        ),
        (ROW.replace("}", ', "p": 1, "p": 1}').encode(), "rows.jsonl:1: key 'p' occurs twice"),
        (ROW.replace("}", ', "d": [{"x": 1, "x": 2}]}').encode(), "key 'x' occurs twice; keep one"),
        (("[" * 100_000).encode(), "rows.jsonl:1 is not JSON: it is nested too deep"),
        (
            ROW.replace('"é"', "[" * 300 + "]" * 300).encode(),
            "rows.jsonl:1: answer can't be written as JSON: it is nested too deep",
        ),
    ],
)
def test_what_is_no_json_text_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_lines(tmp_path, content)
    assert text in str(caught.value)


def test_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    assert read_line(tmp_path, ROW.replace("é", "\\ud83d\\ude00").strip()).answer == "😀"


def test_prompt_template_writes_a_boolean_as_the_file_does(tmp_path: Path) -> None:
    row = json.dumps({"b": True, "answer": "x"})
    assert read_line(tmp_path, row, prompt_template="is it {b}?").messages[0].text == "is it true?"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_number_outside_of_json_in_an_unnamed_column_is_null(tmp_path: Path, number: str) -> None:
    line = ROW.strip().replace("}", f', "score": {number}, "deep": [{{"x": {number}}}]}}')
    assert read_line(tmp_path, line).metadata == '{"score":null,"deep":[{"x":null}]}'
    assert read_line(tmp_path, line, metadata_keys=[]).metadata == "{}"
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: score holds {number}, which is no"):
        read_line(tmp_path, line, metadata_keys=["score"])


def test_nan_of_parquet_is_named_as_a_label_and_null_elsewhere(tmp_path: Path) -> None:
    nan = float("nan")
    table = pa.table({"prompt": ["p"], "answer": ["x"], "score": [nan]})
    assert [row.metadata for row in read_table(tmp_path, table)] == ['{"score":null}']
    with pytest.raises(ConfigError, match=r"rows.parquet, row 0: score holds NaN"):
        read_table(tmp_path, table, answer_key="score")


def test_row_too_large_for_a_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_values, "MAX_ROW_BYTES", 1000)
    columns = {"prompt": "p" * 200, "answer": "x", "tests": ["é" * 300, "y" * 300], "other": "z"}
    line = json.dumps(columns)
    text = (
        r"rows.jsonl:1 has 11\d\d bytes of text, at most 1000 fit into a record; "
        r"shorten tests, which has 6\d\d characters, or leave it out of metadata_keys"
    )
    with pytest.raises(ConfigError, match=text):
        read_line(tmp_path, line)
    with pytest.raises(ConfigError, match=r"rows.parquet, row 0 has .* shorten tests"):
        read_table(tmp_path, pa.Table.from_pylist([columns]))
    source = read_lines(tmp_path, f"{line}\n{ROW}", max_invalid_rows=1)
    assert (source.num_rows, source.row(0).answer) == (1, "é")
    assert read_line(tmp_path, line, metadata_keys=["other"]).answer == "x"


IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


@pytest.mark.parametrize(
    ("part", "modality", "source"),
    [
        ({"type": "image_url", "image_url": {"url": PNG}}, IMAGE, PNG),  # K11a
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, IMAGE, PNG),
        ({"type": "image_url", "image_url": PNG}, IMAGE, PNG),
        ({"type": "image", "image": PNG}, IMAGE, PNG),
        ({"type": "image", "image": "a.png"}, IMAGE, "a.png"),
        ({"type": "image", "image": "file:///data/a.png"}, IMAGE, "/data/a.png"),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, IMAGE, "a.png"),
        ({"type": "image", "url": "https://host/a.png"}, IMAGE, "https://host/a.png"),
        ({"type": "image", "path": "a.png", "image": None, "text": None}, IMAGE, "a.png"),
        ({"type": "video", "video": "a.mp4"}, VIDEO, "a.mp4"),
        ({"type": "video_url", "video_url": {"url": "https://h/a.mp4"}}, VIDEO, "https://h/a.mp4"),
        ({"type": "audio", "audio": "a.wav"}, AUDIO, "a.wav"),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, AUDIO, "a.wav"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            AUDIO,
            "data:audio/wav;base64,UklG",
        ),
    ],
)
def test_media_parts_of_messages_are_read_without_a_column(
    tmp_path: Path, part: dict[str, Any], modality: Modality, source: str
) -> None:
    content = [{"type": "text", "text": "see <image>: "}, part, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "x"}
    read = read_line(tmp_path, json.dumps(row), media_root=str(tmp_path))
    shown = [(part.kind, part.text) for part in read.messages[0].parts]
    assert shown == [(Modality.TEXT, "see <image>: "), (modality, None), (Modality.TEXT, "?")]
    assert [(item.modality, item.source) for item in read.media] == [(modality, source)]
    (from_table,) = read_table(tmp_path, pa.Table.from_pylist([row]), media_root=str(tmp_path))
    assert (from_table.messages, len(from_table.media)) == (read.messages, 1)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image"}, "without a file; name the column of its files in data.multimodal_keys"),
        (
            {"type": "image", "image": "a.png", "max_pixels": 9},
            "with 'max_pixels'; its file is under image or",
        ),
        ({"type": "image", "source": {"type": "base64"}}, "with 'source'; its file is under image"),
        ({"type": "image", "image": "a.png", "path": "b.png"}, "with image and path; keep one of"),
        (
            {"type": "text", "text": "a", "image": "a.png"},
            "a part of type 'text' without text, or with a file",
        ),
        ({"type": "video", "video": ["a.png", "b.png"]}, "is a list; media are paths"),
        ({"type": "file", "file": {"file_id": "x"}}, "a part of type 'file'; a part is one of"),
        ({"type": ["image"]}, "a part of type ['image']"),
        ({"type": "image_url"}, "is a NoneType; media are paths"),
        (
            {"type": "image_url", "image_url": {"url": PNG}, "max_pixels": 9},
            "a part of type 'image_url' has 'max_pixels'",
        ),
        (
            {"type": "video_url", "video_url": {"url": PNG, "fps": 1}},
            "a part of type 'video_url' has 'fps'; settings of media are those of model.media",
        ),
        ("text", "a part of type None"),
    ],
)
def test_other_parts_are_named(tmp_path: Path, part: Any, text: str) -> None:
    row = {"prompt": [{"role": "user", "content": [part]}], "answer": "x"}
    with pytest.raises(ConfigError) as caught:
        read_line(tmp_path, json.dumps(row))
    assert text in str(caught.value)
    assert "rows.jsonl:1: prompt" in str(caught.value)


def test_parts_and_marks_take_the_files_of_columns_and_files_of_their_own(
    tmp_path: Path,
) -> None:
    content = [
        {"type": "image"},
        {"type": "text", "text": "an <image> tag, <audio>"},
        {"type": "image", "image": "mine.png"},
        {"type": "image", "text": None},
    ]
    row = {
        "prompt": [{"role": "user", "content": content}],
        "answer": "x",
        "images": ["a.png", "b.png"],
        "clips": "a.wav",
    }
    keys = {"image": "images", "audio": "clips"}
    read = read_line(tmp_path, json.dumps(row), multimodal_keys=keys)
    assert [item.source for item in read.media] == ["a.png", "a.wav", "mine.png", "b.png"]
    assert read.messages[0].parts[1].text == "an <image> tag, "


def test_media_behind_the_prompt_are_refused(tmp_path: Path) -> None:
    question = {"role": "user", "content": [{"type": "image", "image": PNG}]}
    answer = {"role": "assistant", "content": "a"}
    row = {"chat": [question, answer, question, answer]}
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 has media after the prompt"):
        read_line(tmp_path, json.dumps(row), conversation_key="chat")
    last = read_line(tmp_path, json.dumps(row), conversation_key="chat", train_on="last")
    assert len(last.media) == 2
