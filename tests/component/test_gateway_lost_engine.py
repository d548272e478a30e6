"""Sessions whose engine fails: the program asks again, or its episode is begun again; a failed turn
is never trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gateway_agents import begin, episodes, finish

from relax_events.engines.protocol import GeneratedSample
from relax_events.episodes.engine import EpisodeEngine
from relax_events.events.parts import FinishReason
from tests.gateway_samples import require_equal_logprobs

ASK_AGAIN = """
def patient(messages):
    while True:
        status, text = ask(messages, max_tokens=4)
        if status != 503:
            return json.loads(text)["choices"][0]["message"]
        assert "engine_failed" in text and "the server is gone" in text, text
for _ in range(2):
    messages += [patient(messages), {"role": "user", "content": "more"}]
"""


def lose_turns(engine: EpisodeEngine, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let the inner engine fail its turns of these numbers, counted from 0."""
    inner = engine._engine
    poll, count = inner.poll, 0

    def failing(*, timeout_seconds: float) -> list[GeneratedSample]:
        nonlocal count
        found = []
        for sample in poll(timeout_seconds=timeout_seconds):
            if count in numbers:
                sample = replace(
                    sample, finish_reason=FinishReason.ERROR, error="the server is gone"
                )
            found.append(sample)
            count += 1
        return found

    monkeypatch.setattr(inner, "poll", failing)


def test_a_program_that_asks_again_after_a_lost_engine_keeps_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with episodes(tmp_path, ASK_AGAIN, attempts=1) as engine:
        lose_turns(engine, monkeypatch, 0, 2)
        begin(engine)
        (sample,) = finish(engine)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    assert sum(turn.role == "assistant" for turn in sample.turns) == 2
    assert sample.path_lengths == ()


def test_a_program_that_gives_up_after_a_lost_engine_has_its_episode_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "messages += [say(messages, max_tokens=4)]; say(messages[:1], max_tokens=4)"
    with episodes(tmp_path, body, attempts=2) as engine:
        lose_turns(engine, monkeypatch, 1)
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
    assert len(sample.path_lengths) == 2


def test_an_engine_that_stays_away_fails_the_sample_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with episodes(tmp_path, "say(messages, max_tokens=4)", attempts=2) as engine:
        lose_turns(engine, monkeypatch, 0, 1)
        begin(engine)
        (sample,) = finish(engine)
    assert sample.finish_reason is FinishReason.ERROR
    assert "attempt 2 of 2" in sample.error
    assert "the server is gone" in sample.error
