"""A log written by hand is read back by version, reward and id, with lineage, and is rescored with
another reward function.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import orjson
import pytest
from event_samples import ended
from small_settings import small_run
from written_run import WrittenRun

from relax_events.cli.app import app
from relax_events.config import RewardConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.events.codec import MAGIC
from relax_events.events.parts import Command, Outcome
from relax_events.events.types import SampleScored
from relax_events.history.lineage.prompt import prompt_lineage
from relax_events.history.lineage.reader import sample_lineage
from relax_events.history.lineage.version import version_lineage
from relax_events.history.run_log import RunLog
from relax_events.history.samples.detail import read_detail
from relax_events.history.samples.filter import UNBOUNDED, Bounds, SampleFilter
from relax_events.history.samples.reader import (
    follow_samples,
    live_starts,
    read_last_lines,
    read_last_samples,
    read_lines,
    read_samples,
)
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.ops.rescoring import (
    KeptScores,
    RecordedScores,
    open_kept_scores,
    read_completions,
)
from relax_events.rewards.comparison import Comparison, compare_scores
from relax_events.rewards.trial import FunctionScorer
from tests.schema_changes import end_by_newer_release

A, B, C, D, E, F, G = (
    f"{step:06d}-{group_index:04d}-0"
    for step, group_index in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0))
)
REWARDS = """
def opposite(completion, *, answer, metadata, prompt):
    return {"reward": 0.0 if "completion 1" in completion else 1.0}

def picky(completion, *, answer, metadata, prompt):
    if "000000-0001-0" in completion:
        raise ValueError("not that one")
    return 1.0
