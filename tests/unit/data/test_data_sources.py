"""Sources of prompts: files of JSON lines and generated problems."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from relax_events.config import DataConfig
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage

GSM8K_ROW = {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def jsonl(path: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"source": f"jsonl:{path}", **settings})


def test_jsonl_reads_rows_in_any_order(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "rows.jsonl",
        *({"prompt": f"p{number}", "answer": number, "level": number % 2} for number in range(5)),
    )
    source = open_source(jsonl(path), seed=0)
    assert source.num_rows == 5
    assert source.row(3) == PromptRow([ChatMessage.of_text("user", "p3")], "3", '{"level":1}')
    assert source.row(0).messages[0].text == "p0"


def test_jsonl_reads_gsm8k_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "gsm8k.jsonl", GSM8K_ROW)
    row = open_source(jsonl(path, prompt_key="question"), seed=0).row(0)
    assert (row.messages[0].text, row.answer, row.metadata) == (
        "Two and two?",
        "2 + 2 = 4\n#### 4",
        "{}",
    )


def test_jsonl_reads_chat_messages_and_puts_the_system_prompt_first(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]
    path = write_lines(
        tmp_path / "chat.jsonl", {"prompt": chat, "answer": "x"}, {"prompt": own, "answer": "x"}
    )
    source = open_source(jsonl(path, system_prompt="be brief"), seed=0)
    assert [(message.role, message.text) for message in source.row(0).messages] == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert [message.text for message in source.row(1).messages] == ["mine", "a"]


def test_jsonl_skips_blank_lines_and_accepts_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "a", "answer": ""}\n   \n{"prompt": "b", "answer": ""}')
    source = open_source(jsonl(path), seed=0)
    assert [source.row(index).messages[0].text for index in range(source.num_rows)] == ["a", "b"]


def test_jsonl_needs_no_answers_when_configured_so(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"})
    assert open_source(jsonl(path, answer_key=""), seed=0).row(0).answer == ""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            {"question": "q", "answer": "a"},
            r"rows.jsonl:2 has no key 'prompt', only 'question', 'answer'; set data.prompt_key",
        ),
        (
            {"prompt": "q", "solution": "a"},
            r"rows.jsonl:2 has no key 'answer', only 'prompt', 'solution'; set data.answer_key",
        ),
        ("{broken", r"rows.jsonl:2 is not JSON: .*; each line must be one JSON object"),
        ([1, 2], r"rows.jsonl:2 is a list; each line must be one JSON object"),
        (
            {"prompt": 7, "answer": "a"},
            r"rows.jsonl:2: prompt is a number; a prompt is a non-empty string or a list of chat messages",
        ),
        ({"prompt": "", "answer": "a"}, r"rows.jsonl:2: prompt is an empty string"),
        ({"prompt": [], "answer": "a"}, r"rows.jsonl:2: prompt is an empty list"),
        ({"prompt": None, "answer": "a"}, r"rows.jsonl:2: prompt is null"),
        (
            {"prompt": [{"role": "user"}], "answer": "a"},
            r"rows.jsonl:2: prompt has message \{'role': 'user'\}; a chat message is an object",
        ),
    ],
)
def test_jsonl_names_the_line_that_is_invalid(tmp_path: Path, line: object, text: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "good", "answer": "a"}, line)
    with pytest.raises(ConfigError, match=text):
        open_source(jsonl(path), seed=0)


def test_jsonl_notices_a_row_that_changed_after_it_was_opened(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "good", "answer": "a"})
    source = open_source(jsonl(path), seed=0)
    path.write_text('{"prompt": "go')
    with pytest.raises(ConfigError, match=r"row 0 is not JSON"):
        source.row(0)


def test_jsonl_rejects_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.jsonl does not exist; set data.source"):
        open_source(jsonl(tmp_path / "nowhere.jsonl"), seed=0)
    with pytest.raises(ConfigError, match=r"has no rows"):
        open_source(jsonl(write_lines(tmp_path / "empty.jsonl")), seed=0)
    with pytest.raises(ConfigError, match=r"can't be read"):
        open_source(jsonl(tmp_path), seed=0)


@pytest.mark.parametrize("index", [-1, 1])
def test_jsonl_row_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    source = open_source(
        jsonl(write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"})), seed=0
    )
    with pytest.raises(IndexError, match=r"it has 1 rows"):
        source.row(index)


@pytest.mark.parametrize("source", ["rows.jsonl", "csv:rows.csv", "jsonl:", "reasoning_gym:"])
def test_open_source_rejects_unknown_values(source: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data.source must be one of 'jsonl:<path>', .*, 'synthetic_audio:<task>', 'synthetic_images:<task>'",
    ):
        open_source(DataConfig(source=source), seed=0)


@pytest.mark.parametrize(
    ("span", "expected"), [("[1:3]", ["1", "2"]), ("[3:]", ["3", "4"]), ("[:2]", ["0", "1"])]
)
def test_jsonl_slice_reads_only_its_own_rows(
    tmp_path: Path, span: str, expected: list[str]
) -> None:
    lines: list[object] = [{"prompt": "p", "answer": str(number)} for number in range(5)]
    lines[{"[1:3]": 0, "[3:]": 2, "[:2]": 4}[span]] = "broken"
    path = write_lines(tmp_path / "rows.jsonl", *lines)
    source = open_source(DataConfig(source=f"jsonl:{path}{span}"), seed=0)
    assert [source.row(index).answer for index in range(source.num_rows)] == expected


def test_jsonl_rejects_a_slice_beyond_its_end(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "answer": ""})
    with pytest.raises(ConfigError, match=r"rows.jsonl has no rows between 4 and 9; "):
        open_source(DataConfig(source=f"jsonl:{path}[4:9]"), seed=0)


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2"])
def test_jsonl_reads_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl.{suffix}"
    text = b"".join(
        json.dumps({"prompt": "p", "answer": number}).encode() + b"\n" for number in range(300)
    )
    if suffix == "gz":
        path.write_bytes(gzip.compress(text))
    else:
        with pa.output_stream(path) as stream:
            stream.write(text)
    source = open_source(jsonl(path), seed=0)
    assert (source.num_rows, source.row(299).answer, source.row(0).answer) == (300, "299", "0")
    path.write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=rf"rows.jsonl.{suffix} can't be read"):
        open_source(jsonl(path), seed=0)


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2"])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {},
            r"unpacks to more than 200 times its \d+ bytes; unpack it yourself if it is trusted",
        ),
        (
            {"MAX_UNPACKED_RATIO": 10**9, "MAX_UNPACKED_BYTES": 2**20},
            r"unpacks to more than 1048576 bytes; unpack it yourself",
        ),
    ],
)
def test_jsonl_rejects_a_decompression_bomb(
    tmp_path: Path,
    suffix: str,
    settings: dict[str, int],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.data.jsonl.MIN_CHECKED_BYTES", 2**20)
    path = tmp_path / f"rows.jsonl.{suffix}"
    with pa.CompressedOutputStream(
        pa.OSFile(str(path), "wb"), {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}[suffix]
    ) as file:
        for _ in range(16):
            file.write(b" " * 2**20)
    for name, value in settings.items():
        monkeypatch.setattr(f"relax_events.data.jsonl.{name}", value)
    with pytest.raises(ConfigError, match=text):
        open_source(jsonl(path), seed=0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_jsonl_rejects_files_that_are_not_regular(tmp_path: Path, name: str) -> None:
    """Reading a pipe without a writer would never end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} can't be read: it is no regular file"):
        open_source(jsonl(tmp_path / name), seed=0)
    with pytest.raises(ConfigError, match="can't be read: it is no regular file"):
        open_source(jsonl(Path("/dev/zero")), seed=0)


