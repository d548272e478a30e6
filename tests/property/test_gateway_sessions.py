"""Random sessions with tools, edits, retries and compactions: what is trained is what was sampled.

The engine is a source of random tokens with random log-probabilities, so every token sequence that
a model could sample occurs: broken UTF-8, special tokens, broken tool calls.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_programs import PROGRAMS, Program, StoredResponsesProgram
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.graph import path_tokens
from relax_events.episodes.sample import finish_sample
from relax_events.episodes.session import SessionLimit
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer
from relax_events.packages.gateway.chat_dialect import ChatCall
from relax_events.packages.gateway.chat_session import ChatSession
from tests.gateway_sessions import spoken_turn

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {"b": 1.0, "a": [2, 0.5]}}</tool_call>'
SAID = (CALL, f"<think>hm</think>two {CALL}\n{CALL}", "<think>hm</think> yes", " plain ", "", "")
"""What the engine says, besides random tokens (the empty ones)."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    """Return a renderer with a template that shows tools and tool calls."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    train_tokenizer(["look"]).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=file)
    return PromptRenderer.from_folder(folder, config)


class RandomEngine:
    """Samples random tokens, and remembers what it read and sampled."""

    def __init__(self, renderer: PromptRenderer, rng: random.Random) -> None:
        self._renderer, self._rng = renderer, rng
        self.read: list[np.ndarray] = []
        self.sampled: list[GeneratedSample] = []

    async def __call__(self, request: GenerationRequest) -> GeneratedSample:
        """Sample a turn of up to 12 random tokens, or a tool call."""
        rng = self._rng
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        text = self._renderer.encode(rng.choice(SAID)).tolist()
        tokens = text or [rng.randrange(300) for _ in range(rng.randrange(12))]
        tokens = [token for token in tokens if token not in request.stop_token_ids]
        tokens = tokens[: request.sampling.max_new_tokens - 1]
        reason = rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
        if reason is FinishReason.STOP or not tokens:
            tokens, reason = [*tokens, request.stop_token_ids[0]], FinishReason.STOP
        found = spoken_turn(
            request,
            tokens,
            logprobs=[-rng.random() for _ in tokens],
            policy_version=len(self.sampled) // 2,
            finish_reason=reason,
        )
        self.read.append(request.prompt_tokens)
        self.sampled.append(found)
        assert request.is_sampled is not None
        assert len(request.is_sampled) == len(request.prompt_tokens)
        return found


async def talk(
    session: ChatSession, rng: random.Random, kind: type[Program], *, first: int = 0
) -> None:
    """Drive a session as a program does, with edits, retries and compactions; the first answer has
    this number.
    """
    program = kind(f"go {rng.random()}")
    for number in range(first, first + rng.randrange(1, 12)):
        step = rng.randrange(8)
        before = list(program.history)
        try:
            await program.ask(session, number, is_streamed=rng.random() < 0.5)
        except SessionLimit:
            return
        if step == 0 and kind is not StoredResponsesProgram:  # a retry: the answer was lost
            program.history = before
            continue
        program.continue_conversation(step, rng.randrange(12))


async def talk_together(
    session: ChatSession, rng: random.Random, kind: type[Program], *, num_agents: int
) -> None:
    """Drive a session by several conversations at the same time."""
    agents = [talk(session, rng, kind, first=100 * index) for index in range(num_agents)]
    await asyncio.gather(*agents)


def check_session(
    renderer: PromptRenderer, kind: type[Program], seed: int, *, num_agents: int = 1
) -> None:
    """Run a session, and compare what it trains with what its engine has read and sampled."""
    rng = random.Random(seed)
    engine = RandomEngine(renderer, rng)
    session = open_session(renderer, engine)
    asyncio.run(talk_together(session, rng, kind, num_agents=num_agents))
    nodes = session.graph.nodes
    assert [node.sample for node in nodes] == engine.sampled
    for node, read in zip(nodes, engine.read, strict=True):
        whole = path_tokens(node)
        np.testing.assert_array_equal(whole[: len(read)], read)
        np.testing.assert_array_equal(whole[len(read) :], node.sample.tokens)
    trained: list[tuple[int, float]] = []
    for row in session.graph.rows():
        chosen = row.loss_mask == 1
        assert sum(segment.num_tokens for segment in row.segments) == int(chosen.sum())
        np.testing.assert_array_equal(
            np.concatenate([row.prompt_tokens, row.tokens]), path_tokens(row.nodes[-1])
        )
        assert not row.logprobs[~chosen].any()
        trained += zip(row.tokens[chosen].tolist(), row.logprobs[chosen].tolist(), strict=True)
    assert sorted(trained) == sorted(pair for one in engine.sampled for pair in pairs_of(one))
    check_sample(session, finish_sample(session, trains_all_paths=True))
    last = finish_sample(session, trains_all_paths=False)
    assert last.path_lengths == ()
    session.error = "its program hangs"
    late = finish_sample(session, trains_all_paths=True, reason=FinishReason.LATE, error="900 s")
    assert (late.finish_reason, late.error) == (FinishReason.LATE, "900 s")
    session.error = ""
    check_sample(session, late)
    np.testing.assert_array_equal(whole_tokens(last), path_tokens(nodes[-1]))


