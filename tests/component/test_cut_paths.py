"""Which paths of an episode count as truncated: those that met a bound, not the whole episode."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.sample import finish_sample
from relax_events.episodes.session import SessionLimit
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer
from tests.gateway_sessions import spoken_turn

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
LONG = "x" * 400


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    """Return a renderer of a tiny tokenizer, a token for each letter."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "template.jinja").write_text(TEMPLATE)
    train_tokenizer([]).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=folder / "template.jinja")
    return PromptRenderer.from_folder(folder, config)


def play(
    renderer: PromptRenderer,
    calls: list[tuple[str, list[int]]],
    *,
    lengths: tuple[int, ...] = (),
    **bounds: Any,
) -> GeneratedSample:
    """Ask for a turn with each message, after the turns with these numbers.

    Args:
        renderer: Of the policy.
        calls: Each message, and the numbers of the calls that it follows.
        lengths: The calls whose turns are cut off by their length.
        bounds: Of the session.
    """
    reasons = iter(
        FinishReason.LENGTH if number in lengths else FinishReason.STOP for number in range(99)
    )

    async def generate(request: GenerationRequest) -> GeneratedSample:
        return spoken_turn(request, [request.stop_token_ids[0]], finish_reason=next(reasons))

    async def drive() -> GeneratedSample:
        session = open_session(renderer, generate, **bounds)
        histories: list[list[ChatMessage]] = []
        for text, before in calls:
            earlier = histories[before[-1]] if before else []
            history = [*earlier, ChatMessage.of_text("user", text)]
            with suppress(SessionLimit):
                node = await session.chat(history)
                history.append(node.reply)
            histories.append(history)
        session.queue.close()
        return finish_sample(session, trains_all_paths=True)

    return asyncio.run(drive())


def outcome(sample: GeneratedSample) -> tuple[FinishReason, int, tuple[int, ...]]:
    return sample.finish_reason, len(sample.path_lengths) or 1, sample.truncated_paths


def test_a_full_context_truncates_the_path_that_it_ends(renderer: PromptRenderer) -> None:
    whole = [("a", []), ("b", [0]), ("c", [])]
    assert outcome(play(renderer, whole)) == (FinishReason.STOP, 2, ())
    full = [("a", []), (LONG, [0]), ("c", [])]
    bounds = {"max_context_tokens": 200}
    assert outcome(play(renderer, full, **bounds)) == (FinishReason.STOP, 2, (0,))
    last = [("c", []), ("a", []), (LONG, [1])]
    assert outcome(play(renderer, last, **bounds)) == (FinishReason.LENGTH, 2, (1,))
    alone = [("a", []), (LONG, [0])]
    assert outcome(play(renderer, alone, **bounds)) == (FinishReason.LENGTH, 1, ())


def test_a_path_that_continues_after_a_refused_call_is_whole(renderer: PromptRenderer) -> None:
    """The program shortens what did not fit, and calls again."""
    calls = [("a", []), (LONG, [0]), ("b", [0])]
    sample = play(renderer, calls, max_context_tokens=200)
    assert outcome(sample) == (FinishReason.STOP, 1, ())


def test_a_conversation_that_never_began_truncates_no_path(renderer: PromptRenderer) -> None:
    sample = play(renderer, [("a", []), (LONG, []), ("b", [0])], max_context_tokens=200)
    assert outcome(sample) == (FinishReason.STOP, 1, ())


def test_bounds_of_the_session_truncate_its_last_path(renderer: PromptRenderer) -> None:
    calls = [("a", []), ("b", []), ("c", [1])]
    assert outcome(play(renderer, calls, max_turns=3)) == (FinishReason.STOP, 2, ())
    for bounds in ({"max_turns": 2}, {"max_new_tokens": 2}):
        assert outcome(play(renderer, calls, **bounds)) == (FinishReason.LENGTH, 2, (1,))


def test_a_turn_cut_off_by_its_length_truncates_its_path(renderer: PromptRenderer) -> None:
    calls = [("a", []), ("b", []), ("c", [1])]
    assert outcome(play(renderer, calls, lengths=(0,))) == (FinishReason.STOP, 2, (0,))
    assert outcome(play(renderer, calls, lengths=(1,))) == (FinishReason.STOP, 2, ())
    assert outcome(play(renderer, calls, lengths=(0, 2))) == (FinishReason.LENGTH, 2, (0, 1))
    np.testing.assert_array_equal(
        play(renderer, calls).loss_mask, play(renderer, calls, lengths=(0,)).loss_mask
    )