def test_parquet_rejects_files_that_are_not_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-00000.parquet")
    with pytest.raises(ConfigError, match=r"train-00000.parquet is not a regular file"):
        open_source(DataConfig(source=f"parquet:{tmp_path}"), seed=0)


def test_jsonl_skips_invalid_rows_up_to_the_limit(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": "p", "answer": str(number)} for number in range(4)]
    path = write_lines(tmp_path / "rows.jsonl", rows[0], "{", rows[1], {"prompt": "p"}, *rows[2:])
    source = open_source(jsonl(path, max_invalid_rows=2), seed=0)
    assert [source.row(index).answer for index in range(source.num_rows)] == ["0", "1", "2", "3"]
    assert [text.partition(" ")[0] for text in source.invalid_rows.examples] == [
        f"{path}:2",
        f"{path}:4",
    ]
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:4 has no key 'answer'.*; it is invalid row number 2, and data.max_invalid_rows is 1",
    ):
        open_source(jsonl(path, max_invalid_rows=1), seed=0)


def test_rows_read_columns_from_nested_objects(tmp_path: Path) -> None:
    columns = {
        "data": {"q": "why?", "truth": "so"},
        "id": 7,
        "source": "web",
        "tools": [{"name": "search"}],
    }
    path = write_lines(tmp_path / "rows.jsonl", columns)
    nested = {"prompt_key": "data.q", "answer_key": "data.truth", "tools_key": "tools"}
    row = open_source(jsonl(path, **nested, metadata_keys=["id"]), seed=0).row(0)
    assert row == PromptRow(
        [ChatMessage.of_text("user", "why?")], "so", '{"id":7}', '[{"name":"search"}]'
    )
    whole = open_source(jsonl(path, **nested), seed=0).row(0)
    assert json.loads(whole.metadata) == {"data": columns["data"], "id": 7, "source": "web"}
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:1 has no key 'data.answer', only 'data', 'id', .*; set data.answer_key",
    ):
        open_source(jsonl(path, **nested | {"answer_key": "data.answer"}), seed=0)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, ""),
        ([], ""),
        ("", ""),
        ('[{"name": "f"}]', '[{"name":"f"}]'),
        ([{"name": "f"}], '[{"name":"f"}]'),
    ],
)
def test_rows_give_their_tools_as_json(tmp_path: Path, tools: object, expected: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "answer": "", "t": tools})
    assert open_source(jsonl(path, tools_key="t"), seed=0).row(0).tools == expected