"""


@pytest.fixture(scope="module")
def written(
    bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WrittenRun]:
    """Write versions 0 to 3: A, B and C on version 0, D on 1, E (failed) and F (unscored) on 2, G
    (open) on 3; garbage behind F and G.

    There are three slots, so version 3 continues in the partitions of version 0.
    """
    folder = tmp_path_factory.mktemp("written")
    (folder / "rows.jsonl").write_bytes(
        b"".join(orjson.dumps({"prompt": text, "answer": ""}) + b"\n" for text in "abcd")
    )
    (folder / "rewards.py").write_text(REWARDS)
    tree = {
        "run": {"id": f"t-{uuid.uuid4().hex[:12]}", "directory": str(folder), "max_staleness": 1},
        "model": {"path": str(folder / "model")},
        "data": {"source": f"jsonl:{folder / 'rows.jsonl'}", "shuffle": False},
        "broker": {"bootstrap_servers": bootstrap_servers, "request_timeout_seconds": 10.0},
    }
    run = WrittenRun(small_run(tree))
    run.publish(0)
    for row, group_id in enumerate((A, B, C, D, E, F, G)):
        run.issue(group_id, row=row)
    run.generate(A, version=0, rewards=[0.0, 1.0])
    run.generate(B, version=0, rewards=[0.25, 0.5], worker_id="rollout-1")
    run.generate(C, version=0, rewards=[0.75, 1.0])
    run.train(0, A, B)
    run.generate(D, version=1, rewards=[0.5, 0.5])
    run.train(1, C, D)
    run.generate(E, version=2, rewards=[0.0, 0.0])
    run.end(E, Outcome.FAILED, version=2)
    run.generate(F, version=2, rewards=[None, None])
    run.write_bytes("rollout.samples", b"garbage", group_id=F, version=2)
    run.publish(3)
    run.generate(G, version=3, rewards=[1.0, 0.0])
    run.write_bytes("rollout.samples", b"garbage", group_id=G, version=3)
    yield run
    run.close()


@pytest.fixture
def log(written: WrittenRun) -> Iterator[RunLog]:
    with RunLog(written.config, name="test") as opened:
        yield opened


def groups_of(log: RunLog, wanted: SampleFilter) -> list[str]:
    return sorted({line.sample_id.rpartition("/")[0] for line in read_lines(log, wanted)})


@pytest.mark.parametrize(
    ("wanted", "groups", "num_unreadable"),
    [
        (SampleFilter(), [A, B, C, D, E, F, G], 2),
        (SampleFilter(versions=(0, 0)), [A, B, C], 0),
        (SampleFilter(versions=(1, 2)), [D, E, F], 1),
        (SampleFilter(versions=(3, 9)), [G], 1),
        (SampleFilter(rewards=(-1, 0.25)), [A, B, E, G], 2),
        (SampleFilter(prompt_group_id=D), [D], 0),
        (SampleFilter(sample_id=f"{G}/1"), [G], 1),
        (SampleFilter(train_step=1), [C, D], 0),
        (SampleFilter(worker_id="rollout-1"), [B], 2),
        (SampleFilter(contains="1 of 000001-0001"), [D], 2),
    ],
    ids=str,
)
def test_sample_filter_reads_only_the_relevant_log_ranges(
    log: RunLog, wanted: SampleFilter, groups: list[str], num_unreadable: int
) -> None:
    """The garbage among versions 2 and 3 shows which parts were read."""
    assert groups_of(log, wanted) == groups
    assert log.unreadable.count == num_unreadable


def test_record_that_can_not_be_read_is_named(log: RunLog) -> None:
    list(read_samples(log, SampleFilter(versions=(2, 2))))
    partition = log.plan.partition(F, 2)
    offset = 4 if partition == log.plan.partition(E, 2) else 2
    location, text = log.unreadable.named[0].split(": ", 1)
    assert location == f"relax.{log.config.run.id}.rollout.samples[{partition}]@{offset}"
    assert text.startswith("record of 7 bytes doesn't begin with")


def test_sample_view_includes_reward_and_outcome(log: RunLog) -> None:
    views = {view.sample.sample_id: view for view in read_samples(log, SampleFilter())}
    assert len(views) == 14
    trained, failed, unscored = views[f"{C}/0"], views[f"{E}/0"], views[f"{F}/1"]
    assert (trained.reward, trained.outcome, trained.train_step, trained.staleness(3)) == (
        0.75,
        "trained",
        1,
        1,
    )
    assert (failed.reward, failed.outcome, failed.train_step, failed.staleness(3)) == (
        0.0,
        "failed",
        None,
        1,
    )
    assert (unscored.reward, unscored.outcome) == (None, "open")


def test_last_samples_are_the_newest(log: RunLog) -> None:
    def newest_first_by_version(count: int) -> list[str]:
        return [
            line.sample_id
            for line in read_last_lines(log, SampleFilter(worker_id="rollout-1"), count=count)
        ]

    assert newest_first_by_version(1) == [f"{B}/1"]
    assert newest_first_by_version(9) == [f"{B}/0", f"{B}/1"]
    assert {
        view.sample.sample_id
        for view in read_last_samples(log, SampleFilter(versions=(3, 3)), count=1)
    } == {f"{G}/1"}
    assert read_last_lines(log, SampleFilter(), count=0) == []


def test_follow_samples_yields_new_matching_samples(apply_run: Callable[..., RunConfig]) -> None:
    run = WrittenRun(apply_run(run={"max_staleness": 1}))
    run.publish(0)
    run.issue(A, row=0)
    run.generate(A, version=0, rewards=[0.0, 0.5])
    with RunLog(run.config, name="test") as log:
        live = follow_samples(log, SampleFilter(rewards=(0.5, 1)), live_starts(log))
        run.publish(1)
        run.issue(B, row=1)
        run.generate(B, version=0, rewards=[0.25, 0.75])
        line = next(live)
    run.close()
    assert (line.sample_id, line.reward, line.outcome, line.staleness) == (
        f"{B}/1",
        0.75,
        "open",
        1,
    )


def test_follow_samples_ends_with_its_run(apply_run: Callable[..., RunConfig]) -> None:
    run = WrittenRun(apply_run(run={"max_staleness": 1}))
    run.publish(0)
    run.issue(A, row=0)
    with RunLog(run.config, name="test") as log:
        live = follow_samples(log, SampleFilter(), live_starts(log))
        run.generate(A, version=0, rewards=[0.25, 0.75])
        assert next(live).sample_id == f"{A}/0"
        run.command(Command.STOP)
        assert [line.sample_id for line in live] == [f"{A}/1"]
    with RunLog(run.config, name="test") as log:  # over when the reader comes
        assert list(follow_samples(log, SampleFilter(), live_starts(log))) == []
    run.close()


def test_sample_detail_includes_the_record_that_the_trainer_received(log: RunLog) -> None:
    detail = read_detail(log, f"{D}/1")
    assert detail.ready is not None
    assert (detail.view.sample.completion, detail.ready.event.reward, detail.num_generations) == (
        f"completion 1 of {D}",
        0.5,
        1,
    )
    for name, text in (
        (D, "is no sample id"),
        ("000009-0000-0/0", "has no sample 000009-0000-0/0"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_detail(log, name)


def test_sample_lineage_spans_from_data_row_to_policy_version(log: RunLog) -> None:
    lineage = sample_lineage(log, f"{C}/1")
    stages = {stage.what: stage for stage in lineage.stages}
    assert list(stages) == [
        "issued",
        "rolled_out",
        "scored",
        "ready",
        "trained",
        "published",
        "ended",
    ]
    assert (stages["issued"].facts["data_row"], stages["issued"].facts["row"]) == (2, 2)
    assert stages["rolled_out"].facts["policy_version"] == 0
    assert (stages["scored"].facts["reward"], stages["scored"].facts["reward_name"]) == (
        1.0,
        "exact_match",
    )
    assert (stages["trained"].facts["train_step"], stages["trained"].facts["staleness"]) == (1, 1)
    assert stages["published"].facts["policy_version"] == 2
    assert stages["scored"].position.startswith(
        f"relax.{log.config.run.id}.reward.scores[{log.plan.partition(C, 0)}]@"
    )
    assert (lineage.first_version, lineage.num_generations) == (2, 1)


def test_lineage_of_an_untrained_sample_stops_at_its_last_stage(log: RunLog) -> None:
    assert [stage.what for stage in sample_lineage(log, f"{F}/0").stages] == [
        "issued",
        "rolled_out",
    ]
    lineage = sample_lineage(log, f"{E}/0")
    assert [stage.what for stage in lineage.stages] == [
        "issued",
        "rolled_out",
        "scored",
        "ready",
        "ended",
    ]
    assert (lineage.stages[-1].facts["outcome"], lineage.first_version) == ("failed", None)


def test_version_lineage_lists_its_samples_rewards_and_rows(log: RunLog) -> None:
    lineage = version_lineage(log, 2)
    assert (lineage.train_step, lineage.prompt_group_ids, lineage.staleness_counts) == (
        1,
        [C, D],
        [2, 2],
    )
    found = [
        (sample.sample_id, sample.data_row, sample.policy_version, sample.reward)
        for sample in lineage.samples
    ]
    assert found == [
        (f"{C}/0", 2, 0, 0.75),
        (f"{C}/1", 2, 0, 1.0),
        (f"{D}/0", 3, 1, 0.5),
        (f"{D}/1", 3, 1, 0.5),
    ]
    assert [(use.reward_name, use.num_samples, use.mean_reward) for use in lineage.rewards] == [
        ("exact_match", 4, 0.6875)
    ]
    assert version_lineage(log, 0).train_step is None
    with pytest.raises(
        ConfigError, match=r"version 4 was not published; run .* has versions 0 to 3"
    ):
        version_lineage(log, 4)


def test_prompt_lineage_lists_every_train_step_that_used_a_row(log: RunLog) -> None:
    uses = prompt_lineage(log, "0")  # four rows in their own order: positions 0 and 4
    assert [(use.prompt_group_id, use.outcome, use.train_step) for use in uses] == [
        (A, "trained", 0),
        (E, "failed", None),
    ]
    assert [(use.data_row, use.row) for use in uses] == [(0, 0), (0, 4)]
    (use,) = prompt_lineage(log, D)
    assert [(line.sample_id, line.reward) for line in use.samples] == [
        (f"{D}/0", 0.5),
        (f"{D}/1", 0.5),
    ]
    for prompt, text in (
        ("7", "never issued row 7"),
        ("000009-0000-0", "never issued prompt group"),
        ("tea", "rows of the data are numbers"),
    ):
        with pytest.raises(ConfigError, match=text):
            prompt_lineage(log, prompt)


@pytest.fixture
def run_rescore(written: WrittenRun) -> Callable[..., tuple[Comparison, KeptScores]]:
    """Return what rescores the written run."""

    def run(
        function: str, *, name: str, versions: Bounds = UNBOUNDED
    ) -> tuple[Comparison, KeptScores]:
        reward = RewardConfig(
            function=f"{written.config.run.directory / 'rewards.py'}:{function}", timeout_seconds=10
        )
        with (
            RunLog(written.config, name="rescore") as log,
            FunctionScorer(reward) as scorer,
            open_kept_scores(log, scorer, name) as kept,
        ):
            comparison = compare_scores(
                read_completions(log, versions, [scorer]),
                RecordedScores(log, versions),
                kept,
                threshold=None,
                num_examples=10,
            )
            return comparison, kept

    return run


def test_rescoring_continues_where_it_stopped(
    written: WrittenRun, run_rescore: Callable[..., tuple[Comparison, KeptScores]]
) -> None:
    _, first = run_rescore("opposite", name="other", versions=(0, 0))
    comparison, second = run_rescore("opposite", name="other")
    assert (first.num_scored, second.num_scored, second.num_scored_before, second.num_failed) == (
        6,
        8,
        6,
        0,
    )
    with RunLog(written.config, name="test") as log:
        found = list(
            log.read(
                log.full_ranges("reward.scores.other", range(log.plan.num_sample_partitions)),
                SampleScored,
            )
        )
    assert len({item.event.sample_id for item in found}) == len(found) == 14
    partitions = [
        written.plan.partition(item.event.prompt_group_id, item.event.policy_version)
        for item in found
    ]
    assert [item.position.partition("@")[0] for item in found] == [
        f"{written.plan.topic('reward.scores.other')}[{partition}]" for partition in partitions
    ]
    # F was not scored originally. Originals 0 1 .25 .5 .75 1 .5 .5 0 0 1 0, new 1 0 1 0 1 0 1 0 1 0
    # 1 0
    assert (comparison.num_samples, comparison.num_compared, comparison.num_prompt_groups) == (
        14,
        12,
        6,
    )
    assert comparison.first_mean == pytest.approx(5.5 / 12)
    assert comparison.second_mean == 0.5
    assert comparison.mean_absolute_difference == pytest.approx(
        (1 + 1 + 0.75 + 0.5 + 0.25 + 1 + 0.5 + 0.5 + 1 + 0 + 0 + 0) / 12
    )
    assert comparison.num_first_failed == 2
    assert comparison.num_reranked == 5, "all but G, whose two samples keep their order"
    assert comparison.num_became_informative == 2, "D and E, whose rewards were equal"
    assert {example.sample_id for example in comparison.examples[:4]} == {
        f"{A}/0",
        f"{A}/1",
        f"{C}/1",
        f"{E}/0",
    }


def test_failures_are_kept_with_their_reason(
    written: WrittenRun, run_rescore: Callable[..., tuple[Comparison, KeptScores]]
) -> None:
    comparison, kept = run_rescore("picky", name="picky", versions=(0, 0))
    assert (kept.num_scored, kept.num_failed) == (6, 2)
    assert (comparison.num_second_failed, comparison.num_compared) == (2, 4)
    with RunLog(written.config, name="test") as log:
        scores = read_detail(log, f"{B}/0").other_scores
    assert "raised ValueError: not that one" in (scores["picky"].error or "")


def test_rescoring_rejects_a_name_that_holds_scores_of_another_function(
    run_rescore: Callable[..., tuple[Comparison, KeptScores]],
) -> None:
    run_rescore("opposite", name="one", versions=(3, 3))
    with pytest.raises(
        ConfigError,
        match=r"reward\.scores\.one holds scores of .*rewards\.py:opposite, version .*; take another --name",
    ):
        run_rescore("picky", name="one", versions=(3, 3))
    with pytest.raises(ConfigError, match="the name of scores must be"):
        run_rescore("picky", name="Not/a/name")


def test_run_that_is_not_there_is_named(written: WrittenRun) -> None:
    config = written.config.model_copy(
        update={"run": written.config.run.model_copy(update={"id": "absent"})}
    )
    with pytest.raises(
        ConfigError,
        match=r"the broker has no topics of a run 'absent'; see run\.id and broker\.bootstrap_servers",
    ):
        RunLog(config, name="test")


@pytest.fixture
def run_file(written: WrittenRun) -> str:
    """Write the written run's run file."""
    path = written.config.run.directory / "run.toml"
    tables = {
        "run": ("id", "directory", "max_staleness"),
        "model": ("path",),
        "data": ("source", "shuffle"),
        "broker": ("bootstrap_servers",),
    }
    tree = written.config.model_dump(mode="json")
    lines = [
        f"[{name}]\n"
        + "".join(f"{key} = {orjson.dumps(tree[name][key]).decode()}\n" for key in keys)
        for name, keys in tables.items()
    ]
    path.write_text("".join(lines))
    return str(path)


