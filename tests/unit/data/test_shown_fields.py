"""Rows with fields that the chat template does not show are refused."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from relax_events.config import DataConfig
from relax_events.data.messages import parse_message
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sft_targets import tokenize_targets
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.packages.examples.tiny_models import make_tiny

PARTS = {
    "tools": "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}",
    "tool_calls": "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}",
    "thoughts (reasoning_content)": "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}",
    "names of role user": "{% if m.role == 'user' and m.name %}{{ m.name }}{% endif %}",
    "names of role tool": "{% if m.role == 'tool' and m.name %}{{ m.name }}{% endif %}",
}
"""How a template shows a field, by its name in errors."""
TOOLS = '[{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}]'
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}
ROWS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "tools": ([USER], TOOLS),
    "tool_calls": ([USER, {"role": "assistant", "tool_calls": [CALL]}, USER], ""),
    "thoughts (reasoning_content)": (
        [USER, {"role": "assistant", "content": "a", "thinking": "why"}, USER],
        "",
    ),
    "names of role user": (
        [USER, {"role": "assistant", "content": "a"}, USER | {"name": "ann"}],
        "",
    ),
    "names of role tool": ([USER, {"role": "tool", "content": "b", "name": "look"}], ""),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), corpus=["abc"], hidden_size=32, num_layers=1)


def open_renderer(model: Path, template: str | None) -> PromptRenderer:
    if template is None:
        return PromptRenderer.from_folder(model, DataConfig(source="jsonl:x", chat_template=False))
    file = model.parent / "own.jinja"
    file.write_text(template)
    return PromptRenderer.from_folder(model, DataConfig(source="jsonl:x", chat_template_file=file))


def build_template(fields: tuple[str, ...]) -> str:
    body = "".join(PARTS[field] for field in fields if field != "tools")
    tools = PARTS["tools"] if "tools" in fields else ""
    return (
        f"{tools}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{body}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def parse(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    return [parse_message(message) for message in messages]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_row_is_refused_exactly_if_the_template_leaves_out_its_field(
    model: Path, count: int
) -> None:
    for fields in combinations(PARTS, count):
        renderer = open_renderer(model, build_template(fields))
        for field, (messages, tools) in ROWS.items():
            if field in fields:
                assert len(renderer.row_tokens(parse(messages), tools=tools))
            else:
                with pytest.raises(PoisonSample) as caught:
                    renderer.row_tokens(parse(messages), tools=tools)
                assert f"the chat template does not show {field}; leave" in str(caught.value)


def test_row_without_such_fields_needs_no_template_that_shows_them(model: Path) -> None:
    assert len(open_renderer(model, build_template(())).row_tokens(parse([USER])))


@pytest.mark.parametrize("field", ROWS)
def test_without_a_template_no_such_field_is_shown(model: Path, field: str) -> None:
    messages, tools = ROWS[field]
    with pytest.raises(PoisonSample, match="does not show"):
        open_renderer(model, None).row_tokens(parse(messages), tools=tools)


def test_name_of_a_tool_is_shown_by_its_call(model: Path) -> None:
    talk = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "name": "look"},
    ]
    renderer = open_renderer(model, build_template(("tool_calls",)))
    assert len(renderer.row_tokens(parse(talk)))
    talk[2]["name"] = "other"
    with pytest.raises(PoisonSample, match="names of role tool"):
        renderer.row_tokens(parse(talk))


def test_template_that_shows_thoughts_of_the_last_turn_shows_them(model: Path) -> None:
    template = build_template(()).replace(
        "{{ m.content }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    )
    messages, _ = ROWS["thoughts (reasoning_content)"]
    assert len(open_renderer(model, template).row_tokens(parse(messages)))


def test_template_that_refuses_tools_says_so_itself(model: Path) -> None:
    template = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + build_template(
        ()
    )
    with pytest.raises(PoisonSample, match="no tools here"):
        open_renderer(model, template).row_tokens(parse([USER]), tools=TOOLS)


@pytest.mark.parametrize("field", ["tool_calls", "thoughts (reasoning_content)"])
def test_targets_with_a_field_that_is_not_shown_are_refused(model: Path, field: str) -> None:
    messages, _ = ROWS[field]
    row = PromptRow([parse_message(USER)], "", completions=[[parse_message(messages[1])]])
    with pytest.raises(PoisonSample) as caught:
        tokenize_targets(row, renderer=open_renderer(model, build_template(())))
    assert f"does not show {field}" in str(caught.value)
    assert tokenize_targets(row, renderer=open_renderer(model, build_template((field,))))
