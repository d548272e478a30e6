"""Runs that learn from the data: answers in conversations (SFT) and preference pairs (DPO). One run
of each serves all tests.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import (
    PROMPTS,
    FinishedRun,
    call_relax,
    log_of,
    report_of,
    snapshot_of,
    write_rows,
)

from relax_events.config import load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.topics import TopicPlan

pytestmark = pytest.mark.timeout(300)
STEPS, GROUPS = 8, 4
RUN = """
[run]
id = "{run_id}"
num_steps = {steps}
prompts_per_step = {groups}

[model]
path = "{prepared}/model"

[data]
source = "jsonl:{folder}/rows.jsonl"
{data}

[engine]
max_context_tokens = 96

[algorithm]
name = "{algorithm}"

[trainer]
learning_rate = 5e-3

[workers]
heartbeat_seconds = 0.2

[broker]
bootstrap_servers = "{bootstrap_servers}"
"""
EVALUATION = """
[evaluation]
every = 8

[[evaluation.datasets]]
name = "held-out"
source = "jsonl:{folder}/rows.jsonl[:2]"
conversation_key = "messages"
train_on = "last"
sampling = {{ top_k = 1, max_new_tokens = 4 }}
"""


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def finished(folder: Path, text: str, **failpoints: str) -> FinishedRun:
    run_file = folder / "run.toml"
    run_file.write_text(text)
    ended = call_relax("run", run_file, cwd=folder, timeout_seconds=280, **failpoints)
    assert ended.code == 0, ended.err
    return FinishedRun(run_file, load_run_config(run_file, environment={}))


@pytest.fixture(scope="module")
def answers_run(
    prepared: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Fine-tune on conversations of two turns; the rollout worker kills itself before its samples
    are safe. The last version is evaluated."""
    folder = tmp_path_factory.mktemp("answers")
    talks = [
        [
            say("user", text),
            say("assistant", "ok"),
            say("user", "go"),
            say("assistant", text.split()[1]),
        ]
        for text in PROMPTS
    ]
    write_rows(folder / "rows.jsonl", [{"messages": talk} for talk in talks])
    run_settings = {
        "run_id": f"t-{uuid.uuid4().hex[:12]}",
        "prepared": prepared,
        "folder": folder,
        "bootstrap_servers": bootstrap_servers,
    }
    text = RUN + EVALUATION
    keys = {
        "steps": STEPS,
        "groups": GROUPS,
        "algorithm": "sft",
        "data": 'conversation_key = "messages"',
    }
    return finished(
        folder, text.format(**run_settings, **keys), failpoints="rollout.before_flush:2=kill"
    )