def test_compare_command_fails_below_a_minimum_correlation(
    written: WrittenRun, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"{written.config.run.directory / 'rewards.py'}:opposite"
    words = ["rewards", reward, "--run", run_file, "--keep", "shown"]
    words += ["--version", "0..1"]
    assert app([*words, "--output", "json", "--fail-below=-1"]) == 0
    out, err = capsys.readouterr()
    document = orjson.loads(out)
    assert (document["topic"], document["num_compared"]) == (
        written.plan.topic("reward.scores.shown"),
        8,
    )
    assert "8 samples scored, 0 of them failed, 0 were scored before" in err
    assert app([*words, "--fail-below", "0.5"]) == 6
    out, _ = capsys.readouterr()
    assert "prompt groups             4, 4 of them ranked otherwise" in out
    assert f"completion ends         completion 0 of {A}\n  first                   0\n" in out


def test_rewards_are_compared_on_the_samples_of_a_run(
    written: WrittenRun, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = [
        f"{written.config.run.directory / 'rewards.py'}:{name}" for name in ("opposite", "picky")
    ]
    written.describe()
    for words in (["--run", run_file], ["--run", written.config.run.id, "--config", run_file]):
        app(["rewards", *rewards, *words, "--limit", "3", "--output", "json"])
        out, err = capsys.readouterr()
        found = orjson.loads(out)
        assert (
            found["num_samples"],
            found["num_agree"],
            found["num_differ"],
            found["num_second_higher"],
        ) == (14, 6, 6, 6)
        assert (
            found["num_first_failed"],
            found["num_second_failed"],
            found["num_both_failed"],
        ) == (0, 2, 0)
        assert [
            example["completion_end"].startswith("completion 1 of ")
            for example in found["examples"]
        ] == [True, True, True]
        assert "2 records could not be read" in err
    app(
        [
            "rewards",
            *rewards,
            "--run",
            run_file,
            "--version",
            "0",
            "--limit",
            "9",
            "--output",
            "json",
        ]
    )
    found = orjson.loads(capsys.readouterr().out)
    samples = [example["sample_id"] for example in found["examples"]]
    assert (set(samples[:2]), set(samples[2:])) == ({f"{A}/1", f"{C}/1"}, {f"{B}/0", f"{B}/1"}), (
        "those that only one could score come last"
    )
    assert "raised ValueError: not that one" in found["examples"][2]["second"]["error"]


def test_samples_command_shows_last_samples_and_rejects_invalid_flags(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["samples", run_file, "--last", "2", "--no-follow", "--version", "..1"])
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["sample", f"{D}/0", f"{D}/1"]
    assert err == ""
    with pytest.raises(ConfigError, match="--version must be a number or a span"):
        app(["samples", run_file, "--version", "new"])


def test_dead_letters_are_requeued_by_command(
    written: WrittenRun, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = written.plan.topic("rollout.samples")
    headers = {
        "origin-topic": topic,
        "origin-partition": "0",
        "origin-offset": "0",
        "error-class": "PoisonSample",
        "error-text": "no good",
    }
    written.producer.write(
        [ProducerRecord(written.plan.topic("reward.dead-letters"), b"garbage", headers=headers)]
    )
    app(["deadletter", run_file, "--output", "json"])
    listed = orjson.loads(capsys.readouterr().out)
    assert (listed["counts"], [dead_letter["id"] for dead_letter in listed["dead_letters"]]) == (
        {"reward PoisonSample": 1},
        ["reward@0"],
    )
    app(["deadletter", run_file, "--id", "reward@0"])
    assert "000000  67 61 72 62 61 67 65" in capsys.readouterr().out
    assert app(["deadletter", run_file, "--all", "--drop", "a test", "--dry-run"]) == 0
    assert "would drop 1 records" in capsys.readouterr().err
    assert app(["deadletter", run_file, "--id", "reward@0", "--drop", "a test", "--yes"]) == 0
    assert "dropped 1 records" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match="dead letter reward@0 is dropped already; give --resolved"
    ):
        app(["deadletter", run_file, "--id", "reward@0", "--requeue", "--yes"])


def test_log_is_readable_with_a_schema_that_was_published_after_it_was_opened(
    written: WrittenRun, log: RunLog
) -> None:
    schema, fingerprint, value = end_by_newer_release()
    topic = written.plan.topic("control.schemas")
    record = Record("t", 0, 0, "000000-0000-0", value, {}, 0)
    written.producer.write([ProducerRecord(topic, schema, key=fingerprint.hex())])
    assert log.decode_samples(record) == (ended("000000-0000-0"),)
    unknown = replace(record, value=MAGIC + bytes(8) + value[10:])
    assert [log.decode_samples(unknown) for _ in range(3)] == [()] * 3
    assert log.unreadable.count == 3
