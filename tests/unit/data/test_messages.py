"""Messages of rows and of programs are one type: the same tokens, whichever way they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from transformers import AutoTokenizer

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig, RowsConfig
from relax_events.data.columns import ColumnReader
from relax_events.data.messages import (
    count_text_bytes,
    describe_message,
    parse_message,
    print_message,
)
from relax_events.data.rendering import PromptRenderer, find_reasoning_field
from relax_events.data.sft_targets import tokenize_targets
from relax_events.engines.protocol import GenerationRequest
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, ContentPart, Modality, ToolCall
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.gateway.chat_dialect import ChatCall

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}<|im_start|>user
<tool_response id="{{ message.tool_call_id }}" of="{{ message.name }}">
{{ message.content }}
</tool_response><|im_end|>
    {%- else %}<|im_start|>{{ message.role }}{{ ' ' + message.name if message.name }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|im_end|>
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As models of Qwen's kind have it."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "door", "n": 1.0}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "name": "ann", "content": "is it open?"},
    {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "name": "look", "content": "shut"},
]
ANSWER = {"role": "assistant", "content": "no", "reasoning": "it is shut"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "template.jinja").write_text(TEMPLATE)
    return make_tiny(folder / "model", corpus=["abc"], hidden_size=32, num_layers=1)


@pytest.fixture(scope="module")
def renderer(folder: Path) -> PromptRenderer:
    template = folder.parent / "template.jinja"
    return PromptRenderer.from_folder(
        folder, DataConfig(source="jsonl:x", chat_template_file=template)
    )


def read_row(columns: dict[str, Any], **settings: Any) -> Any:
    config = RowsConfig.model_validate({"source": "jsonl:x", "answer_key": ""} | settings)
    return ColumnReader(config, section="data").read_row(columns, "rows.jsonl:1")


async def refuse(request: GenerationRequest) -> NoReturn:
    pytest.fail("nothing is sampled")


def render_call(
    renderer: PromptRenderer,
    messages: list[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> np.ndarray:
    """Return what the policy reads of a call of OpenAI's chat."""
    call = ChatCall.model_validate({"messages": messages, "tools": tools})
    history = call.history(open_session(renderer, refuse))
    return renderer.prompt_tokens(history, tools=call.write_tools())


def test_a_row_reaches_the_template_as_a_call_of_the_gateway_does(
    renderer: PromptRenderer,
) -> None:
    row = read_row({"prompt": TALK, "tools": TOOLS}, tools_key="tools")
    tokens = renderer.prompt_tokens(row.messages, tools=row.tools)
    np.testing.assert_array_equal(tokens, render_call(renderer, TALK))
    text = renderer.completion_text(tokens, skip_special_tokens=False)
    assert '{"name": "look", "arguments": {"at": "door", "n": 1.0}}' in text
    assert "<|im_start|>user ann\nis it open?" in text
    assert "<think>\nlook\n</think>" in text
    assert '<tool_response id="call-1" of="look">\nshut' in text


def test_tool_calls_and_thoughts_of_a_target_are_trained_on(renderer: PromptRenderer) -> None:
    row = read_row(
        {"talk": [*TALK, ANSWER], "tools": TOOLS}, conversation_key="talk", tools_key="tools"
    )
    assert (len(row.messages), len(row.completions[0])) == (2, 3)
    (target,) = tokenize_targets(row, renderer=renderer)
    trained = renderer.completion_text(
        target.tokens[target.loss_mask == 1], skip_special_tokens=False
    )
    assert trained == (
        "<think>\nlook\n</think>\n\n<tool_call>\n"
        '{"name": "look", "arguments": {"at": "door", "n": 1.0}}\n</tool_call><|im_end|>'
        "<think>\nit is shut\n</think>\n\nno<|im_end|>"
    )
    prompt = renderer.prompt_tokens(row.messages, tools=row.tools)
    whole = render_call(renderer, [*TALK, ANSWER, {"role": "user", "content": "so?"}])
    num_target = len(prompt) + len(target.tokens)
    np.testing.assert_array_equal(np.concatenate([prompt, target.tokens]), whole[:num_target])


