"""The ledger reads a real log in blocks: it finds each broken promise and holds no more than the
window in memory.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from event_samples import rolled_out
from valid_run import SETTINGS, TAMPERINGS, ValidRun

from relax_events.cli.ledger import check
from relax_events.config import RunConfig
from relax_events.errors import ConfigError, Interrupted
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef, TopicOffset
from relax_events.history import ledger as reading
from relax_events.history.ledger import read_ledger
from relax_events.kafka.admin import Admin
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.launcher.closing_report import ClosingReport
from relax_events.objects import ObjectStore
from relax_events.projections.ledger import Ledger
from relax_events.projections.ledger_findings import Rule
from relax_events.reports.terminal import ProgressDisplay
from relax_events.runtime.drain import Drain
from relax_events.session.records import RunSessions
from relax_events.topics import TopicPlan
from relax_events.weights.artifact_writer import write_weights

WEIGHTS = {"weight": torch.ones(3)}


@pytest.fixture
def config(apply_run: Callable[..., RunConfig], run_id: str) -> RunConfig:
    """Return a run whose topics are there."""
    return apply_run(run=SETTINGS["run"] | {"id": run_id}, broker=SETTINGS["broker"])


@pytest.fixture
def run_file(config: RunConfig, tmp_path: Path) -> Path:
    """Return the run file of that run."""
    path = tmp_path / "run.json"
    path.write_bytes(orjson.dumps(config.model_dump(mode="json")))
    return path


@pytest.fixture
def write(config: RunConfig, producer: RecordProducer) -> Callable[[ValidRun], None]:
    """Return a writer of a run's records, each at its offset."""

    def write(run: ValidRun) -> None:
        codec = EventCodec()
        schemas = TopicPlan.from_config(config).topic("control.schemas")
        producer.write(
            ProducerRecord(schemas, schema, key=name.hex())
            for name, schema in codec.published_form().items()
        )
        for at, event in run.items():
            key = getattr(event, "prompt_group_id", "")
            producer.write(
                [ProducerRecord(at.topic, codec.encode(event), key=key, partition=at.partition)]
            )

    return write


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read the log in one block, or in the smallest blocks; return how much the ledger held after
    each block."""
    held: list[int] = []

    def finalize(self: Ledger, below: int) -> None:
        held.append(self.num_held)
        plain(self, below)

    plain = Ledger.finalize
    monkeypatch.setattr(Ledger, "finalize", finalize)
    if request.param == "many blocks":
        for name, size in (("BLOCK_RECORDS", 1), ("CHUNK_RECORDS", 3), ("LARGE_CHUNK_RECORDS", 1)):
            monkeypatch.setattr(reading, name, size)
    return held


def test_ledger_reads_a_valid_log_with_memory_bounded_by_the_window(
    config: RunConfig, write: Callable[[ValidRun], None], blocks: list[int]
) -> None:
    run = ValidRun(30, run_id=config.run.id)
    write(run)
    read = read_ledger(config)
    assert read.problems() == []
    assert read.totals() == run.ledger(last_version=100).totals()
    assert len(blocks) == 1 or (len(blocks) > 25 and max(blocks) < 30)


@pytest.mark.parametrize("rule", TAMPERINGS)
def test_ledger_reports_exactly_the_violated_rule(
    rule: str, config: RunConfig, write: Callable[[ValidRun], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_RECORDS", 1)
    run = ValidRun(6, run_id=config.run.id)
    TAMPERINGS[rule](run)
    write(run)
    assert [finding.rule for finding in read_ledger(config).findings()] == [rule]


def test_the_closing_report_says_how_far_the_check_is_and_a_signal_ends_it(
    config: RunConfig, write: Callable[[ValidRun], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PROGRESS_RECORDS", 1)
    monkeypatch.setattr("relax_events.reports.reading_progress.FIRST_SECONDS", 0.0)
    run = ValidRun(6, run_id=config.run.id)
    write(run)
    counts: list[tuple[int, int]] = []
    read_ledger(config, on_progress=lambda *both: counts.append(both))
    assert counts == [(number, len(counts)) for number in range(1, len(counts) + 1)]

    drain, lines = Drain(seconds=1.0), io.StringIO()
    sessions = RunSessions(config.run_directory)
    with ProgressDisplay(config, stream=lines) as display:
        report = ClosingReport(config, sessions, drain, display)
        drain.signal = signal.SIGINT  # as its handler does
        with pytest.raises(Interrupted, match="log was not checked") as caught:
            report.finish(None, 1.0)
    assert caught.value.exit_code == 130
    assert f"of {len(counts):,} records read" in lines.getvalue()
    assert "Ctrl-C leaves it out: `relax report`" in lines.getvalue()


def test_ledger_lists_claims_unverifiable_because_records_were_purged(
    config: RunConfig, write: Callable[[ValidRun], None], admin: Admin
) -> None:
    run = ValidRun(12, run_id=config.run.id)
    write(run)
    topic_partitions = [
        (run.plan.topic(entity), partition)
        for entity in ("rollout.samples", "reward.scores")
        for partition in range(6)
    ]
    ends = {
        topic_partition: len(run.at(run.plan.parse_entity(topic_partition[0]), topic_partition[1]))
        for topic_partition in topic_partitions
    }
    admin.delete_records(
        TopicOffset(*topic_partition, end // 2) for topic_partition, end in ends.items() if end
    )
    read = read_ledger(config)
    assert read.problems() == []
    gone = sum(
        end // 2
        for topic_partition, end in ends.items()
        if topic_partition[0].endswith("rollout.samples")
    )
    assert read.totals()["samples_purged"] == gone
    assert (
        f"that {gone} trained samples were generated as they were trained, since their "
        "records are purged"
    ) in read.unverified()


def test_ledger_counts_foreign_and_unreadable_records(
    config: RunConfig, write: Callable[[ValidRun], None], producer: RecordProducer
) -> None:
    run = ValidRun(6, run_id=config.run.id)
    run.at("rollout.samples", 0).append(rolled_out("000900-0000-0"))
    write(run)
    producer.write(
        ProducerRecord(run.plan.topic("rollout.samples"), b"no event", partition=partition)
        for partition in range(6)
    )
    totals = read_ledger(config).totals()
    assert (totals["records_unreadable"], totals["samples_foreign"]) == (6, 1)


def test_ledger_reports_control_records_of_schemas_that_it_cannot_read(
    config: RunConfig, write: Callable[[ValidRun], None], producer: RecordProducer
) -> None:
    run = ValidRun(6, run_id=config.run.id)
    write(run)
    steps, samples = (run.plan.topic(name) for name in ("control.train-steps", "rollout.samples"))
    foreign = b"\x00\x00\x00\x00\x63" + bytes(20)  # framed by a registry of another run
    producer.write(
        [ProducerRecord(steps, b"no event", partition=0)]
        + [ProducerRecord(topic, foreign, partition=0) for topic in (steps, steps, samples)]
    )
    read = read_ledger(config)
    (finding,) = read.findings()
    assert (finding.rule, finding.count) == ("control record that can't be read", 2)
    assert finding.examples[0].startswith(f"{steps}[0]@")
    assert read.totals()["records_unreadable"] == 4


def test_ledger_reports_weight_manifests_that_differ_from_the_published_ones(
    config: RunConfig, write: Callable[[ValidRun], None]
) -> None:
    run, store = ValidRun(3, run_id=config.run.id), ObjectStore.open(config.objects_uri)
    for version in range(4):
        artifact, digest = write_weights(
            store, {**WEIGHTS, "version": torch.tensor(version)}, policy_version=version
        )
        run.change("control.policy-versions", version, artifact=artifact)
        if version:
            run.change("control.train-steps", version - 1, weights_digest=digest)
    run.change("control.train-steps", 1, weights_digest=bytes(32))
    write(run)
    store.delete(store.list("weights/00000003/"))  # as retention does
    (finding,) = read_ledger(config).findings()
    assert (finding.rule, finding.count) == ("weight manifest is not the one that was published", 1)
    assert finding.examples[0].startswith("policy version 2: ")
    altered: ObjectRef = run.at("control.policy-versions")[1].artifact  # type: ignore[union-attr]
    store.put_at(store.key(altered.uri), b"{}")
    (finding,) = read_ledger(config).findings()
    assert finding.count == 2
    assert "was altered" in finding.examples[0]


def test_ledger_check_prints_rule_record_locations_and_remedy(
    config: RunConfig,
    run_file: Path,
    write: Callable[[ValidRun], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ValidRun(6, run_id=config.run.id)
    TAMPERINGS["trained offset holds another record than the train step says"](run)
    write(run)
    assert check(run_file) == 6
    printed = capsys.readouterr().out
    partition, offset = run.find("advantage.samples", sample_id="000003-0000-0/1")
    assert "BROKEN  trained offset holds another record than the train step says: 2\n" in printed
    assert (
        f"000003-0000-0/0 of train step 3 at advantage.samples[{partition}]@{offset}\n" in printed
    )
    assert "remedy: is this the run's own cluster" in printed
    assert check(run_file, output="json") == 6
    (problem,) = orjson.loads(capsys.readouterr().out)["problems"]
    assert (problem["count"], len(problem["examples"])) == (2, 2)


def test_findings_name_the_fields_that_differ_with_both_values(
    config: RunConfig, write: Callable[[ValidRun], None]
) -> None:
    run = ValidRun(6, run_id=config.run.id)
    mask = np.array([1, 0, 1, 1], np.uint8)
    run.change_sample("advantage.samples", "000003-0000-0/1", temperature=0.5, loss_mask=mask)
    tokens = np.array([5, 9, 7, 9], np.int32)
    run.change_sample("advantage.samples", "000004-0000-0/1", tokens=tokens)
    write(run)
    tokens_altered, trajectory_altered = (
        [example.partition(": ")[2] for example in finding.examples]
        for finding in read_ledger(config).findings()
        if finding.rule in (Rule.OTHER_TOKENS, Rule.OTHER_TRAJECTORY)
    )
    assert tokens_altered == ["tokens[1] was 6, is 9 (2 values differ)"]
    assert trajectory_altered == ["temperature was 1.0, is 0.5; loss_mask[0] was 0, is 1"]


def test_ledger_check_warns_of_a_prompt_group_that_was_issued_twice(
    config: RunConfig,
    run_file: Path,
    write: Callable[[ValidRun], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ValidRun(6, run_id=config.run.id)
    run.issue("000003-0000-0")
    write(run)
    assert check(run_file) == 0
    printed = capsys.readouterr().out
    assert "WARNING  prompt group issued twice: 1\n        000003-0000-0: 2 times\n" in printed
    assert printed.endswith("all promises hold\n")
    assert check(run_file, output="json") == 0
    result = orjson.loads(capsys.readouterr().out)
    assert (result["problems"], [one["count"] for one in result["warnings"]]) == ([], [1])


def test_ledger_check_names_a_run_unknown_to_the_broker(config: RunConfig) -> None:
    other = config.model_copy(update={"run": config.run.model_copy(update={"id": "nobodys"})})
    with pytest.raises(ConfigError, match="the broker has no topics of a run 'nobodys'"):
        read_ledger(other)
