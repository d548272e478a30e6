"""A step is committed atomically: batch, outcomes, version and offsets; recovery trains it again in
the recorded order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import ended, ready

from relax_events.config import RunConfig
from relax_events.errors import BrokerError, BrokerUnavailable, Fenced, RunFailed
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef, Outcome, TopicOffset
from relax_events.events.types import PolicyVersionPublished, SampleReady, TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.worker import Worker
from relax_events.staleness import describe_left
from relax_events.training.batch.assembly import BatchAssembler, LocatedSample
from relax_events.training.batch.live_batches import LiveBatches
from relax_events.training.batch.sample_intake import SampleIntake
from relax_events.training.commit import StepCommitter
from relax_events.training.ranks import SingleRank
from relax_events.training.replay.recovery import Replay
from relax_events.training.step_commits import StepCommits
from relax_events.training.step_record import RankStepResult
from relax_events.weights.artifact_writer import weights_digest

ARTIFACT = ObjectRef("file:///objects/weights/manifest.json", bytes(32), 10)
DIGEST = weights_digest({})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open((tmp_path / "objects").as_uri())


@pytest.fixture
def worker(apply_run: Callable[..., RunConfig], store: ObjectStore) -> Iterator[Worker]:
    config = apply_run(run={"max_staleness": 1})
    with Worker(
        "trainer", config, claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6)
    ) as opened:
        yield opened


@pytest.fixture
def open_committer(worker: Worker, store: ObjectStore) -> Iterator[Callable[[], StepCommitter]]:
    opened: list[Any] = []

    def make() -> StepCommitter:
        reader = LogReader(worker.connection, consumer_group=worker.plan.consumer_group("trainer"))
        opened.extend([reader, StepCommitter(worker, reader)])
        found: StepCommitter = opened[-1]
        return found

    yield make
    for thing in opened:
        thing.close()


def write_groups(worker: Worker, group_ids: Sequence[str]) -> dict[str, list[LocatedSample]]:
    """Write ready samples of version 0 and return them with their offsets."""
    placed: dict[str, list[LocatedSample]] = {}
    for group_id in group_ids:
        for index in range(2):
            sample = ready(group_id, index)
            worker.records.producer.send(
                worker.records.build_for_sample(
                    "advantage.samples", sample, prompt_group_id=group_id, policy_version=0
                )
            )
    worker.records.producer.flush()
    reader = LogReader(worker.connection)
    topic = worker.plan.topic("advantage.samples")
    for record in reader.read_to_end(
        [(topic, partition) for partition in range(worker.plan.num_sample_partitions)]
    ):
        event = worker.records.decode(record)
        assert isinstance(event, SampleReady)
        placed.setdefault(event.prompt_group_id, []).append(
            LocatedSample(event, record.partition, record.offset)
        )
    reader.close()
    return placed


def share_of(
    worker: Worker, micro_batches: Sequence[Sequence[LocatedSample]], *, trainer_version: int = 0
) -> RankStepResult:
    share = RankStepResult(0)
    for batch in micro_batches:
        share.add_micro_batch(batch, trainer_version=trainer_version)
    share.prompt_group_ids = list(
        dict.fromkeys(item.sample.prompt_group_id for batch in micro_batches for item in batch)
    )
    ends = {item.partition: item.offset + 1 for batch in micro_batches for item in batch}
    share.consumed = [
        TopicOffset(worker.plan.topic("advantage.samples"), partition, offset)
        for partition, offset in ends.items()
    ]
    return share


def commit(
    committer: StepCommitter, share: RankStepResult, *, train_step: int = 0
) -> TrainStepCommitted:
    return committer.commit_step(
        [share],
        train_step=train_step,
        artifact=ARTIFACT,
        digest=DIGEST,
        metrics={"loss": 0.5},
        phase_seconds={},
        checkpoint=None,
    )


def test_committed_step_is_readable_without_the_object_store(
    worker: Worker, store: ObjectStore
) -> None:
    """Samples may be in the store; outcomes may not."""
    with Worker(
        "trainer", worker.config, claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=1)
    ) as tight:
        reader = LogReader(tight.connection, consumer_group=tight.plan.consumer_group("trainer"))
        committer = StepCommitter(tight, reader)
        committer.publish_initial(ARTIFACT)
        step = commit(
            committer, share_of(worker, list(write_groups(worker, ["000000-0000-0"]).values()))
        )
        committer.close()
        reader.close()
    history_of(worker, num_steps=1)
    log = LogReader(worker.connection)
    (record,) = [
        found
        for found in log.read_to_end([(worker.plan.topic("control.train-steps"), 0)])
        if found.key == "0"
    ]
    log.close()
    found = EventCodec().decode(record.value)
    assert isinstance(found, TrainStepCommitted)
    assert found.offsets.tolist() == step.offsets.tolist()


def test_unreadable_train_step_stops_the_trainer(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    committer = open_committer()
    committer.publish_initial(ARTIFACT)
    commit(committer, share_of(worker, list(write_groups(worker, ["000000-0000-0"]).values())))
    steps = worker.plan.topic("control.train-steps")
    version = PolicyVersionPublished(
        policy_version=2, artifact=ARTIFACT, transports=["store"], start_offsets=[]
    )
    history_of(worker, num_steps=1)
    worker.records.producer.write(
        [
            ProducerRecord(steps, b"no event", key="1"),
            worker.records.build("control.policy-versions", version, key="2"),
        ]
    )
    with pytest.raises(
        BrokerError,
        match=r"policy version 2 was published, but train step 1 can't be read .* training is blocked until it can be read",
    ):
        turn_until(lambda: False, lambda: TrainingHistory.read(worker))


def history_of(worker: Worker, *, num_steps: int) -> TrainingHistory:
    """Read the history once so many steps are visible."""
    found: list[TrainingHistory] = []
    turn_until(
        lambda: bool(found) and len(found[-1].steps) == num_steps,
        lambda: found.append(TrainingHistory.read(worker)),
    )
    return found[-1]


def test_committed_step_is_on_the_log_whole(
    worker: Worker, open_committer: Callable[[], StepCommitter], admin: Admin
) -> None:
    committer = open_committer()
    committer.publish_initial(ARTIFACT)
    placed = write_groups(worker, ["000000-0000-0", "000000-0001-0"])
    share = share_of(worker, list(placed.values()))
    share.ended = [ended("000000-0002-0", Outcome.FILTERED)]
    step = commit(committer, share)
    history = history_of(worker, num_steps=1)
    assert (
        history.steps[0].sample_ids
        == step.sample_ids
        == [f"{group_id}/{index}" for group_id in placed for index in range(2)]
    )
    assert history.steps[0].metrics["loss"] == 0.5
    assert history.ended_group_ids == {"000000-0000-0", "000000-0001-0", "000000-0002-0"}
    assert [event.policy_version for event in history.published] == [0, 1]
    consumed = {(offset.topic, offset.partition): offset.offset for offset in share.consumed}
    assert history.positions() == {
        ("advantage.samples", partition): offset for (_, partition), offset in consumed.items()
    }
    turn_until(
        lambda: admin.committed_offsets(worker.plan.consumer_group("trainer"), consumed) == consumed
    )


def test_published_version_carries_the_start_offsets_of_its_records(
    worker: Worker, open_committer: Callable[[], StepCommitter], producer: RecordProducer
) -> None:
    placed = write_groups(worker, ["000000-0000-0"])
    committer = open_committer()
    committer.publish_initial(ARTIFACT)
    turn_until(lambda: not TrainingHistory.read(worker).is_fresh)
    (event,) = TrainingHistory.read(worker).published
    starts = {(offset.topic, offset.partition): offset.offset for offset in event.start_offsets}
    partitions = worker.plan.partitions_of_version(0)
    assert starts.keys() == {
        (topic, partition) for topic in worker.plan.sample_topics() for partition in partitions
    }
    own = placed["000000-0000-0"][0].partition
    assert {topic_partition for topic_partition, offset in starts.items() if offset} == {
        (worker.plan.topic("advantage.samples"), own)
    }
    assert starts[worker.plan.topic("advantage.samples"), own] == 2


class RecordingBackend:
    """A trainer backend that remembers what it was given."""

    def __init__(self, version: int = 0) -> None:
        self.policy_version = version
        self.steps: list[list[list[str]]] = [[]]

    def accumulate(self, samples: Sequence[SampleReady]) -> None:
        self.steps[-1].append([sample.sample_id for sample in samples])

    def step(self) -> None:
        self.steps.append([])
        self.policy_version += 1

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Any]]:
        assert max_bytes > 0
        return iter([{}])


def test_replay_trains_the_recorded_batches_in_the_recorded_order(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    committer = open_committer()
    placed = write_groups(worker, [f"000000-000{index}-0" for index in range(4)])
    first, second, third, fourth = placed.values()
    commit(committer, share_of(worker, [[third[1], first[0]], [first[1]], [third[0]]]))
    commit(committer, share_of(worker, [fourth, second], trainer_version=1), train_step=1)
    history = history_of(worker, num_steps=2)
    backend: Any = RecordingBackend()
    assert Replay(worker, backend, SingleRank()).run(history.steps)
    assert backend.policy_version == 2
    assert backend.steps[:2] == [
        [ids_of(third[1], first[0]), ids_of(first[1]), ids_of(third[0])],
        [ids_of(*fourth), ids_of(*second)],
    ]


def ids_of(*placed: LocatedSample) -> list[str]:
    return [item.sample.sample_id for item in placed]


def test_replay_reports_weights_that_differ_from_the_recorded_ones(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    placed = write_groups(worker, ["000000-0000-0"])
    committer = open_committer()
    share = share_of(worker, list(placed.values()))
    committer.commit_step(
        [share],
        train_step=0,
        artifact=ARTIFACT,
        digest=bytes(32),
        metrics={},
        phase_seconds={},
        checkpoint=None,
    )
    backend: Any = RecordingBackend()
    assert not Replay(worker, backend, SingleRank()).run(history_of(worker, num_steps=1).steps)


def test_replay_refuses_a_gap(worker: Worker, open_committer: Callable[[], StepCommitter]) -> None:
    placed = write_groups(worker, ["000000-0000-0"])
    commit(
        open_committer(), share_of(worker, list(placed.values()), trainer_version=3), train_step=3
    )
    backend: Any = RecordingBackend()
    with pytest.raises(
        RunFailed, match="the log goes from version 0 to step 3; the control log has a gap"
    ):
        Replay(worker, backend, SingleRank()).run(history_of(worker, num_steps=1).steps)


def test_replay_refuses_a_record_that_is_not_the_one_that_was_trained(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    (placed,) = write_groups(worker, ["000000-0000-0"]).values()
    share = share_of(worker, [placed])
    share.offsets.reverse()
    commit(open_committer(), share)
    backend: Any = RecordingBackend()
    with pytest.raises(
        RunFailed,
        match="held sample 000000-0000-0/0 when it was trained, and holds 000000-0000-0/1 now",
    ):
        Replay(worker, backend, SingleRank()).run(history_of(worker, num_steps=1).steps)


class OneOfTwo(SingleRank):
    """One of two ranks that find the same weights; the other one is not there."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        return b"same"