def test_a_single_answer_keeps_its_tool_calls(renderer: PromptRenderer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = read_row({"prompt": "go", "answer": [call]}, completion_key="answer")
    assert row.answer == ""
    (target,) = tokenize_targets(row, renderer=renderer)
    assert "<tool_call>" in renderer.completion_text(target.tokens, skip_special_tokens=False)
    plain = read_row({"prompt": "go", "answer": [{"role": "assistant", "content": "yes"}]},
                     completion_key="answer")  # fmt: skip
    assert (plain.answer, plain.completions) == ("yes", [])


def test_preference_pair_may_differ_in_its_calls_alone() -> None:
    other = {**CALL, "function": {"name": "open", "arguments": "{}"}}
    pair = [[*TALK[:2], TALK[2] | {"tool_calls": [call]}] for call in (CALL, other)]
    row = read_row(
        {"chosen": pair[0], "rejected": pair[1]}, chosen_key="chosen", rejected_key="rejected",
        prompt_key="",
    )  # fmt: skip
    assert [one[0].tool_calls[0].name for one in row.completions] == ["look", "open"]


def test_message_of_text_is_printed_as_it_was_read() -> None:
    for message in (*TALK, {"role": "user", "content": "a"}):
        printed = print_message(parse_message(message))
        assert printed == {**message, "content": message["content"] or ""}
    spoken = parse_message(ANSWER)
    assert spoken.reasoning == "it is shut"


def test_arguments_may_be_an_object_or_text_that_is_no_json() -> None:
    (call,) = parse_message(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    ).tool_calls
    assert call == ToolCall("f", '{"a":1}')
    broken = ChatMessage("assistant", tool_calls=[ToolCall("f", "{a")])
    printed = print_message(broken, parses_arguments=True)
    assert printed["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": "{a"}}
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a"}, "has no role"),
        ({"role": "user", "content": 1}, "a content that is neither text nor a list of parts"),
        ({"role": "user", "content": [{"type": "file"}]}, "a part of type 'file'"),
        ({"role": "user", "name": 1}, "has name that is no text"),
        ({"role": "assistant", "thinking": []}, "has thinking that is no text"),
        ({"role": "assistant", "tool_calls": "f"}, "has tool_calls that are no list"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "without a function's name"),
        *(
            (
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
                },
                "a call of 'f' with the arguments '.+'; write a JSON object",
            )
            for arguments in ("[1]", '"{}"', "7", "null", [], ["a"], 0, False, '"{\\"a\\": 1}"')
        ),
    ],
)
def test_message_of_another_form_is_refused_by_name(message: dict[str, Any], text: str) -> None:
    with pytest.raises(PoisonSample, match=text):
        parse_message(message)


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    message = parse_message({"role": "assistant", "tool_calls": [{"function": function}]})
    assert message.tool_calls == [ToolCall("f", "{}")]


@pytest.mark.parametrize(
    ("role", "remedy"), [("gpt", "assistant"), ("model", "assistant"), ("human", "user")]
)
def test_row_with_a_role_of_another_format_is_refused(role: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"has the role '{role}'; write '{remedy}'"):
        read_row({"prompt": [{"role": role, "content": "a"}]})


def test_developer_of_a_row_is_the_system() -> None:
    row = read_row({"prompt": [{"role": "developer", "content": "a"}]})
    assert [message.role for message in row.messages] == ["system"]


def test_row_names_the_place_of_a_call_that_can_not_be_read() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: prompt: a message has a tool call"):
        read_row({"prompt": [message]})


SPOKEN = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("functions", "[{}]"),
        ("tools", [{"type": "function"}]),
        ("refusal", "I can't."),
        ("reasoning_details", [{"text": "why"}]),
        ("thinking_blocks", [{"type": "thinking", "thinking": "why"}]),
        ("images", ["a.png"]),
        ("videos", ["a.mp4"]),
        ("audios", ["a.wav"]),
        ("audio", {"id": "a"}),
        ("prefix", True),
        ("weight", 0),
        ("weight", 0.5),
        ("loss", False),
        ("train", False),
    ],
)
def test_row_with_a_field_that_would_get_lost_is_refused(field: str, value: Any) -> None:
    talk = [TALK[1], SPOKEN | {field: value}]
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: talk: a message has {field}\b"):
        read_row({"talk": talk}, conversation_key="talk")


@pytest.mark.parametrize("value", [None, "", [], {}, False])
def test_row_with_an_empty_field_or_one_of_no_effect_is_read(value: Any) -> None:
    message = {"role": "user", "content": "a", "refusal": value, "images": value, "weight": 0}
    row = read_row({"prompt": [message | {"id": 7, "train": True}]})
    assert row.messages == [ChatMessage.of_text("user", "a")], "other keys are ignored"
    spoken = SPOKEN | {"weight": 1.0, "train": True, "loss": None, "function_call": value}
    row = read_row({"talk": [TALK[1], spoken]}, conversation_key="talk")
    assert row.answer == "a" or row.completions