def check_sample(session: ChatSession, sample: GeneratedSample) -> None:
    """Check that a sample has each path, and trains each sampled token once."""
    assert sample.loss_mask is not None
    assert sample.prompt_tokens is not None
    tokens, nodes = whole_tokens(sample), session.graph.nodes
    chosen = np.concatenate([np.zeros(len(sample.prompt_tokens), bool), sample.loss_mask == 1])
    expected = sorted(pair for node in nodes for pair in pairs_of(node.sample))
    logprobs = np.concatenate([np.zeros(len(sample.prompt_tokens)), sample.logprobs])
    assert sorted(zip(tokens[chosen], logprobs[chosen], strict=True)) == expected
    assert sample.num_sampled_tokens == int(chosen.sum())
    ends = np.cumsum(sample.path_lengths or [len(tokens)])
    assert ends[-1] == len(tokens)
    for leaf, path in zip(session.graph.leaves(), np.split(tokens, ends[:-1]), strict=True):
        np.testing.assert_array_equal(path, path_tokens(leaf))
    assert sample.turns[-1].role == "assistant"


def whole_tokens(sample: GeneratedSample) -> np.ndarray:
    """Return prompt and completion."""
    assert sample.prompt_tokens is not None
    return np.concatenate([sample.prompt_tokens, sample.tokens])


def pairs_of(sample: GeneratedSample) -> list[tuple[int, float]]:
    """Return each sampled token with its log-probability."""
    return list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True))


@pytest.mark.parametrize("kind", PROGRAMS)
@given(seed=st.integers(0, 2**32), num_agents=st.sampled_from([1, 1, 4]))
@settings(max_examples=75, deadline=None)
def test_trained_tokens_are_bit_for_bit_the_sampled_ones(
    renderer: PromptRenderer, kind: type[Program], seed: int, num_agents: int
) -> None:
    check_session(renderer, kind, seed, num_agents=num_agents)


