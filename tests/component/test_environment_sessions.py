"""Samples with stateful environments of other projects' interfaces: states, images, rewards, and
what happens when an environment fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_requests import fresh_sample
from prometheus_client import CollectorRegistry
from small_settings import small_run
from structlog.testing import capture_logs
from test_environments import ENGINE, SETTINGS, check_logprobs, engine_of, ready

from relax_events.config import SamplingConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import EnvironmentContext, GeneratedSample, GenerationRequest
from relax_events.environments.session_pool import SessionPool
from relax_events.episodes.engine import MIN_DISTURBED, EpisodeEngine
from relax_events.episodes.environment_drivers import StatefulDriver
from relax_events.episodes.session import Session
from relax_events.errors import ConfigError
from relax_events.events.parts import FinishReason
from relax_events.media.library import MediaLibrary
from relax_events.telemetry.component_metrics import EpisodeMetrics
from tests.unit.image_model import build_image_model, image_run, question

ENVIRONMENTS = Path(__file__).parents[1] / "session_environments.py"


class Talk:
    """An engine over a tiny model, and an environment with sessions."""

    def __init__(self, folder: Path, interface: str, name: str, **settings: Any) -> None:
        environment = {
            "interface": interface,
            "function": f"{ENVIRONMENTS}:{name}",
            "timeout_seconds": 100.0,
            **settings,
        }
        tree = image_run(folder).model_dump(mode="json", exclude_unset=True) | {
            "environment": environment,
            "engine": ENGINE,
        }
        self.config = small_run(tree)
        self.library, path = MediaLibrary(self.config), build_image_model()
        media = self.config.model.media
        self.renderer = PromptRenderer.from_folder(path, self.config.data, media=media)
        self.registry = CollectorRegistry()
        self.inner = engine_of(path, media, records_experts=False)
        self.pool = SessionPool(self.config)
        self.engine = EpisodeEngine(
            self.inner,
            StatefulDriver(self.pool, may_reward=True),
            config=self.config,
            renderer=self.renderer,
            metrics=EpisodeMetrics("rollout", self.registry),
        )

    def request(
        self, name: str = "g0", *, num_samples: int = 3, metadata: str = "{}", **sampling: Any
    ) -> GenerationRequest:
        messages = question()
        samples = tuple(fresh_sample(f"{name}/{index}", index) for index in range(num_samples))
        return GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=self.renderer.prompt_tokens(messages),
            samples=samples,
            sampling=SamplingConfig(**SETTINGS | sampling),
            stop_token_ids=(*self.renderer.stop_token_ids, *range(256)),
            environment_context=EnvironmentContext(
                messages=messages, answer="red", metadata=metadata
            ),
        )

    def finish(self, *requests: GenerationRequest) -> dict[str, GeneratedSample]:
        for request in requests:
            self.engine.submit(request)
        deadline, ended = time.monotonic() + 100, {}
        while self.engine.num_running:
            assert time.monotonic() < deadline
            ended |= {one.sample_id: one for one in self.engine.poll(timeout_seconds=0.5)}
        return ended

    def attempts(self, outcome: str) -> float | None:
        labels = {"role": "rollout", "outcome": outcome}
        return self.registry.get_sample_value("relax_episode_attempts_total", labels)


@contextmanager
def conversation(folder: Path, interface: str, name: str, **settings: Any) -> Iterator[Talk]:
    opened = Talk(folder, interface, name, **settings)
    try:
        yield opened
    finally:
        opened.engine.abort()
        opened.pool.close()


def texts(sample: GeneratedSample) -> list[str]:
    return [turn.text for turn in sample.turns if turn.role != "assistant"]


@pytest.mark.parametrize("name", ["build_env", "AsyncCounting"])
def test_interaction_environment_of_relax_runs_unchanged_with_its_state_and_images(
    tmp_path: Path, name: str
) -> None:
    options = {"num_turns": 3}
    with conversation(tmp_path, "interaction", name, options=options) as one:
        request = one.request()
        ended = one.finish(request)
        for sample in ended.values():
            said = [turn for turn in sample.turns if turn.role == "assistant"]
            assert texts(sample) == [f"{n} of red, {len(said[n - 1].text)}" for n in (1, 2)]
            assert [part.kind.value for part in sample.turns[1].parts] == ["image", "text"]
            assert sample.environment_rewards == (0.25, 0.5, 0.75)
            assert sample.finish_reason is FinishReason.STOP
        assert one.attempts("begun_again") == 0, "asynchronous sessions did not meet"
        policy, media = image_policy(one)
        check_logprobs(one, policy, media, [ready(request, each) for each in ended.values()])  # type: ignore[arg-type]


def image_policy(one: Talk) -> Any:
    import torch

    from relax_events.training.backend.policy_model import PolicyModel
    from relax_events.training.batch.sample_intake import SampleMedia

    policy = PolicyModel(one.config.model.path, config=one.config.model, device=torch.device("cpu"))
    return policy, SampleMedia(policy.family, one.library)


def test_gymnasium_environment_adds_its_first_observation_to_the_prompt(tmp_path: Path) -> None:
    with conversation(tmp_path, "gymnasium", "Guess", options={"low": 3}) as one:
        requests = [one.request("g0"), one.request("g1", metadata='{"seed": 7}')]
        ended = one.finish(*requests)
    firsts = {name: sample.prompt_messages[-1].text for name, sample in ended.items()}
    assert firsts["g1/0"] == "guess, seed 7"
    assert len({firsts[f"g0/{index}"] for index in range(3)}) == 1
    assert firsts["g0/0"] != firsts["g1/0"]
    for sample in ended.values():
        assert sample.prompt_tokens is not None
        expected = one.renderer.prompt_tokens(sample.prompt_messages)
        np.testing.assert_array_equal(sample.prompt_tokens, expected)
        assert texts(sample) == ["no, 1"]
        assert sample.environment_rewards == (0.5, 1.0)


def test_turn_that_is_cut_off_gets_no_reward_and_is_not_answered(tmp_path: Path) -> None:
    with conversation(tmp_path, "gymnasium", "Guess") as one:
        request = replace(one.request(max_new_tokens=1), stop_token_ids=(10**6,))
        for sample in one.finish(request).values():
            assert sample.finish_reason is FinishReason.LENGTH
            assert sample.environment_rewards == (0.0,)
            assert texts(sample) == []


def test_skyrl_gym_environment_writes_the_prompt_and_several_messages_a_turn(
    tmp_path: Path,
) -> None:
    with conversation(tmp_path, "skyrl_gym", "Lines", max_turns=2) as one:
        ended = one.finish(one.request())
        for sample in ended.values():
            assert [message.text for message in sample.prompt_messages][-1] == "in lines"
            assert len(sample.prompt_messages) == 2
            assert texts(sample) == ["a", "b"]
            assert sample.environment_rewards == (1.0, 1.0)
            assert sample.loss_mask is not None
            observed = sample.tokens[sample.loss_mask == 0]
            text = one.renderer.completion_text(observed, skip_special_tokens=False)
            assert text.count("<|im_start|>user") == 2
            assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("how", ["raises", "dies", "dies slowly", "hangs", "hangs at first"])
def test_episode_is_begun_again_when_its_environment_fails(tmp_path: Path, how: str) -> None:
    options = {"folder": str(tmp_path), "how": how}
    seconds = 10.0 if how.startswith("hangs") else 100.0
    deadlines = {"timeout_seconds": seconds, "start_seconds": seconds}
    with conversation(tmp_path, "gymnasium", "Failing", options=options, **deadlines) as one:
        ended = one.finish(one.request())
        assert all(sample.finish_reason is FinishReason.STOP for sample in ended.values())
        assert all(sample.environment_rewards == (0.5, 1.0) for sample in ended.values())
        assert one.attempts("finished") == 3
        assert one.attempts("begun_again") == (1 if how == "raises" else 0)
        assert one.attempts("alone") == (0 if how == "raises" else 1)
    assert len(list(tmp_path.glob("closed-*"))) >= 3


@pytest.mark.parametrize(
    ("name", "how", "problem", "num_alone", "num_failures"),
    [
        ("Misbehaving", "hangs", "took longer than 3 s (environment.timeout_seconds)", 1, 0),
        ("Misbehaving", "dies", "attempt 3 of 3", 1, 3),
        ("Misbehaving", "raises", "attempt 3 of 3", 0, 3),
        ("Misbehaving", "floods", "at most 4194304 bytes", 0, 0),
        ("Misbehaving", "slows", "", 0, 0),
        ("AsyncMisbehaving", "waits", "took longer than 3 s (environment.timeout_seconds)", 1, 0),
        ("AsyncMisbehaving", "hangs", "took longer than 3 s (environment.timeout_seconds)", 1, 0),
        ("AsyncMisbehaving", "gathers", "took longer than 3 s (environment.timeout_seconds)", 1, 0),
    ],
)
def test_session_that_misbehaves_costs_itself_alone(
    tmp_path: Path, name: str, how: str, problem: str, num_alone: int, num_failures: int
) -> None:
    with conversation(tmp_path, "gymnasium", name, timeout_seconds=3.0) as one:
        metadata = json.dumps({"options": {"how": how}})
        guilty = one.request("g0", num_samples=1, metadata=metadata)
        ended = one.finish(guilty, one.request("g1", num_samples=7))
        sample = ended.pop("g0/0")
        assert problem in sample.error
        is_late = "took longer" in problem
        ending = FinishReason.LATE if is_late else FinishReason.ERROR
        assert sample.finish_reason is (FinishReason.STOP if how == "slows" else ending)
        assert (len(sample.tokens) > 0) == (is_late or how == "slows")
        if is_late:
            assert sample.environment_rewards == (0.5, 0.0), "of the late turn too"
            assert one.attempts("late") == 1
        assert {each.finish_reason for each in ended.values()} == {FinishReason.STOP}
        assert {each.environment_rewards for each in ended.values()} == {(0.5, 1.0, 1.5)}
        spent = (one.attempts("begun_again") or 0) + (one.attempts("failed") or 0)
        assert spent == num_failures, "the guilty one's own"
        assert one.attempts("alone") == num_alone, "the guilty one"


def test_worker_warns_once_where_more_attempts_are_disturbed_than_finish(tmp_path: Path) -> None:
    with conversation(tmp_path, "gymnasium", "Guess") as one, capture_logs() as logs:
        for outcomes in (["disturbed"] * MIN_DISTURBED, ["finished"] * 40, ["disturbed"] * 9):
            for outcome in outcomes:
                assert not logs
                one.engine._count_attempt(outcome)
        for _ in range(5):
            one.engine._count_attempt("disturbed")
    (warning,) = logs
    assert (warning["event"], warning["remedy"]) == (
        "sessions.disturbed",
        "raise environment.processes",
    )
    assert (warning["num_disturbed"], warning["num_finished"]) == (41, 40)


def test_unforeseen_error_of_a_driver_costs_its_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with conversation(tmp_path, "gymnasium", "Guess") as one:
        drive = one.engine._driver.drive

        async def drive_most(session: Session) -> None:
            if session.sample.sample_id == "g0/0":
                raise KeyError("odd")
            await drive(session)

        monkeypatch.setattr(one.engine._driver, "drive", drive_most)
        ended = one.finish(one.request())
        sample = ended.pop("g0/0")
        assert (sample.finish_reason, "KeyError('odd')" in sample.error) == (
            FinishReason.ERROR,
            True,
        )
        assert {each.finish_reason for each in ended.values()} == {FinishReason.STOP}


def test_episode_fails_without_a_reward_after_its_last_attempt(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "how": "raises", "times": 99}
    with conversation(tmp_path, "gymnasium", "Failing", options=options, attempts=2) as one:
        ended = one.finish(one.request())
        for sample in ended.values():
            assert sample.finish_reason is FinishReason.ERROR
            assert not sample.environment_rewards
            assert not len(sample.tokens)
            assert "attempt 2 of 2" in sample.error
            assert "raised ConnectionError: the simulator is gone" in sample.error
        assert one.attempts("failed") == 3


def test_late_environment_names_its_deadline(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "how": "hangs at first", "times": 99}
    settings = {"options": options, "attempts": 1, "start_seconds": 0.5}
    with conversation(tmp_path, "gymnasium", "Failing", **settings) as one:
        (sample,) = one.finish(one.request(num_samples=1)).values()
        assert "took longer than 0.5 s (environment.start_seconds)" in sample.error


def test_aborted_sample_closes_its_session_and_begins_again_from_its_first_turn(
    tmp_path: Path,
) -> None:
    options = {"num_turns": 3}
    with conversation(tmp_path, "interaction", "AsyncCounting", options=options) as one:
        request = one.request()
        one.engine.submit(request)
        while not any(episode.session.num_calls > 1 for episode in one.engine._episodes.values()):
            one.engine.poll(timeout_seconds=0.1)
        aborted = one.engine.abort()
        assert {sample.finish_reason for sample in aborted} == {FinishReason.ABORT}
        assert not any(len(sample.tokens) for sample in aborted)
        ended = one.finish(request)
        assert all(sample.environment_rewards == (0.25, 0.5, 0.75) for sample in ended.values())
        deadline = time.monotonic() + 60
        while sum(one.pool._num_sessions):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_invalid_session_environment_is_rejected_at_startup(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no function 'Absent'"):
        Talk(tmp_path, "gymnasium", "Absent")