def test_row_with_two_different_thoughts_is_refused() -> None:
    talk = [TALK[1], SPOKEN | {"reasoning": "why", "reasoning_content": "why"}]
    assert read_row({"prompt": [*talk, TALK[1]]}).messages[1].reasoning == "why"
    talk[1]["reasoning"] = "other"
    with pytest.raises(ConfigError, match="several thoughts; keep one of"):
        read_row({"prompt": [*talk, TALK[1]]})


def chat(renderer: PromptRenderer, message: dict[str, Any]) -> list[ChatMessage]:
    session = open_session(renderer, refuse)
    return ChatCall.model_validate({"messages": [message]}).history(session)


def test_gateway_refuses_a_field_that_would_get_lost(renderer: PromptRenderer) -> None:
    with pytest.raises(PoisonSample, match="message 0 has the field 'prefix', which no prompt"):
        chat(renderer, {"role": "assistant", "content": "a", "prefix": True})
    echoed = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    (message,) = chat(renderer, {"role": "assistant", "content": "a"} | echoed)
    assert message == ChatMessage.of_text("assistant", "a")


def test_reasoning_has_the_name_that_the_template_reads() -> None:
    assert find_reasoning_field(TEMPLATE) == "reasoning_content"
    assert find_reasoning_field("{% if enable_thinking %}{{ m['thinking'] }}{% endif %}") == (
        "thinking"
    )
    assert find_reasoning_field("{{ m.reasoning }}") == "reasoning"
    assert find_reasoning_field("") == "reasoning_content"


def test_neighbouring_texts_are_one_part() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = parse_message({"role": "user", "content": parts})
    assert message.parts == [ContentPart(Modality.TEXT, "ab")]


def test_people_see_thoughts_and_calls() -> None:
    message = parse_message(TALK[2])
    assert describe_message(message) == '<think>look</think>\nlook({"at": "door", "n": 1.0})'
    assert count_text_bytes([message]) == sum(
        map(len, ("assistant", "look", "look", CALL["function"]["arguments"], "call-1"))  # type: ignore[index]
    )


BEGUN: list[dict[str, Any]] = [
    {"role": "user", "content": "is it open?"},
    {"role": "assistant", "content": "<think>\n"},
]
"""A conversation that begins the policy's turn."""


def test_a_begun_turn_is_continued_as_transformers_continues_it(
    renderer: PromptRenderer, folder: Path
) -> None:
    row = read_row({"prompt": BEGUN})
    tokens = renderer.prompt_tokens(row.messages)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        BEGUN, chat_template=TEMPLATE, continue_final_message=True, tokenize=False
    )
    assert expected.endswith("<|im_start|>assistant\n<think>\n")
    assert renderer.completion_text(tokens, skip_special_tokens=False) == expected
    np.testing.assert_array_equal(tokens, render_call(renderer, BEGUN, tools=[]))


def test_a_target_continues_the_turn_that_its_prompt_begins(renderer: PromptRenderer) -> None:
    answer = [
        {"role": "assistant", "content": "shut</think>no"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    row = read_row({"prompt": BEGUN, "answer": answer}, completion_key="answer")
    (target,) = tokenize_targets(row, renderer=renderer)
    text = renderer.completion_text(target.tokens, skip_special_tokens=False)
    assert text == (
        "shut</think>no<|im_end|><|im_start|>user\nsure?<|im_end|>"
        "<|im_start|>assistant\nyes<|im_end|>"
    )
    trained = target.tokens[target.loss_mask == 1]
    assert renderer.completion_text(trained, skip_special_tokens=False) == (
        "shut</think>no<|im_end|>yes<|im_end|>"
    )


def test_prompt_that_ends_with_tool_calls_is_refused(renderer: PromptRenderer) -> None:
    with pytest.raises(PoisonSample, match="ends with an assistant's message that has tool calls"):
        render_call(renderer, TALK[:3])


def test_assistant_messages_in_a_row_are_not_split_into_prompt_and_target() -> None:
    talk = [*BEGUN, {"role": "assistant", "content": "no"}]
    with pytest.raises(ConfigError, match="two assistant messages in a row, 2 and 3; join"):
        read_row({"talk": talk}, conversation_key="talk", train_on="last")
    yes = [*BEGUN, {"role": "assistant", "content": "yes"}]
    with pytest.raises(ConfigError, match="two assistant messages in a row, 2 and 3; join"):
        read_row({"good": talk, "bad": yes}, chosen_key="good", rejected_key="bad", prompt_key="")