@pytest.mark.parametrize("tools", ["no json", '{"name": "f"}', ["f"], 3])
def test_rows_reject_invalid_tools(tmp_path: Path, tools: object) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "answer": "", "t": tools})
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:1: t is .*; tools are a list of objects, or its JSON text"
    ):
        open_source(jsonl(path, tools_key="t"), seed=0)


def test_rows_join_the_text_parts_of_a_message_and_refuse_other_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]
    path = write_lines(
        tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": parts}], "answer": ""}
    )
    assert open_source(jsonl(path), seed=0).row(0).messages[0].text == "what now?"
    write_lines(
        path,
        {
            "prompt": [{"role": "user", "content": [{"type": "file", "file": "x.pdf"}]}],
            "answer": "",
        },
    )
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:1: prompt has a part of type 'file'; a part is one of text, image_url",
    ):
        open_source(jsonl(path), seed=0)


def test_file_can_not_give_the_metadata_of_a_generated_problem(tmp_path: Path) -> None:
    row = {"prompt": "p", "answer": "x", "task": "number_sorting", "options": {}, "entry": {}}
    path = write_lines(tmp_path / "rows.jsonl", row)
    with pytest.raises(
        ConfigError,
        match=r"rows.jsonl:1 has the metadata entry, options, task of a generated problem.*"
        r"set data.metadata_keys",
    ):
        open_source(jsonl(path), seed=0)
    kept = open_source(jsonl(path, metadata_keys=["task"]), seed=0).row(0)
    assert json.loads(kept.metadata) == {"task": "number_sorting"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\n\r\n", " \r\n"])
def test_jsonl_reads_lines_of_either_end(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "a\r\nb", "answer": str(index)}) for index in range(3)]
    path.write_bytes("".join(line + end for line in lines).encode())
    source = open_source(jsonl(path), seed=0)
    rows = [source.row(index) for index in range(source.num_rows)]
    assert [(row.messages[0].text, row.answer) for row in rows] == [
        ("a\r\nb", str(index)) for index in range(3)
    ]
