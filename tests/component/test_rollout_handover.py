"""A rollout worker drains in the middle of a prompt group, and the next one samples exactly the
tokens that the first would have sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import issued

from relax_events.config import RunConfig
from relax_events.engines.protocol import GeneratedSample
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.kafka.leases import Lease
from relax_events.kafka.records import Record
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.roles.handover import PREFIX, PartialSamples
from relax_events.roles.inflight_group import InflightGroup
from relax_events.roles.sample_writer import SampleWriter
from relax_events.telemetry.traces import Traces
from tests.unit.image_model import build_image_model, image_engine
from workers.rollout import RolloutLoop

GROUP, NUM_TOKENS = "000000-0000-0", 12
PROMPT = np.arange(5, 15, dtype=np.int32)


class Producer:
    """Records are acknowledged when the test says so, or at a flush."""

    def __init__(self) -> None:
        self.acknowledge: list[Callable[[], None]] = []
        self.num_sent = self.num_lingers_ended = 0

    def send(self, record: Any, *, on_acknowledged: Callable[[], None] | None = None) -> None:
        self.num_sent += 1
        if on_acknowledged:
            self.acknowledge.append(on_acknowledged)

    def check(self) -> None:
        """Nothing else arrives."""

    def end_linger(self) -> None:
        self.num_lingers_ended += 1

    def flush(self) -> None:
        while self.acknowledge:
            self.acknowledge.pop(0)()


class Stage:
    """A rollout worker's loop over its own engine; its acknowledged leases and written samples."""

    def __init__(self, config: RunConfig, store: ObjectStore) -> None:
        self.settled: list[bool] = []
        self.written: list[GeneratedSample] = []
        self.engine: TransformersEngine = image_engine()
        self.producer = Producer()
        self.loop: Any = RolloutLoop.__new__(RolloutLoop)
        metrics = SimpleNamespace(
            count_tokens=lambda count: None, count_generated=lambda counts: None
        )
        worker: Any = SimpleNamespace(
            records=SimpleNamespace(
                traces=Traces(),
                producer=self.producer,
            ),
            lifecycle=SimpleNamespace(record_processed=lambda *_: None),
            metrics=metrics,
            config=config,
        )
        self.loop._worker, self.loop._config, self.loop._engine, self.loop._asleep = (
            worker,
            config,
            self.engine,
            False,
        )
        self.loop._renderer = SimpleNamespace(stop_token_ids=())
        self.loop._library = MediaLibrary(config, store=store)
        self.loop._waiting, self.loop._running = {}, {}
        self.loop._partials = PartialSamples(store)
        self.writer: Any = SampleWriter(worker, self.loop._renderer, self.loop._partials)
        self.writer._records = self._records
        self.loop._writer = self.writer

    def take(self, *, delivery_count: int) -> InflightGroup:
        """Take the prompt group's lease, and begin."""
        lease = Lease(Record("queue", 0, 0, GROUP, b"", {}, 0), delivery_count, self.settled.append)
        group = InflightGroup([lease], issued(GROUP, of=3), PROMPT)
        if delivery_count > 1:
            group.resume(self.loop._partials.find(GROUP, num_samples=3))
        assert self.loop._submit(group)
        return group

    def generate(self, *, num_tokens: int) -> None:
        """Continue until so many tokens are generated."""
        while self.engine.num_tokens < num_tokens and self.engine.num_running:
            for sample in self.engine.poll(timeout_seconds=0.0):
                self.loop._running[sample.prompt_group_id].samples.append(sample)

    def _records(self, group: InflightGroup) -> list[Any]:
        self.written += group.samples
        return list(group.samples)


@pytest.fixture
def config(make_run_config: Callable[..., RunConfig]) -> RunConfig:
    return make_run_config(
        model={"path": build_image_model(), "device": "cpu"},
        engine={"sampling": {"max_new_tokens": NUM_TOKENS}},
    )


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(tmp_path.as_uri())


def tokens_of(samples: list[GeneratedSample]) -> dict[str, list[int]]:
    return {sample.sample_id: sample.tokens.tolist() for sample in samples}


def logprobs_of(samples: list[GeneratedSample]) -> list[float]:
    return [
        value
        for sample in sorted(samples, key=lambda sample: sample.sample_id)
        for value in sample.logprobs.tolist()
    ]


def test_next_worker_resumes_handed_over_samples_with_the_same_tokens(
    config: RunConfig, store: ObjectStore
) -> None:
    undisturbed, leaving, taking = (Stage(config, store) for _ in range(3))
    undisturbed.take(delivery_count=1)
    undisturbed.generate(num_tokens=3 * NUM_TOKENS)
    undisturbed.loop._hand_over_unfinished()
    undisturbed.writer.flush()
    assert (undisturbed.settled, store.list(PREFIX)) == ([True], []), (
        "what has ended by then is written"
    )

    leaving.take(delivery_count=1)
    leaving.generate(num_tokens=NUM_TOKENS)
    leaving.loop._hand_over_unfinished()
    assert (leaving.settled, leaving.written, store.list(PREFIX)) == (
        [False],
        [],
        [f"{PREFIX}{GROUP}"],
    )

    taking.take(delivery_count=2)
    taking.generate(num_tokens=3 * NUM_TOKENS)
    taking.writer.send(list(taking.loop._running.values()), 0.0)
    taking.writer.flush()
    assert (taking.settled, store.list(PREFIX)) == ([True], [])
    assert taking.engine.usage.num_recomputed == leaving.engine.num_tokens
    assert taking.engine.num_tokens + leaving.engine.num_tokens == undisturbed.engine.num_tokens, (
        "no token was generated twice"
    )
    written, expected = tokens_of(taking.written), tokens_of(undisturbed.written)
    assert written == expected
    assert logprobs_of(taking.written) == pytest.approx(logprobs_of(undisturbed.written), abs=1e-5)


def test_lease_is_settled_when_all_samples_are_acknowledged_and_not_before(
    config: RunConfig, store: ObjectStore
) -> None:
    stage = Stage(config, store)
    group = stage.take(delivery_count=1)
    stage.generate(num_tokens=3 * NUM_TOKENS)
    stage.writer.send([stage.loop._running.pop(GROUP)], 0.0)
    stage.writer.settle_acknowledged()
    assert (stage.settled, list(stage.writer.written), stage.producer.num_sent) == ([], [], 3)
    assert stage.loop._find_inflight(GROUP) is group, "a lease delivered again joins the first"
    (acknowledge,) = stage.producer.acknowledge
    acknowledge()
    stage.writer.settle_acknowledged()
    assert (stage.settled, list(stage.writer.written), stage.writer.sent) == ([True], [GROUP], {})


@pytest.mark.parametrize(("max_staleness", "num_ended"), [(0, 4), (1, 0)])
def test_an_eighth_of_a_step_waits_for_no_others_on_policy(
    make_run_config: Callable[..., RunConfig],
    store: ObjectStore,
    max_staleness: int,
    num_ended: int,
) -> None:
    run = {"max_staleness": max_staleness, "prompts_per_step": 16}
    config = make_run_config(model={"path": build_image_model(), "device": "cpu"}, run=run)
    stage = Stage(config, store)
    stage.writer._records = lambda group: [group.issued.prompt_group_id]
    for index in range(9):
        group = InflightGroup([], issued(f"000000-{index:04}-0", of=3), PROMPT)
        stage.writer.send([group], 0.0)
    assert (stage.producer.num_sent, stage.producer.num_lingers_ended) == (9, num_ended)
