"""The doctor shows how the first row was read: six datasets that other readers change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.file_checks import check_context_length, check_data
from relax_events.launcher.first_row import check_first_rows
from relax_events.packages.examples.tiny_models import make_tiny
from tests.unit.image_model import build_image_model, image_file

MakeRunConfig = Callable[..., RunConfig]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2**100}}}]
TALK = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "done"},
    {"role": "user", "content": "and?"},
]


def build_tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def write_lines(path: Path, *rows: Any, encoding: str = "utf-8") -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding=encoding)
    return f"jsonl:{path}"


def write_table(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path)
    return f"parquet:{path}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "own.jinja").write_text(TEMPLATE)
    return make_tiny(folder / "tiny", corpus=["abc"], hidden_size=32, num_layers=1)


@pytest.fixture
def show(make_run_config: MakeRunConfig, model: Path) -> Callable[..., str]:
    def show(source: str, **keys: Any) -> str:
        template = {"chat_template_file": str(model.parent / "own.jinja")}
        data = {"source": source, **template, **keys}
        run = CheckedRun(make_run_config(data=data, model={"path": str(model)}))
        return check_first_rows(run).partition("; tokens: ")[0]

    return show


def test_integers_and_nulls(show: Callable[..., str], tmp_path: Path) -> None:
    row = {"prompt": "2^100?", "answer": 2**100, "hint": None}
    assert show(write_lines(tmp_path / "big.jsonl", row)) == (
        "prompt: user '2^100?'; label: '1267650600228229401496703205376'; targets: none; "
        "tools: none; media: none; metadata: hint"
    )
    assert "; label: none; " in show(
        write_lines(tmp_path / "null.jsonl", {"prompt": "say", "answer": None})
    )


def test_column_of_pandas(show: Callable[..., str], tmp_path: Path) -> None:
    table = pa.table({"prompt": ["9 + 9?", "?"], "answer": [18.0, None]})
    assert "; label: '18'; " in show(write_table(tmp_path / "rows.parquet", table))


def test_tools_of_parquet(show: Callable[..., str], tmp_path: Path) -> None:
    tools = [[build_tool("add", "a")], [build_tool("find", "text")]]
    rows = [{"prompt": "p", "answer": "x", "tools": one} for one in tools]
    source = write_table(tmp_path / "rows.parquet", pa.Table.from_pylist(rows))
    assert "; tools: add(a); " in show(source, tools_key="tools")


def test_calls_and_started_turn(show: Callable[..., str], tmp_path: Path) -> None:
    talk = [*TALK, {"role": "assistant", "content": "<think>\n"}]
    source = write_lines(tmp_path / "rows.jsonl", {"prompt": talk, "answer": "x"})
    call = """'add({"a":1267650600228229401496703205376})'"""
    assert show(source).startswith(
        f"prompt: user 'add', assistant {call}, tool 'done', user 'and?', assistant '<think>\\n'; "
    )


def test_byte_order_mark_and_long_texts(show: Callable[..., str], tmp_path: Path) -> None:
    row = {"prompt": "p" * 100, "answer": "é", "score": float("nan")}
    source = write_lines(tmp_path / "rows.jsonl", row, encoding="utf-8-sig")
    assert show(source) == (
        f"prompt: user '{'p' * 60}'... of 100 characters; label: 'é'; targets: none; tools: none; "
        "media: none; metadata: score"
    )


def test_media_part(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_file(48, 32))
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "an <image>?"}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "x"}
    data = {"source": write_lines(tmp_path / "rows.jsonl", row), "media_root": str(tmp_path)}
    folder = build_image_model()
    run = CheckedRun(make_run_config(data=data, model={"path": str(folder)}))
    text = check_first_rows(run)
    num_bytes = (tmp_path / "a.png").stat().st_size
    assert "prompt: user '[image]an <image>?'; " in text
    assert f"; media: image of {num_bytes} bytes, 48 x 32; " in text


def test_tokens_end_with_the_head_of_the_turn(
    make_run_config: MakeRunConfig, model: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", {"prompt": "abc", "answer": "x"})
    template = str(model.parent / "own.jinja")
    config = make_run_config(
        data={"source": source, "chat_template_file": template}, model={"path": str(model)}
    )
    _, _, tokens = check_first_rows(CheckedRun(config)).partition("; tokens: ")
    assert int(tokens.split(",")[0]) > 3
    assert tokens.endswith("istant: '")
    away = make_run_config(data={"source": source})
    assert check_first_rows(CheckedRun(away)).endswith("tokens: once the model is made")


def test_field_that_the_template_leaves_out_fails_the_check(
    make_run_config: MakeRunConfig, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    source = write_lines(tmp_path / "rows.jsonl", {"prompt": TALK, "answer": "x"})
    config = make_run_config(
        data={"source": source, "chat_template_file": str(file)}, model={"path": str(model)}
    )
    with pytest.raises(PoisonSample, match=r"the chat template does not show tool_calls"):
        check_first_rows(CheckedRun(config))
    with pytest.raises(
        ConfigError, match=r"all of the first 1 rows are refused: .* does not show tool_calls"
    ):
        check_context_length(CheckedRun(config))


def test_media_part_needs_a_model_that_reads_media(
    make_run_config: MakeRunConfig, model: Path, tmp_path: Path
) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "x"}
    source = write_lines(tmp_path / "rows.jsonl", row)
    config = make_run_config(data={"source": source}, model={"path": str(model)})
    with pytest.raises(ConfigError, match=r"media of kind image and model.path .* reads text only"):
        check_data(CheckedRun(config))


MARKED = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]


def write_docs_datasets(folder: Path) -> list[dict[str, str]]:
    """Write the six datasets of docs/how-to/datasets.md; return the settings of each."""
    (folder / "a.png").write_bytes(image_file(48, 32))
    pandas = pa.table({"prompt": ["9 + 9?", "?"], "answer": [18.0, None]})
    tools = [
        {"prompt": prompt, "answer": "3", "tools": [build_tool(name, parameter)]}
        for prompt, name, parameter in (("1 + 2?", "add", "a"), ("?", "find", "text"))
    ]
    talk = [
        {"role": "user", "content": "is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": WEATHER},
        {"role": "tool", "content": "22 degrees"},
        {"role": "assistant", "content": "<think>\n"},
    ]
    question = {"type": "text", "text": "what is an <image> tag?"}
    content = [{"type": "image", "image": "a.png"}, question]
    rows = {
        "large": {"prompt": "2^100?", "answer": 2**100, "level": 1},
        "talk": {"prompt": talk, "answer": "yes"},
        "image": {"prompt": [{"role": "user", "content": content}], "answer": "text"},
    }
    lines = {name: write_lines(folder / f"{name}.jsonl", row) for name, row in rows.items()}
    marked = {"prompt": "say", "answer": None, "score": 1}
    padded = write_table(folder / "tools.parquet", pa.Table.from_pylist(tools))
    return [
        {"source": lines["large"]},
        {"source": write_lines(folder / "mark.jsonl", marked, encoding="utf-8-sig")},
        {"source": write_table(folder / "pandas.parquet", pandas)},
        {"source": padded, "tools_key": "tools"},
        {"source": lines["talk"]},
        {"source": lines["image"], "media_root": str(folder)},
    ]


def test_docs_show_what_the_doctor_shows(
    make_run_config: MakeRunConfig, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "marked.jinja").write_text(MARKED)
    marked = {"chat_template_file": str(tmp_path / "marked.jinja")}
    shown = []
    for data in write_docs_datasets(tmp_path):
        is_image = "media_root" in data
        path = build_image_model() if is_image else model
        config = make_run_config(
            data=data if is_image else data | marked, model={"path": str(path)}
        )
        shown.append(f"ok   first row: {check_first_rows(CheckedRun(config))}")
    for page in ("datasets.md", "datasets.zh.md"):
        text = Path("docs/how-to", page).read_text()
        assert [line for line in text.splitlines() if line.startswith("ok ")] == shown