@pytest.fixture(scope="module")
def pairs_run(
    prepared: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Train on pairs in step with the trainer, in which the chosen answer is the word and the
    rejected one its beginning again and again."""
    folder = tmp_path_factory.mktemp("pairs")
    words = [text.split()[1] for text in PROMPTS]
    write_rows(
        folder / "rows.jsonl",
        [
            {"prompt": text, "chosen": word, "rejected": 3 * word[0]}
            for text, word in zip(PROMPTS, words, strict=True)
        ],
    )
    run_settings = {
        "run_id": f"t-{uuid.uuid4().hex[:12]}",
        "prepared": prepared,
        "folder": folder,
        "bootstrap_servers": bootstrap_servers,
    }
    keys = {
        "steps": STEPS,
        "groups": GROUPS,
        "algorithm": "dpo",
        "data": 'chosen_key = "chosen"\nrejected_key = "rejected"',
    }
    text = RUN.replace("num_steps", 'mode = "sync"\nmax_staleness = 0\nnum_steps', 1)
    return finished(folder, text.format(**run_settings, **keys))


def report_on(run: FinishedRun) -> dict[str, Any]:
    return report_of(run.run_file.parent, run.config.run.id)


def samples_of(run: FinishedRun) -> list[SampleRolledOut]:
    """Read the samples of a run from the log, once each."""
    reader, codec = (
        LogReader(Connection(run.config.broker.bootstrap_servers, client_id="test")),
        EventCodec(),
    )
    partitions = range(TopicPlan.from_config(run.config).num_sample_partitions)
    records = reader.read_to_end(
        (f"relax.{run.config.run.id}.rollout.samples", partition) for partition in partitions
    )
    reader.close()
    events = (event for record in records for event in split_samples(codec.decode(record.value)))
    return [
        *{event.sample_id: event for event in events if isinstance(event, SampleRolledOut)}.values()
    ]


def assert_every_sample_was_trained(run: FinishedRun, *, size: int) -> None:
    report = report_on(run)
    assert (report["succeeded"], report["steps"], report["ledger_problems"]) == (True, STEPS, [])
    outcomes = report["outcomes"]
    assert (outcomes["trained"], outcomes["filtered"], outcomes["expired"], outcomes["failed"]) == (
        STEPS * GROUPS,
        0,
        0,
        0,
    )
    assert (report["samples_trained"], report["samples_lost"], report["samples_trained_twice"]) == (
        STEPS * GROUPS * size,
        0,
        0,
    )
    assert report["staleness_max"] <= run.config.run.max_staleness


def test_sft_learns_answers_and_a_killed_rollout_worker_loses_no_sample(
    answers_run: FinishedRun,
) -> None:
    assert_every_sample_was_trained(answers_run, size=1)
    logged = log_of(answers_run.run_file.parent, answers_run.config.run.id, "rollout-0")
    assert [line["event"] for line in logged].count("worker.started") == 2
    losses = report_on(answers_run)["curves"]["loss"]
    assert losses[-1] < 0.7 * losses[0]


def test_sft_logs_conversations_with_loss_masks_and_each_row_once_per_epoch(
    answers_run: FinishedRun,
) -> None:
    samples = samples_of(answers_run)
    assert len(samples) >= STEPS * GROUPS
    assert {
        row: sum(sample.key.row // 8 == row for sample in samples if sample.key.row < 16)
        for row in (0, 1)
    } == {0: 8, 1: 8}
    first = samples[0]
    assert first.finish_reason == "stop"
    assert (
        sum(first.loss_mask) == 3 + len(first.messages[0].text.split()[1]) + 1
    )  # "ok", the word, a stop token behind each
    assert not any(first.rollout_logprobs)


def test_sft_run_reports_no_rewards_and_is_evaluated_by_generation(
    answers_run: FinishedRun,
) -> None:
    folder, report = answers_run.run_file.parent, report_on(answers_run)
    assert not [
        path.name
        for path in (folder / ".relax/runs" / answers_run.config.run.id / "logs").iterdir()
        if path.name.startswith("reward")
    ]
    assert report["reward_last"] is None
    assert {"mismatch_kl", "policy_loss", "clip_fraction", "reward_std"} & report[
        "curves"
    ].keys() == set()
    assert [
        (row["policy_version"], row["num_prompts"], row["num_unscored"])
        for row in report["evaluations"]
    ] == [(0, 2, 0), (8, 2, 0)]
    shown_curves = snapshot_of(folder / ".relax/runs" / answers_run.config.run.id)["overview"]
    assert len(shown_curves["columns"]["loss"]) == report["steps"]
    shown = call_relax(
        "runs",
        "show",
        answers_run.config.run.id,
        "--config",
        answers_run.run_file,
        "--output",
        "json",
        cwd=folder,
    )
    assert orjson.loads(shown.out)["config"]["reward"] == "none"


def test_dpo_increases_the_reward_margin_of_pairs(pairs_run: FinishedRun) -> None:
    assert_every_sample_was_trained(pairs_run, size=2)
    curves = report_on(pairs_run)["curves"]
    assert curves["loss"][0] == pytest.approx(
        0.6931472, abs=1e-4
    )  # log 2: at first the policy is the reference
    assert curves["reward_margin"][0] == pytest.approx(0, abs=1e-4)
    assert curves["reward_margin"][-1] > 0.1
    assert curves["preference_accuracy"][-1] == pytest.approx(1)
    assert curves["reward_margin"][-1] == pytest.approx(
        curves["chosen_reward"][-1] - curves["rejected_reward"][-1]
    )


def test_sample_index_marks_the_chosen_or_rejected_sample_of_a_pair(pairs_run: FinishedRun) -> None:
    for sample in samples_of(pairs_run):
        word = sample.messages[0].text.split()[1]
        assert sample.completion == (word, 3 * word[0])[sample.key.sample_index]


@pytest.mark.long
def test_sft_run_file_improves_its_evaluation_reward(
    bootstrap_servers: str, tmp_path: Path, run_id: str
) -> None:
    run_file = Path(__file__).parents[2] / "configs/sft.toml"
    ended = call_relax(
        "run",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        f"run.id={run_id}",
        cwd=tmp_path,
        timeout_seconds=280,
    )
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    rewards = {row["policy_version"]: row["reward_mean"] for row in report["evaluations"]}
    assert rewards[0] < 0.05
    assert rewards[100] > 0.5
    assert report["curves"]["loss"][-1] < 0.3
