"""Each kind of fault in each kind of environment, at 1 % and 5 % of the samples: the others finish
without using an attempt.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest
from engine_requests import MakeEngine, fresh_sample, tiny_model
from prometheus_client import CollectorRegistry
from small_settings import small_run
from structlog.testing import capture_logs

from relax_events.config import RunConfig, SamplingConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import EnvironmentContext, GeneratedSample, GenerationRequest
from relax_events.environments.pool import EnvironmentPool
from relax_events.environments.session_pool import (
    EnvironmentSession,
    ProcessedObservation,
    SessionPool,
)
from relax_events.episodes.engine import Driver, EpisodeEngine
from relax_events.episodes.environment_drivers import FunctionDriver, StatefulDriver
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.packages.gateway.program_driver import ProgramDriver
from relax_events.telemetry.component_metrics import EpisodeMetrics
from tests.misbehaving import FAULTS, NUM_TURNS
from tests.misbehaving_kinds import environment_of, openenv_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_SAMPLES = 100
RATES = (1, 5)
"""Samples of a hundred that misbehave."""
DEADLINE_SECONDS = 3.0
KINDS = ("function", "gymnasium", "interaction", "mcp", "openenv", "program")
ENDINGS = {
    "hang": FinishReason.LATE,
    "flood": FinishReason.LATE,
    "kill": FinishReason.ERROR,
    "raise": FinishReason.ERROR,
    "reply": FinishReason.ERROR,
    "slow": FinishReason.STOP,
}


class ToolPool(SessionPool):
    """Has a policy of random tokens call the tool of its server in each turn but the last."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.num_turns: Counter[int] = Counter()
        """Of each session, by its number."""

    async def step_session(
        self, session: EnvironmentSession, completion: str
    ) -> ProcessedObservation:
        """See `SessionPool`."""
        self.num_turns[session.number] += 1
        turn = self.num_turns[session.number]
        if turn == NUM_TURNS:
            return await super().step_session(session, "the answer")
        how = orjson.loads(session.task.metadata)["options"]["how"] if turn == 2 else ""
        call = {"name": "act", "arguments": {"how": how}}
        text = f"<tool_call>{orjson.dumps(call).decode()}</tool_call>"
        return await super().step_session(session, text)


def driver_of(kind: str, config: RunConfig) -> Driver:
    """Start what drives the sessions of a kind of environment."""
    if kind == "program":
        return ProgramDriver(config)
    if kind == "function":
        return FunctionDriver(EnvironmentPool(config))
    pool = (ToolPool if kind == "mcp" else SessionPool)(config)
    return StatefulDriver(pool, may_reward=True)


class Matrix:
    """Episodes of one kind of environment over an engine."""

    def __init__(self, kind: str, folder: Path, make: MakeEngine, address: str) -> None:
        model = tiny_model()
        common = {
            "timeout_seconds": DEADLINE_SECONDS,
            "episode_seconds": DEADLINE_SECONDS,
            "concurrency": 16,
        }
        self.config = small_run(
            {
                "run": {"id": "matrix", "directory": folder},
                "model": {"path": model, "device": "cpu"},
                "data": {"source": "http"},
                "environment": common | environment_of(kind, folder, address),
                "reward": {"function": "exact_match"},
            }
        )
        media = self.config.model.media
        self.renderer = PromptRenderer.from_folder(model, self.config.data, media=media)
        self.registry = CollectorRegistry()
        self.driver = driver_of(kind, self.config)
        self.engine = EpisodeEngine(
            make(model),
            self.driver,
            config=self.config,
            renderer=self.renderer,
            metrics=EpisodeMetrics("rollout", self.registry),
        )

    def submit(self, name: str, *, num_samples: int, how: str = "") -> None:
        """Begin a prompt group whose environments do what is named."""
        messages = [ChatMessage.of_text("user", "12")]
        metadata = {"how": how, "options": {"how": how}, "reset": {"how": how}}
        self.engine.submit(
            GenerationRequest(
                prompt_group_id=name,
                prompt_tokens=self.renderer.prompt_tokens(messages),
                samples=tuple(fresh_sample(f"{name}/{i}", i) for i in range(num_samples)),
                sampling=SamplingConfig(max_new_tokens=64),
                stop_token_ids=(*self.renderer.stop_token_ids, *range(256)),
                environment_context=EnvironmentContext(
                    messages=messages, answer="21", metadata=orjson.dumps(metadata).decode()
                ),
            )
        )

    def finish(self) -> list[GeneratedSample]:
        """Return all samples."""
        deadline, ended = time.monotonic() + 800, []
        while self.engine.num_running:
            assert time.monotonic() < deadline, "the episodes don't end"
            ended += self.engine.poll(timeout_seconds=0.5)
        return ended

    def count(self, *outcomes: str) -> int:
        """Return the attempts with these outcomes."""
        values = (
            self.registry.get_sample_value(
                "relax_episode_attempts_total", {"role": "rollout", "outcome": outcome}
            )
            for outcome in outcomes
        )
        return int(sum(value or 0 for value in values))


def check(kind: str, how: str, folder: Path, make: MakeEngine) -> None:
    """Run a hundred samples at each rate of one that misbehave."""
    with openenv_server() as address:
        matrix = Matrix(kind, folder, make, address)
        try:
            for num_guilty in RATES:
                check_rate(matrix, how, num_guilty)
        finally:
            matrix.engine.abort()
            matrix.driver.close()


def check_rate(matrix: Matrix, how: str, num_guilty: int) -> None:
    num_before = matrix.count("begun_again", "failed")
    with capture_logs() as logs:
        for number in range(num_guilty):
            matrix.submit(f"guilty-{number}", num_samples=1, how=how)
            share = (NUM_SAMPLES - num_guilty) // num_guilty
            matrix.submit(f"group-{number}", num_samples=share)
        samples = matrix.finish()
    innocents = [one for one in samples if one.sample_id.startswith("group-")]
    assert len(innocents) >= NUM_SAMPLES - 2 * num_guilty
    assert {one.finish_reason for one in innocents} == {FinishReason.STOP}
    num_turns = {sum(turn.role == "assistant" for turn in one.turns) for one in innocents}
    assert num_turns == {NUM_TURNS}
    guilty = [one for one in samples if one not in innocents]
    assert {one.finish_reason for one in guilty} == {ENDINGS[how]}, guilty[0].error
    spent = [
        entry
        for entry in logs
        if entry["event"] == "episode.failed" and re.search(r"attempt \d", entry["error"])
    ]
    assert not [entry for entry in spent if not entry["sample_id"].startswith("guilty-")]
    assert len(spent) == matrix.count("begun_again", "failed") - num_before


@pytest.mark.parametrize("make", ["transformers"], indirect=True)
@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_sample_that_misbehaves_costs_the_others_no_attempt(
    tmp_path: Path, make: MakeEngine, kind: str, how: str
) -> None:
    check(kind, how, tmp_path, make)


@pytest.mark.parametrize("make", ["sglang"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_sample_that_hangs_costs_the_others_no_attempt_with_sglang(
    tmp_path: Path, make: MakeEngine, kind: str
) -> None:
    check(kind, "hang", tmp_path, make)
