"""Topic tools of operators: lag and health, offset resets, purge, export and import, on a small log
written by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import orjson
import pytest
from broker_steps import turn_until
from event_samples import committed, ended, published, ready, rolled_out, scored

from relax_events.cli.app import app
from relax_events.config import RunConfig
from relax_events.errors import BrokerError, BrokerRefused, CheckFailed, ConfigError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import CheckpointRef, Outcome, TopicOffset
from relax_events.events.types import Event, PromptGroupIssued
from relax_events.history.ledger import read_ledger
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.leases import Lease
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.objects import ObjectStore
from relax_events.ops.consumer_lag import read_partition_lag, sum_by_member, sum_by_slot
from relax_events.ops.export_manifest import Manifest
from relax_events.ops.offset_reset import ResetTarget, apply_reset, parse_time_ms, plan_reset
from relax_events.ops.run_export import ExportFilter, export_run, parse_versions
from relax_events.ops.run_import import import_run, plan_import, verify_import
from relax_events.ops.run_purger import open_purge
from relax_events.ops.topic_apply import apply_topics, plan_changes
from relax_events.ops.topic_check import check_topics
from relax_events.ops.topic_tail import find_partitions, find_start_offsets, tail
from relax_events.packages.dashboard.registry import find_runbook
from relax_events.topics import TopicPlan, TopicSpec
from relax_events.topics.plan import list_input_partitions

STEPS, MAX_STALENESS = 5, 1
QUIET = ("reward", "advantage", "trainer")
EVERYTHING = ExportFilter()


@dataclass
class SmallRun:
    """A run of five steps of one prompt group of two samples, on three slots of one shard; each
    step trains the version before it."""

    config: RunConfig
    plan: TopicPlan
    connection: Connection
    admin: Admin

    def write(self, producer: RecordProducer, *, checkpoint: CheckpointRef | None = None) -> None:
        """Write the whole log as the roles would: samples plainly, what the trainer decides in
        transactions. The last step names the checkpoint."""
        codec = EventCodec()
        writer = TransactionalWriter(
            self.connection, transactional_id=self.plan.transactional_id("trainer")
        )
        schemas = codec.published_form().items()
        producer.write(
            ProducerRecord(self.plan.topic("control.schemas"), schema, key=name.hex())
            for name, schema in schemas
        )
        writer.commit([self.make_record(codec, "control.policy-versions", self._published(0))])
        for step in range(STEPS):
            group = f"{step:06d}-0000-0"
            producer.write(self._samples(codec, step, group))
            partition = step % 3
            first = (
                self.admin.end_offsets([(self.plan.topic("advantage.samples"), partition)])[
                    self.plan.topic("advantage.samples"), partition
                ]
                - 2
            )
            record = committed(
                step,
                prompt_group_ids=[group],
                sample_ids=[f"{group}/0", f"{group}/1"],
                partitions=np.array([partition] * 2, np.int32),
                offsets=np.array([first, first + 1], np.int64),
                consumed=[TopicOffset(self.plan.topic("advantage.samples"), partition, first + 2)],
                ranks=np.zeros(2, np.int32),
                micro_batches=np.zeros(2, np.int32),
                staleness_counts=[2],
                checkpoint=checkpoint if step == STEPS - 1 else None,
            )
            trained = ended(group, Outcome.TRAINED, version=step)
            out = [
                self.make_record(codec, "control.train-steps", record),
                self.make_record(codec, "control.prompt-group-outcomes", trained),
            ]
            writer.commit(
                [
                    *out,
                    self.make_record(codec, "control.policy-versions", self._published(step + 1)),
                ]
            )
        writer.close()

    def commit_all(self) -> None:
        """Let every role have read everything."""
        for role in QUIET:
            topic_partitions = list_input_partitions(self.config, role)
            ends = self.admin.end_offsets(topic_partitions)
            self.admin.set_committed_offsets(
                self.plan.consumer_group(role),
                [TopicOffset(*topic_partition, end) for topic_partition, end in ends.items()],
            )

    def issue(self, step: int, group: str) -> PromptGroupIssued:
        """Return the prompt group of a step."""
        return PromptGroupIssued(
            prompt_group_id=group,
            train_step=step,
            group_index=0,
            attempt=0,
            row=step,
            required_policy_version=max(step - MAX_STALENESS, 0),
            samples_per_prompt=2,
            messages=[],
            seed=1,
        )

    def _samples(self, codec: EventCodec, step: int, group: str) -> list[ProducerRecord]:
        records = [self.make_record(codec, "prompt.groups", self.issue(step, group))]
        no_signal = np.zeros(4, np.float32)  # both samples have the same reward
        for index in range(2):
            for entity, event in (
                ("rollout.samples", rolled_out(group, index, version=step)),
                ("reward.scores", scored(group, index, version=step)),
                ("advantage.samples", ready(group, index, version=step, advantages=no_signal)),
            ):
                records.append(
                    self.make_record(codec, entity, event, partition=step % 3, version=step)
                )
        return records

    def make_record(
        self,
        codec: EventCodec,
        entity: str,
        event: Event,
        *,
        partition: int = 0,
        version: int | None = None,
    ) -> ProducerRecord:
        headers = {} if version is None else {POLICY_VERSION_HEADER: str(version)}
        key = getattr(event, "prompt_group_id", "")
        return ProducerRecord(
            self.plan.topic(entity),
            codec.encode(event),
            key=key,
            partition=partition,
            headers=headers,
        )

    def _published(self, version: int) -> Event:
        topic_partitions = [(topic, version % 3) for topic in self.plan.sample_topics()]
        offsets = self.admin.end_offsets(topic_partitions)
        return published(
            version,
            start_offsets=[
                TopicOffset(topic, partition, offset)
                for (topic, partition), offset in offsets.items()
            ],
        )


@pytest.fixture
def unwritten(
    apply_run: Callable[..., RunConfig], connection: Connection, admin: Admin
) -> SmallRun:
    """Return the small run, its topics empty."""
    config = apply_run(
        run={
            "max_staleness": MAX_STALENESS,
            "num_steps": STEPS,
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
        },
        broker={"partitions_per_version": 1, "queue_partitions": 1},
    )
    return SmallRun(config, TopicPlan.from_config(config), connection, admin)


@pytest.fixture
def run(unwritten: SmallRun, producer: RecordProducer) -> SmallRun:
    """Return the small run, written."""
    unwritten.write(producer)
    return unwritten


def test_lag_names_the_version_of_each_slot_and_its_stale_records(run: SmallRun) -> None:
    topic_partitions = [(run.plan.topic("rollout.samples"), partition) for partition in range(3)]
    run.admin.set_committed_offsets(
        run.plan.consumer_group("reward"),
        [TopicOffset(*topic_partitions[0], 1), TopicOffset(*topic_partitions[1], 4)],
    )
    rows = [
        row
        for row in sum_by_slot(read_partition_lag(run.config, run.admin), now_ms=2**62)
        if row.role == "reward"
    ]
    # Versions 0 and 3 wrote two samples each into slot 0, 1 and 4 into slot 1, 2 into slot 2;
    # version 5 owns slot 2 and has none.
    assert [(row.slot, row.policy_version, row.num_records, row.num_stale) for row in rows] == [
        (0, 3, 3, 1),
        (1, 4, 0, 0),
        (2, 5, 2, 2),
    ]
    assert [row.age_seconds is None for row in rows] == [False, True, False]


def finish_prompt_groups(run: SmallRun, after_each: Callable[[int], object]) -> None:
    """Finish all prompt groups one by one, as a rollout worker does."""
    inbox: SimpleQueue[Lease] = SimpleQueue()
    source = ShareGroupLeases(
        run.connection,
        group=run.plan.consumer_group("rollout"),
        topic=run.plan.topic("prompt.groups"),
        max_leases=1,
        on_lease=inbox.put,
    )
    with closing(source):
        for left in reversed(range(STEPS)):
            inbox.get(timeout=100).done()
            after_each(left)


def test_lag_counts_the_prompt_groups_that_no_rollout_worker_finished(
    run: SmallRun,
) -> None:
    """The queue of a share group, before its first member and with one; by slot and by member."""

    def queue_rows() -> list[tuple[str, int | None, int, bool]]:
        lags = read_partition_lag(run.config, run.admin)
        by_slot = [row for row in sum_by_slot(lags, now_ms=2**62) if row.role == "rollout"]
        by_member = sum_by_member(lags, {}, now_ms=2**62)
        (mine,) = [row for row in by_member if row.role == "rollout"]
        assert [row.num_records for row in by_slot] == [mine.num_records]
        assert mine.partitions == "prompt.groups[0]"
        return [(row.role, row.slot, row.num_records, row.age_seconds is None) for row in by_slot]

    assert queue_rows() == [("rollout", None, STEPS, False)]
    finish_prompt_groups(run, lambda left: turn_until(lambda: queue_rows()[0][2] == left))
    assert queue_rows() == [("rollout", None, 0, True)]


@pytest.fixture
def diagnose(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], dict[str, Any]]:
    """Return a runner of the commands of an alert's runbook that read the log and end: their JSON,
    by their first two words."""
    file = tmp_path / "run.json"
    file.write_bytes(orjson.dumps(run.config.model_dump(mode="json")))

    def run_commands(alert: str) -> dict[str, Any]:
        shown = {}
        for line in re.findall(r"^relax (.*)$", find_runbook(alert), re.MULTILINE):
            words = line.replace("configs/quickstart.toml", str(file)).split()
            if words[:2] in (["topics", "show"], ["ledger", "check"]):
                capsys.readouterr()
                app([*words, "--output", "json"])
                shown[" ".join(words[:2])] = orjson.loads(capsys.readouterr().out)
        assert shown, f"the runbook of {alert} reads nothing"
        return shown

    return run_commands


def lag_by_role(shown: dict[str, Any]) -> Counter[str]:
    lag: Counter[str] = Counter()
    for row in shown["topics show"]:
        lag[row["role"]] += row["lag"]
    return +lag


@pytest.mark.parametrize(
    "alert", ["RelaxTrainerStarved", "RelaxRunStalled", "RelaxPromptQueueGrowing"]
)
def test_runbook_shows_prompt_groups_that_wait_for_rollout(
    alert: str, run: SmallRun, diagnose: Callable[[str], dict[str, Any]]
) -> None:
    run.commit_all()
    assert lag_by_role(diagnose(alert)) == {"rollout": STEPS}


@pytest.mark.parametrize(
    "alert", ["RelaxTrainerStarved", "RelaxRunStalled", "RelaxPromptQueueEmpty"]
)
def test_runbook_shows_the_role_behind_when_nothing_is_left_to_generate(
    alert: str, run: SmallRun, diagnose: Callable[[str], dict[str, Any]]
) -> None:
    run.commit_all()
    finish_prompt_groups(run, lambda _: None)
    turn_until(lambda: "rollout" not in lag_by_role(diagnose(alert)))
    assert lag_by_role(diagnose(alert)) == {}, "the prompter issues nothing"
    samples = [(run.plan.topic("rollout.samples"), partition) for partition in range(3)]
    run.admin.set_committed_offsets(
        run.plan.consumer_group("reward"), [TopicOffset(*one, 0) for one in samples]
    )
    assert lag_by_role(diagnose(alert)) == {"reward": 2 * STEPS}


def test_runbook_shows_prompt_groups_that_expired_and_records_that_will(
    run: SmallRun, producer: RecordProducer, diagnose: Callable[[str], dict[str, Any]]
) -> None:
    group = f"{STEPS:06d}-0000-0"
    codec, issued = EventCodec(), run.issue(STEPS, group)
    expired = ended(group, Outcome.EXPIRED, version=STEPS)
    producer.write([run.make_record(codec, "prompt.groups", issued)])
    producer.write([run.make_record(codec, "control.prompt-group-outcomes", expired)])
    shown = diagnose("RelaxStalenessAtBound")
    outcomes = shown["ledger check"]["outcomes"]
    assert (outcomes["trained"], outcomes["expired"]) == (STEPS, 1)
    stale = sum(row["stale"] for row in shown["topics show"] if row["role"] == "trainer")
    # of versions 0, 1 and 2, whose slots versions 3, 4 and 5 own: two samples each
    assert stale == 6


def test_lag_by_member_lists_the_partitions_of_each_member(run: SmallRun) -> None:
    group = run.plan.consumer_group("reward")
    member = SubscribedConsumer(
        run.connection, consumer_group=group, topics=[run.plan.topic("rollout.samples")]
    )
    turn_until(lambda: len(member.positions) == 3, lambda: member.fetch(timeout_seconds=0.1))
    found = sum_by_member(
        read_partition_lag(run.config, run.admin),
        {"reward": run.admin.groups(group)[group]},
        now_ms=2**62,
    )
    mine = next(row for row in found if row.role == "reward")
    assert (mine.member, mine.num_records, mine.partitions) == (
        run.connection.client_id,
        10,
        "rollout.samples[0,1,2]",
    )
    with pytest.raises(
        BrokerRefused,
        match=rf"consumer group {group} has live members: {run.connection.client_id} at ",
    ):
        apply_reset(
            run.admin, plan_reset(run.config, run.admin, "reward", ResetTarget(to_beginning=True))
        )
    member.close()


def test_reset_moves_offsets_and_refuses_to_skip_unread_records(run: SmallRun) -> None:
    group, topic = run.plan.consumer_group("reward"), run.plan.topic("rollout.samples")
    topic_partitions = [(topic, partition) for partition in range(3)]
    run.commit_all()
    plan = plan_reset(run.config, run.admin, "reward", ResetTarget(version=3))
    assert [
        (move.topic_partition[1], move.before, move.after, move.num_skipped) for move in plan.moves
    ] == [
        (0, 4, 2, -2),
        (1, 4, 2, -2),
    ]
    apply_reset(run.admin, plan)
    assert run.admin.committed_offsets(group, topic_partitions) == {
        (topic, 0): 2,
        (topic, 1): 2,
        (topic, 2): 2,
    }
    ahead = plan_reset(run.config, run.admin, "reward", ResetTarget(to_end=True))
    with pytest.raises(
        BrokerRefused,
        match=r"records that the role has not read would be skipped.*--allow skip",
    ):
        apply_reset(run.admin, ahead)
    apply_reset(run.admin, ahead, allow=["skip"])
    assert run.admin.committed_offsets(group, topic_partitions)[topic, 0] == 4
    apply_reset(
        run.admin,
        plan_reset(run.config, run.admin, "reward", ResetTarget(offsets=["rollout.samples[2]@1"])),
    )
    assert run.admin.committed_offsets(group, topic_partitions) == {
        (topic, 0): 4,
        (topic, 1): 4,
        (topic, 2): 1,
    }
    apply_reset(
        run.admin,
        plan_reset(
            run.config, run.admin, "reward", ResetTarget(time_ms=parse_time_ms("2001-01-01"))
        ),
    )
    assert set(run.admin.committed_offsets(group, topic_partitions).values()) == {0}


def test_reset_of_trainer_and_of_a_share_group_is_refused(run: SmallRun) -> None:
    run.commit_all()
    with pytest.raises(
        BrokerRefused,
        match=r"resetting trainer: the trainer continues from its checkpoint.*--allow trainer",
    ):
        apply_reset(
            run.admin, plan_reset(run.config, run.admin, "trainer", ResetTarget(to_beginning=True))
        )
    with pytest.raises(
        ConfigError, match=r"role 'rollout' reads nothing by committed offsets: its share group"
    ):
        plan_reset(run.config, run.admin, "rollout", ResetTarget(to_beginning=True))


def test_purge_waits_for_groups_and_keeps_what_recovery_needs(run: SmallRun) -> None:
    with open_purge(run.config, before_version=4) as purge:
        assert {cut.num_records for cut in purge.ranges if "samples" in cut.topic_partition[0]} == {
            0
        }  # no group has read anything
    run.commit_all()
    with open_purge(run.config, before_version=4) as purge:
        gone = purge.apply()
    # Versions 0 to 2 go; 3 stays, since no retained version has its slot yet. Without a checkpoint
    # every step may have to be trained again. Of the queue, the slots of steps 0 to 2 go, which
    # made versions 1 to 3.
    assert gone == {"rollout.samples": 6, "reward.scores": 6, "prompt.groups": 3}
    ledger = read_ledger(run.config)
    assert ledger.problems() == []
    totals = ledger.totals()
    assert (totals["prompt_groups_purged"], totals["samples_purged"]) == (3, 6)
    reader = LogReader(run.connection)
    with pytest.raises(
        BrokerError, match=r"rollout.samples\[0\]@0 was purged: the log begins at 2"
    ):
        reader.read_at(run.plan.topic("rollout.samples"), [(0, 0)])
    reader.close()


def test_purge_is_bounded_by_the_newest_complete_checkpoint(
    unwritten: SmallRun, producer: RecordProducer
) -> None:
    run, store = unwritten, ObjectStore.open(unwritten.config.objects_uri)
    shard = store.put_at("checkpoints/00000003/a/shard.safetensors", b"tensors")
    manifest = store.put_at(
        "checkpoints/00000003/a/manifest.json", orjson.dumps({"shards": [{"uri": shard.uri}]})
    )
    run.write(producer, checkpoint=CheckpointRef(3, manifest.uri, manifest.digest))
    run.commit_all()

    def trained_records_that_go() -> dict[int, int]:
        with open_purge(run.config, before_version=4) as purge:
            return {
                cut.topic_partition[1]: cut.num_records
                for cut in purge.ranges
                if cut.topic_partition[0] == run.plan.topic("advantage.samples")
            }

    assert trained_records_that_go() == {
        0: 2,
        1: 2,
        2: 2,
    }  # those of steps 0 to 2; 3 and 4 would be trained again
    store.delete(["checkpoints/00000003/a/shard.safetensors"])
    assert trained_records_that_go() == {0: 0, 1: 0, 2: 0}


def test_purge_refuses_without_a_version(run: SmallRun) -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"the run file sets no run.retain_versions; set it, or give --before-version",
        ),
        open_purge(run.config),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"policy version 77 was not published; the newest is 5"),
        open_purge(run.config, before_version=77),
    ):
        pass


def test_tail_starts_at_a_version_and_shows_unreadable_records(
    run: SmallRun, producer: RecordProducer
) -> None:
    producer.write([ProducerRecord(run.plan.topic("rollout.samples"), b"no event", partition=1)])
    topic_partitions = find_partitions(run.config.run, run.admin, "rollout.samples", partition=1)
    with RunLog(run.config, name="tail") as log:
        found = list(
            tail(
                log,
                find_start_offsets(log, run.admin, topic_partitions, "version:4"),
                stops=run.admin.end_offsets(topic_partitions),
            )
        )
        assert [
            (item.event, item.record.offset, item.fields.get("key", {}).get("policy_version"))
            for item in found
        ] == [
            ("SamplesRolledOut", 2, 4),
            ("SamplesRolledOut", 3, 4),
            ("unreadable", 4, None),
        ]
        assert found[0].fields["tokens"] == [5, 6, 7, 8]
        with pytest.raises(
            ConfigError,
            match=r"--from 'tomorrow' is no start; give beginning, end, an offset",
        ):
            find_start_offsets(log, run.admin, topic_partitions, "tomorrow")
    with pytest.raises(
        ConfigError, match=r"has no topic 'nothing'; it has actor-forward.dead-letters"
    ):
        find_partitions(run.config.run, run.admin, "nothing", partition=None)


def test_topics_check_reports_every_deviation(
    run: SmallRun, producer: RecordProducer, run_id: str
) -> None:
    producer.write(
        [
            ProducerRecord(
                run.plan.topic("reward.dead-letters"),
                b"x",
                headers={"error-class": "CorruptRecord"},
            )
        ]
    )
    topic = run.plan.topic("control.evaluations")
    run.admin.alter_topic(topic, {"retention.ms": "60000"})
    run.admin.create([TopicSpec(f"relax.{run_id}.reward.scores.other", 3, 1, "of a test")])
    turn_until(lambda: run.admin.topics(topic)[topic].settings["retention.ms"] == "60000")
    findings = check_topics(run.config, run.admin)
    wrong = [
        (finding.what, finding.text.removeprefix(f"relax.{run_id}."))
        for finding in findings
        if not finding.is_good
    ]
    assert wrong == [
        ("plan", "control.evaluations: alter retention.ms: 60000 -> -1"),
        ("dead letters", "reward could not process 1 record(s)"),
        ("groups", "reward has no members"),
        ("groups", "advantage has no members"),
    ]
    assert all(finding.remedy for finding in findings if not finding.is_good)
    assert (
        "plan",
        f"relax.{run_id}.reward.scores.other: not in the plan, created by rescoring",
    ) in [(item.what, item.text) for item in findings]


def test_apply_rejects_dangerous_changes_that_are_not_allowed_by_name(run: SmallRun) -> None:
    topic = run.plan.topic("control.metrics.trainer")
    run.admin.create([TopicSpec(run.plan.topic("strange"), 1, 1, "of a test")])
    run.admin.alter_topic(topic, {"max.message.bytes": str(64 * 1024 * 1024)})
    turn_until(
        lambda: (
            run.admin.topics(topic)[topic].settings["max.message.bytes"] == str(64 * 1024 * 1024)
        )
    )
    with pytest.raises(
        BrokerRefused,
        match=r"max.message.bytes: 67108864 -> 16777216 is smaller records.*--allow record-size",
    ):
        apply_topics(run.config, run.admin)
    apply_topics(run.config, run.admin, allow=["record-size"])
    turn_until(
        lambda: (
            [
                change.kind
                for change in plan_changes(run.plan.specs(), run.admin.topics(run.plan.topic("")))
            ]
            == ["extra"]
        )
    )
    apply_topics(run.config, run.admin, allow=["delete"])
    assert run.plan.topic("strange") not in run.admin.topics(run.plan.topic(""))


def copy(
    run: SmallRun, folder: Path, wanted: ExportFilter = EVERYTHING
) -> tuple[RunConfig, Manifest]:
    """Export and import under another id; return the new run and the manifest."""
    lines: list[str] = []
    manifest = export_run(
        run.config, run.admin, folder, wanted, with_objects=False, report=lines.append
    )
    config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"id": f"{run.config.run.id}-copy"})}
    )
    plan = plan_import(config, run.admin, manifest)
    import_run(config, run.admin, folder, manifest, plan, report=lines.append)
    assert len(lines) == 2 * len(manifest.partitions)
    return config, manifest


def test_imported_run_is_byte_identical_to_the_exported_one(run: SmallRun, tmp_path: Path) -> None:
    run.commit_all()
    config, manifest = copy(run, tmp_path / "exported")
    verify_import(config, manifest)
    plan = TopicPlan.from_config(config)
    assert read_ledger(config).totals() == read_ledger(run.config).totals()
    assert read_ledger(config).problems() == []
    changes = plan_changes(plan.specs(), run.admin.topics(plan.topic("")))
    assert changes == []
    topic_partition = (plan.topic("advantage.samples"), 2)
    assert run.admin.committed_offsets(plan.consumer_group("trainer"), [topic_partition]) == {
        topic_partition: 2
    }
    again = plan_import(config, run.admin, Manifest.load(tmp_path / "exported"))
    assert (again.partitions, again.num_present) == ([], len(manifest.partitions))
    with pytest.raises(
        ConfigError,
        match=r"3 partitions in the export and 4 by the run file; give run.max_staleness and broker.partitions_per_version",
    ):
        plan_import(
            config.model_copy(update={"run": config.run.model_copy(update={"max_staleness": 2})}),
            run.admin,
            manifest,
        )


def test_import_rejects_a_run_with_other_records_and_redoes_an_unfinished_one(
    run: SmallRun, producer: RecordProducer, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    config, manifest = copy(run, folder)
    topic = TopicPlan.from_config(config).topic("control.train-steps")
    producer.write([ProducerRecord(topic, b"one more", partition=0)])
    with pytest.raises(
        BrokerRefused,
        match=r"control.train-steps\[0\] holds other records: it ends at 11; give another --run-id",
    ):
        plan_import(config, run.admin, manifest)
    with pytest.raises(
        CheckFailed,
        match=r"control.train-steps\[0\] is not as exported: it ends at 11 instead of 10",
    ):
        verify_import(config, manifest)
    run.admin.alter_topic(topic, {"message.timestamp.type": "CreateTime"})
    turn_until(lambda: plan_unfinished(config, run.admin, manifest) == [topic])
    plan = plan_import(config, run.admin, manifest)
    import_run(config, run.admin, folder, manifest, plan, report=lambda _: None)
    verify_import(config, manifest)


def plan_unfinished(config: RunConfig, admin: Admin, manifest: Manifest) -> list[str]:
    try:
        return plan_import(config, admin, manifest).unfinished
    except BrokerRefused:
        return []


def test_export_of_versions_holds_their_samples_at_their_offsets(
    run: SmallRun, tmp_path: Path
) -> None:
    entities = ("rollout.samples", "control.train-steps")
    config, manifest = copy(run, tmp_path / "some", ExportFilter(entities, parse_versions("2..3")))
    counts = {(item.entity, item.partition): item.num_records for item in manifest.partitions}
    assert counts == {
        ("control.train-steps", 0): 5,
        ("rollout.samples", 0): 2,
        ("rollout.samples", 1): 0,
        ("rollout.samples", 2): 2,
    }
    reader, topic = (
        LogReader(run.connection),
        TopicPlan.from_config(config).topic("rollout.samples"),
    )
    found = {
        (record.partition, record.offset, record.policy_version)
        for record in reader.read_to_end([(topic, 0), (topic, 2)])
    }
    assert found == {(0, 2, 3), (0, 3, 3), (2, 0, 2), (2, 1, 2)}
    reader.close()


def test_interrupted_export_resumes_and_altered_files_are_rejected(
    run: SmallRun, tmp_path: Path
) -> None:
    folder, wanted = tmp_path / "exported", ExportFilter(("reward.scores",))
    whole = export_run(
        run.config, run.admin, folder, wanted, with_objects=False, report=lambda _: None
    )
    digests = [item.file_digest for item in whole.partitions]
    (folder / whole.partitions[1].file).unlink()
    lines: list[str] = []
    again = export_run(
        run.config, run.admin, folder, wanted, with_objects=False, report=lines.append
    )
    assert ([item.records_digest for item in again.partitions], len(lines)) == (
        [item.records_digest for item in whole.partitions],
        1,
    )
    with pytest.raises(
        ConfigError, match=r"holds an export of run .* with filters .*; name another folder"
    ):
        export_run(
            run.config, run.admin, folder, ExportFilter(), with_objects=False, report=lambda _: None
        )
    path = folder / again.partitions[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckFailed, match=rf"was altered: its SHA-256 must be {digests[0]}"):
        import_run(
            run.config,
            run.admin,
            folder,
            again,
            plan_import(run.config, run.admin, again),
            report=lambda _: None,
        )
