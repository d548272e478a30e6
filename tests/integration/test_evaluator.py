"""The evaluator on the real control log: one version at a time, resumed after a restart, while
newer versions are published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pytest
from broker_steps import TIMEOUT_SECONDS
from event_samples import published

from relax_events.config import RunConfig
from relax_events.data.sources import named_evaluation_datasets, open_source
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.errors import WeightsError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.events.types import PolicyEvaluated, PolicyVersionPublished
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.rewards.pool import RewardPool
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.weights.manifest import Weights
from workers.evaluator import EvaluatorLoop

CODEC = EventCodec()
REWARD = """
import orjson

def grade(completion, *, answer, metadata, prompt):
    if completion == "3":
        raise ValueError("no grade for three")
    return float(int(completion or 0) < metadata["passing"])
"""


class CountingEngine:
    """Returns the sample's number as its completion, or one token too many; calls back after a
    number of samples."""

    def __init__(
        self, digits: list[int], *, call_after: int = 10**9, call: Callable[[], None] = lambda: None
    ) -> None:
        self.policy_version = -1
        self.loaded: list[int] = []
        self.seeds: dict[str, int] = {}
        self._digits, self._call_after, self._call = digits, call_after, call
        self._queued: list[GeneratedSample] = []
        self.num_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._queued)

    def submit(self, request: GenerationRequest) -> None:
        for sample in request.samples:
            number = int(sample.sample_id.rpartition("/")[2])
            self.seeds[f"{self.policy_version}:{sample.sample_id}"] = sample.seed
            tokens = np.array([self._digits[number]], np.int32)
            segments = (VersionSegment(self.policy_version, 1),)
            reason = FinishReason.LENGTH if number == 0 else FinishReason.STOP
            self._queued.append(GeneratedSample(
                sample_id=sample.sample_id, prompt_group_id=request.prompt_group_id, tokens=tokens,
                logprobs=np.zeros(1, np.float32), segments=segments, finish_reason=reason,
            ))  # fmt: skip

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        self._call_after -= 1
        if self._call_after == 0:
            self._call()
        self.num_tokens += len(self._queued) > 0
        return [self._queued.pop(0)] if self._queued else []

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        taken, self._queued = self._queued, []
        return taken

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        assert not self._queued
        self.policy_version = weights.policy_version
        self.loaded.append(weights.policy_version)

    def interrupt(self) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class KeptWeights:
    """Has no tensors, and of the versions named none at all."""

    name = "kept"

    def __init__(self, deleted: Collection[int] = ()) -> None:
        self._deleted = deleted

    def publish(self, tensors: Any, *, policy_version: int) -> Any: ...

    def fetch(self, published: PolicyVersionPublished) -> Weights:
        if published.policy_version in self._deleted:
            raise WeightsError(f"version {published.policy_version} was deleted")
        return Weights(published.policy_version, {}, bytes([published.policy_version]) * 32)


@pytest.fixture
def evaluated_run(apply_run: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    """Return a run of six steps, evaluated every second version on two datasets."""
    make_tiny(tmp_path / "model", corpus=["abc"], hidden_size=32, num_layers=1)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": "how many?", "answer": "", "passing": passing} for passing in (1, 3, 0)]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    reward = {"function": f"{tmp_path / 'reward.py'}:grade"}
    datasets = [
        {
            "name": name,
            "source": f"jsonl:{tmp_path / 'rows.jsonl'}",
            "samples_per_prompt": 4,
            "pass_at": [1, 2],
        }
        for name in ("a", "b")
    ]
    return apply_run(
        run={"num_steps": 6}, reward=reward, evaluation={"every": 2, "datasets": datasets}
    )


def digits_of(folder: Path) -> list[int]:
    """Return the token ids of the digits 0 to 3."""
    vocabulary = orjson.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    return [vocabulary[str(digit)] for digit in range(4)]


class Session:
    """An evaluator in a thread of this process, from start to drain."""

    def __init__(
        self, config: RunConfig, *, call_after: int = 10**9, deleted: Collection[int] = ()
    ) -> None:
        self._stack = ExitStack()
        self.worker: Worker = self._stack.enter_context(
            open_worker("evaluator", config, index=0, follow=("control.evaluations",))
        )
        self.engine = CountingEngine(
            digits_of(config.model.path), call_after=call_after, call=self.worker.drain.start
        )
        sources = {
            part.name: open_source(part, seed=0, section=section)
            for section, part in named_evaluation_datasets(config.evaluation)
        }
        rewards = {name: self._stack.enter_context(RewardPool(config.reward)) for name in sources}
        loop = EvaluatorLoop(
            self.worker, self.engine, KeptWeights(deleted), sources=sources, rewards=rewards
        )
        self._thread = threading.Thread(target=loop.run)
        self._thread.start()

    def drained(self) -> None:
        """Wait for the end of the loop."""
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()
        self._stack.close()

    def drain(self) -> None:
        """Request the end of the loop, and wait for it."""
        self.worker.drain.start()
        self.drained()


def publish(producer: RecordProducer, plan: TopicPlan, *versions: int) -> None:
    for version in versions:
        producer.write(
            [
                ProducerRecord(
                    plan.topic("control.policy-versions"),
                    CODEC.encode(published(version)),
                    partition=0,
                )
            ]
        )


def evaluations(connection: Connection, plan: TopicPlan, *, count: int) -> list[PolicyEvaluated]:
    """Wait for so many evaluations, and return them."""
    reader = LogReader(connection, start={(plan.topic("control.evaluations"), 0): 0})
    found: list[PolicyEvaluated] = []
    for _ in range(int(TIMEOUT_SECONDS / 0.2)):
        found += [
            event
            for record in reader.fetch(timeout_seconds=0.2)
            if isinstance(event := CODEC.decode(record.value), PolicyEvaluated)
        ]
        if len(found) >= count:
            break
    reader.close()
    return found


def test_evaluator_finishes_a_version_despite_newer_versions_and_a_restart(
    evaluated_run: RunConfig, producer: RecordProducer, connection: Connection
) -> None:
    plan = TopicPlan.from_config(evaluated_run)
    publish(producer, plan, 0)
    first = Session(evaluated_run, call_after=16)  # 12 samples of dataset a, and the first of b
    first.drained()
    publish(producer, plan, 1, 2, 3)
    assert [event.dataset for event in evaluations(connection, plan, count=1)] == ["a"]
    second = Session(evaluated_run)
    found = evaluations(connection, plan, count=4)
    second.drain()
    assert [(event.policy_version, event.dataset) for event in found] == [
        (0, "a"),
        (0, "b"),
        (2, "a"),
        (2, "b"),
    ]
    assert [event.weights_digest for event in found] == [
        bytes([version]) * 32 for version in (0, 0, 2, 2)
    ]
    assert (first.engine.loaded, second.engine.loaded) == ([0], [0, 2])
    # A version that is evaluated again, and every other one, returns the same sampled tokens.
    again = {name: seed for name, seed in second.engine.seeds.items() if name in first.engine.seeds}
    assert again
    assert again.items() <= first.engine.seeds.items()
    assert all(
        second.engine.seeds[f"2:{name[2:]}"] == seed for name, seed in first.engine.seeds.items()
    )


def test_evaluator_reports_metrics_of_its_samples(
    evaluated_run: RunConfig, producer: RecordProducer, connection: Connection
) -> None:
    plan = TopicPlan.from_config(evaluated_run)
    publish(producer, plan, 0)
    session = Session(evaluated_run)
    event = evaluations(connection, plan, count=1)[0]
    session.drain()
    # Completions are 0, 1, 2 and 3; 3 can't be graded, and below `passing` = 1, 3 and 0 lie one,
    # three and none of the other three.
    assert (
        event.num_prompts,
        event.samples_per_prompt,
        event.num_unscored,
        event.num_truncated,
        event.num_failed_prompts,
    ) == (3, 4, 3, 3, 0)
    assert event.reward_mean == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert event.reward_stderr == pytest.approx(np.std([1 / 3, 1, 0], ddof=1) / np.sqrt(3))
    # pass@2 of one in three: 1 - C(2, 2) / C(3, 2) = 2 / 3.
    assert event.pass_at_k == {
        "1": pytest.approx((1 / 3 + 1 + 0) / 3),
        "2": pytest.approx((2 / 3 + 1 + 0) / 3),
    }
    assert (event.completion_tokens_mean, event.reward_name) == (1.0, evaluated_run.reward.function)


def test_evaluator_skips_a_version_whose_weights_are_gone(
    evaluated_run: RunConfig, producer: RecordProducer, connection: Connection
) -> None:
    plan = TopicPlan.from_config(evaluated_run)
    publish(producer, plan, 0, 1, 2, 3, 4, 5, 6)
    session = Session(evaluated_run, deleted=(0, 2))
    found = evaluations(connection, plan, count=4)
    session.drain()
    assert [(event.policy_version, event.dataset) for event in found] == [
        (4, "a"),
        (4, "b"),
        (6, "a"),
        (6, "b"),
    ]