def test_replay_deals_out_micro_batches_when_the_number_of_ranks_changed(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    """Two ranks replay the batch of one: all samples together, micro-batches unchanged, in as many
    rounds."""
    placed = write_groups(worker, [f"000000-{index:04d}-0" for index in range(5)])
    commit(open_committer(), share_of(worker, list(placed.values())))
    steps = history_of(worker, num_steps=1).steps
    trained: list[list[list[str]]] = []
    for rank in range(2):
        backend = RecordingBackend()
        assert Replay(worker, cast("Any", backend), OneOfTwo(rank)).run(steps)
        trained.append(backend.steps[0])
    first, second = trained
    assert [len(first), len(second)] == [3, 3]
    assert second[-1] == []
    assert sorted(first + second[:-1]) == sorted(ids_of(*items) for items in placed.values())


def fail_once(
    committer: StepCommitter, before: Callable[[], None], *, really_commits: bool
) -> None:
    """Let the committer's next try end with an indefinite error."""
    original = committer._writer._try
    pending = [before]

    def attempt(*arguments: Any) -> None:
        first = bool(pending)
        if first:
            pending.pop()()
        if really_commits or not first:
            original(*arguments)
        if first:
            raise BrokerUnavailable("committing a transaction: _TIMED_OUT")

    committer._writer._try = attempt  # type: ignore[method-assign]


def test_step_is_committed_once_when_a_successful_commit_reported_an_error(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    placed = write_groups(worker, ["000000-0000-0"])
    committer = open_committer()
    fail_once(committer, lambda: None, really_commits=True)
    commit(committer, share_of(worker, list(placed.values())))
    assert len(history_of(worker, num_steps=1).published) == 1


def test_step_is_committed_on_retry_when_the_first_try_failed(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    placed = write_groups(worker, ["000000-0000-0"])
    committer = open_committer()
    fail_once(committer, lambda: None, really_commits=False)
    commit(committer, share_of(worker, list(placed.values())))
    assert len(history_of(worker, num_steps=1).published) == 1


def test_trainer_ends_when_another_committed_its_step_meanwhile(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    """A zombie with an uncommitted step must not continue from unpublished weights."""
    placed = write_groups(worker, ["000000-0000-0", "000000-0001-0"])
    mine, others = placed.values()
    zombie = open_committer()

    def other_trainer_commits() -> None:
        commit(open_committer(), share_of(worker, [others]))

    fail_once(zombie, other_trainer_commits, really_commits=False)
    with pytest.raises(Fenced, match="train step 0 was committed by another trainer; end this one"):
        commit(zombie, share_of(worker, [mine]))
    assert history_of(worker, num_steps=1).ended_group_ids == {others[0].sample.prompt_group_id}


@pytest.mark.parametrize("num_known", [1, 2])
def test_outcomes_are_committed_once_or_fenced_by_another_trainer(
    worker: Worker, open_committer: Callable[[], StepCommitter], num_known: int
) -> None:
    ends = [ended("000000-0000-0"), ended("000000-0001-0", Outcome.EXPIRED)]
    committer = open_committer()

    def others_commit() -> None:
        open_committer().commit_outcomes(ends[:num_known], train_step=0)

    fail_once(committer, others_commit, really_commits=False)
    if num_known == 1:
        with pytest.raises(
            Fenced,
            match="the outcome of prompt group 000000-0000-0 was committed by another trainer",
        ):
            committer.commit_outcomes(ends, train_step=0)
    else:
        committer.commit_outcomes(ends, train_step=0)
    turn_until(lambda: len(TrainingHistory.read(worker).ended_group_ids) == num_known)


def test_prompt_groups_that_the_last_step_left_end_until_the_drain(
    worker: Worker, open_committer: Callable[[], StepCommitter]
) -> None:
    committer, ranks, unused = open_committer(), SingleRank(), cast("Any", SimpleNamespace())
    assembler = BatchAssembler(max_staleness=1, decided=set(), in_order=True)
    topic = worker.plan.topic("advantage.samples")
    intake = SampleIntake(
        worker, unused, assembler, library=unused, topic=topic, keeps_decoded=True
    )
    publisher: Any = SimpleNamespace(
        has_uncommitted_step=False, commit_outcomes=committer.commit_outcomes
    )
    backend: Any = SimpleNamespace(policy_version=4)
    commits = StepCommits(worker, backend, ranks, publisher=publisher, assembler=assembler)
    opener: Any = SimpleNamespace(ranks=ranks)
    reader = LogReader(worker.connection, consumer_group=worker.plan.consumer_group("trainer"))
    live = LiveBatches(
        worker, reader, opener, assembler=assembler, intake=intake, commits=commits, turns=unused
    )
    live.assign({})

    def request_end(group_id: str) -> None:
        worker.records.producer.send(
            worker.records.build_end_request(group_id, Outcome.EXPIRED, describe_left(4))
        )
        worker.records.producer.flush()

    before, after = "000003-0004-0", "000003-0005-0"
    thread = threading.Thread(target=live.end_left, args=(4,))
    thread.start()
    try:
        request_end(before)
        turn_until(lambda: TrainingHistory.read(worker).ended_group_ids == {before})
        request_end(after)
    finally:
        worker.drain.start()
        thread.join(TIMEOUT_SECONDS)
        reader.close()
    assert not thread.is_alive()
    history = TrainingHistory.read(worker)
    assert history.ended_group_ids == {before, after}
    assert history.outcomes == {"expired": 2}