@given(
    seed=st.integers(0, 2**32),
    wishes=st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=1, max_size=12),
    max_turns=st.integers(1, 8),
    max_new_tokens=st.integers(1, 60),
)
@settings(max_examples=75, deadline=None)
def test_calls_at_the_same_time_never_pass_the_bounds_nor_are_refused_within_them(
    renderer: PromptRenderer,
    seed: int,
    wishes: list[int | None],
    max_turns: int,
    max_new_tokens: int,
) -> None:
    rng = random.Random(seed)
    engine = RandomEngine(renderer, rng)
    running: dict[str, int] = {}

    async def generate(request: GenerationRequest) -> GeneratedSample:
        name, wish = request.samples[0].sample_id, request.sampling.max_new_tokens
        assert name not in running
        running[name] = wish
        assert session.num_sampled_tokens + sum(running.values()) <= max_new_tokens
        assert len(session.graph.nodes) + len(running) <= max_turns
        sample = await engine(request)
        del running[name]
        return sample

    session = open_session(renderer, generate, max_turns=max_turns, max_new_tokens=max_new_tokens)

    async def call(number: int, wish: int | None) -> None:
        try:
            await session.chat([ChatMessage.of_text("user", f"{number}")], max_tokens=wish)
        except SessionLimit:
            assert session.is_spent

    async def call_all() -> None:
        await asyncio.gather(*(call(number, wish) for number, wish in enumerate(wishes)))

    asyncio.run(call_all())
    assert len(session.graph.nodes) == len(wishes) or session.is_spent
    assert (session._num_reserved, session._num_running) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_trained_tokens_are_the_sampled_ones_in_ten_thousand_sessions(
    renderer: PromptRenderer, kind: type[Program]
) -> None:
    for seed in range(10_000 // len(PROGRAMS)):
        check_session(renderer, kind, seed)


@pytest.mark.parametrize("kind", PROGRAMS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_an_undisturbed_session_is_one_row(
    renderer: PromptRenderer, kind: type[Program], seed: int
) -> None:
    rng = random.Random(seed)
    engine = RandomEngine(renderer, rng)
    session = open_session(renderer, engine, max_new_tokens=2000)

    async def run() -> None:
        program = kind("go")
        for number in range(5):
            await program.ask(session, number, is_streamed=False)
            for call_id in program.calls:
                program.reply(call_id, str(number))
            if not program.calls:
                program.say(str(number))

    asyncio.run(run())
    (row,) = session.graph.rows()
    assert session.graph.num_forks == 0
    assert len(row.nodes) == 5


@pytest.mark.parametrize(
    ("body", "num_calls", "has_tools"),
    [
        ({}, 2, True),
        ({"parallel_tool_calls": True, "tool_choice": "auto"}, 2, True),
        ({"parallel_tool_calls": False}, 1, True),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 1, True),
        ({"tool_choice": "none"}, 0, False),
        ({"tool_choice": {"type": "none"}}, 0, False),
    ],
)
def test_a_turn_has_as_many_calls_as_the_program_takes_and_no_token_is_lost(
    renderer: PromptRenderer, body: dict[str, Any], num_calls: int, has_tools: bool
) -> None:
    said = f"<think>hm</think>two {CALL}\n{CALL}"
    session = open_session(
        renderer, lambda request: speak(renderer, request, said), max_new_tokens=2000
    )
    tool = {"type": "function", "function": {"name": "look"}}
    messages = [{"role": "user", "content": "go"}]
    call = ChatCall.model_validate({"messages": messages, "tools": [tool]} | body)

    async def talk() -> ChatMessage:
        messages, tools = call.history(session), call.write_tools()
        node = await session.chat(messages, tools=tools, max_calls=call.max_calls)
        await session.chat([*messages, node.reply, *messages], tools=tools)
        return node.reply

    reply = asyncio.run(talk())
    texts = (f"two {CALL}\n{CALL}", f"two \n{CALL}", "two")
    assert (len(reply.tool_calls), reply.text) == (num_calls, texts[num_calls])
    assert session.malformed_calls == ["too_many_calls"] * (2 - num_calls)
    (row,) = session.graph.rows()
    trained = renderer.completion_text(row.tokens, skip_special_tokens=False)
    assert trained.count(said) == 2
    prompt = renderer.completion_text(row.prompt_tokens, skip_special_tokens=False)
    assert ('"function"' in prompt) == has_tools


async def speak(renderer: PromptRenderer, request: GenerationRequest, text: str) -> GeneratedSample:
    """Say a text."""
    tokens = [*renderer.encode(text).tolist(), request.stop_token_ids[0]]
    return spoken_turn(request, tokens)


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_program_may_send_a_begun_turn_and_its_rest_as_one_message_or_as_two(
    renderer: PromptRenderer, is_joined: bool
) -> None:
    read: list[np.ndarray] = []

    async def answer(request: GenerationRequest) -> GeneratedSample:
        read.append(request.prompt_tokens)
        tokens = [*renderer.encode("no").tolist(), request.stop_token_ids[0]]
        return spoken_turn(request, tokens)

    session = open_session(renderer, answer)
    begun = [
        ChatMessage.of_text("user", "is it open?"),
        ChatMessage.of_text("assistant", "It is: "),
    ]
    rest = (
        [begun[0], ChatMessage.of_text("assistant", "It is: no")]
        if is_joined
        else [*begun, ChatMessage.of_text("assistant", "no")]
    )

    async def talk() -> None:
        first = await session.chat(begun)
        assert first.reply.text == "no"
        await session.chat([*rest, ChatMessage.of_text("user", "sure?")])

    asyncio.run(talk())
    assert session.graph.num_forks == 0
    (row,) = session.graph.rows()
    whole = np.concatenate([row.prompt_tokens, row.tokens])
    assert renderer.completion_text(whole, skip_special_tokens=False) == (
        "<|im_start|>user\nis it open?<|im_end|>\n<|im_start|>assistant\nIt is: no<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )


FORGETFUL = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and message.reasoning_content and not "
    "(messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list) %}"
    "{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Drops the thoughts of turns before the last user message, as Qwen3's template does."""


@pytest.mark.parametrize("keeps_thoughts", [True, False])
def test_message_behind_thoughts_that_the_template_drops_is_read(
    tmp_path: Path, keeps_thoughts: bool
) -> None:
    (tmp_path / "template.jinja").write_text(FORGETFUL)
    train_tokenizer(["look"]).save_pretrained(tmp_path)
    renderer = PromptRenderer.from_folder(
        tmp_path, DataConfig(source="http", chat_template_file=tmp_path / "template.jinja")
    )
    read: list[str] = []

    async def answer(request: GenerationRequest) -> GeneratedSample:
        read.append(renderer.completion_text(request.prompt_tokens, skip_special_tokens=False))
        tokens = renderer.encode("<think>hm</think>yes").tolist()
        return spoken_turn(request, [*tokens, request.stop_token_ids[0]])

    session = open_session(renderer, answer)
    history = [ChatMessage.of_text("user", "open?")]

    async def talk() -> None:
        for number in range(3):
            reply = (await session.chat(history)).reply
            assert (reply.reasoning, reply.text) == ("hm", "yes")
            kept = reply if keeps_thoughts else ChatMessage.of_text("assistant", "yes")
            history.extend([kept, ChatMessage.of_text("user", f"sure {number}?")])

    asyncio.run(talk())
    assert [text.count("yes") for text in read] == [0, 1, 2]
    for number, text in enumerate(read[1:]):
        assert text.endswith(f"<|im_start|>user\nsure {number}?<|im_end|>\n<|im_start|>assistant\n")
