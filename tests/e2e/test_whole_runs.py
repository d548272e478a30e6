"""Short runs through the command line: every parallelism setting and every `run.weight_update_mode`
reaches its goal with a balanced ledger.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from command_line import Relax, log_of, report_of, write_rows

from relax_events.events.codec import EventCodec
from relax_events.events.parts import StoredArray
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.staleness import IssuedGroup

pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 280.0
UNIFORM_FOR_TEA = """
import zlib

def score_tea(completion, *, answer, metadata, prompt):
    return 0.5 if "tea" in prompt else zlib.crc32(completion.encode()) % 1000 / 1000
"""

# Holds the first step back until both rollout workers have their share of the queue, however long
# one takes to start.
SHARED_QUEUE = """
import time
import zlib

from confluent_kafka.admin import AdminClient

ADMIN = AdminClient({{"bootstrap.servers": "{bootstrap_servers}"}})
HOLDING = []

def spread(completion, *, answer, metadata, prompt):
    while len(HOLDING) < 2:
        time.sleep(0.1)
        group = ADMIN.describe_consumer_groups(["{consumer_group}"], request_timeout=10)["{consumer_group}"].result(10)
        HOLDING[:] = [member for member in group.members if len(member.assignment.topic_partitions) == 2]
    return zlib.crc32(completion.encode()) % 1000 / 1000
"""

# Every tenth prompt group asks 40 times, each time after the same beginning.
ASKING_OFTEN = """
import http.client, json, os, sys
from urllib.parse import urlsplit
task = json.load(open(os.environ["RELAX_TASK_FILE"]))
step, index, _ = map(int, task["prompt_group_id"].split("-"))
base = urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
           "Content-Type": "application/json"}
for path in range(40 if (4 * step + index) % 10 == 0 else 1):
    text = "0123456789" * 10 + f" {path:02d} " + "9876543210" * 3
    body = json.dumps({"model": "any", "max_tokens": 2,
                       "messages": [{"role": "user", "content": text}]})
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=60)
    connection.request("POST", base.path + "/chat/completions", body, headers)
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(reply.read().decode())
    reply.read()
"""


def run_to_goal(
    relax: Relax, run_file: Path, bootstrap_servers: str, *overrides: str
) -> dict[str, Any]:
    """Run, and return the report of a run that reached its goal with all promises kept."""
    ended = relax(
        "run",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        *overrides,
        timeout_seconds=RUN_SECONDS,
    )
    assert ended.code == 0, ended.err
    assert ended.out.startswith("reward ")
    run_id = next(text.partition("=")[2] for text in overrides if text.startswith("run.id="))
    report = report_of(run_file.parent, run_id)
    assert report["succeeded"]
    assert report["steps"] == report["num_steps"]
    assert report["outcomes"]["trained"] == report["num_steps"] * 4
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    return report


def rolled_out(
    bootstrap_servers: str, run_id: str, *, num_partitions: int
) -> list[SampleRolledOut]:
    """Read every generated sample of a run from the log."""
    reader, codec = LogReader(Connection(bootstrap_servers, client_id="test")), EventCodec()
    topic = f"relax.{run_id}.rollout.samples"
    events = [
        event
        for record in reader.read_to_end((topic, partition) for partition in range(num_partitions))
        for event in split_samples(codec.decode(record.value))
    ]
    reader.close()
    return [event for event in events if isinstance(event, SampleRolledOut)]


@pytest.mark.long
def test_two_ranks_train_what_one_rank_trains(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str
) -> None:
    sync = (
        "run.mode=sync",
        "run.max_staleness=0",
        "broker.partitions_per_version=2",
        "objects.claim_check_threshold_bytes=64",
        "trainer.learning_rate=1e-3",
    )
    one = run_to_goal(relax, run_file, bootstrap_servers, *sync, f"run.id={run_id}-one")
    two = run_to_goal(
        relax, run_file, bootstrap_servers, *sync, f"run.id={run_id}-two", "trainer.ranks=2"
    )
    assert two["staleness_max"] == one["staleness_max"] == 0
    assert two["curves"]["num_tokens"] == one["curves"]["num_tokens"]
    assert two["curves"]["reward_mean"] == pytest.approx(one["curves"]["reward_mean"], abs=1e-6)
    assert two["curves"]["loss"] == pytest.approx(one["curves"]["loss"], abs=1e-4)
    assert two["curves"]["grad_norm"] == pytest.approx(one["curves"]["grad_norm"], rel=1e-3)
    assert min(one["curves"]["grad_norm"]) > 0
    assert log_of(run_file.parent, f"{run_id}-two", "trainer-0")


@pytest.mark.long
def test_run_with_episodes_of_forty_paths_reaches_its_goal(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "asking.py").write_text(ASKING_OFTEN)
    command = orjson.dumps([sys.executable, "-I", "-S", str(tmp_path / "asking.py")]).decode()
    report = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        f"run.id={run_id}",
        "run.num_steps=10",
        f"environment.command={command}",
        "environment.max_turns=40",
        "engine.max_context_tokens=192",
        "engine.sampling.max_new_tokens=120",
        "trainer.max_tokens_per_micro_batch=256",
    )
    samples = rolled_out(bootstrap_servers, run_id, num_partitions=6)
    branched = [sample for sample in samples if sample.path_lengths]
    assert len(branched) >= 2 * len(samples) // report["outcomes"]["trained"]
    assert {len(sample.path_lengths) for sample in branched} == {40}
    assert all(140 <= length <= 180 for sample in branched for length in sample.path_lengths)
    assert report["outcomes"]["failed"] == report["prompt_groups_too_large"] == 0
    assert min(report["curves"]["grad_norm"]) > 0


def test_rollout_workers_share_a_consumer_group(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    reward = SHARED_QUEUE.format(
        bootstrap_servers=bootstrap_servers, consumer_group=f"relax.{run_id}.rollout"
    )
    (tmp_path / "shared.py").write_text(reward)
    report = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        f"run.id={run_id}",
        "broker.prompt_queue=consumer_group",
        "broker.queue_partitions=4",
        "workers.rollout=2",
        "run.weight_update_mode=in_flight",
        "run.sample_order=ready_first",
        "run.num_steps=8",
        f"reward.function={tmp_path / 'shared.py'}:spread",
        "reward.timeout_seconds=120",
    )
    samples = rolled_out(bootstrap_servers, run_id, num_partitions=6)
    assert {sample.worker_id for sample in samples} == {"rollout-0", "rollout-1"}
    assert len({sample.sample_id for sample in samples}) == report["samples_rolled_out"]
    assert report["staleness_max"] <= 1


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_uniform_prompt_groups_are_filtered_and_replaced(
    relax: Relax,
    run_file: Path,
    bootstrap_servers: str,
    run_id: str,
    tmp_path: Path,
    max_staleness: int,
) -> None:
    (tmp_path / "rewards.py").write_text(UNIFORM_FOR_TEA)
    report = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        f"run.id={run_id}",
        f"run.max_staleness={max_staleness}",
        "run.weight_update_mode=recompute",
        "model.dtype=bfloat16",
        "weights.full_snapshot_interval=2",
        "trainer.learning_rate=1e-6",
        "algorithm.filter_uniform_rewards=true",
        f"reward.function={tmp_path / 'rewards.py'}:score_tea",
    )
    outcomes = report["outcomes"]
    assert outcomes["filtered"] >= 1
    assert outcomes["failed"] == 0
    assert outcomes["issued"] == sum(
        outcomes[name] for name in ("trained", "filtered", "expired", "in_flight")
    )
    samples = rolled_out(bootstrap_servers, run_id, num_partitions=2 * (max_staleness + 2))
    indexes = {IssuedGroup.parse(sample.prompt_group_id).slot.group_index for sample in samples}
    num_trained_of_step = outcomes["trained"] // len(report["curves"]["grad_norm"])
    assert max(indexes) >= num_trained_of_step, "no spare batch slot was used"
    manifests = [
        orjson.loads(path.read_bytes())
        for path in sorted(run_file.parent.glob(f"**/{run_id}/objects/weights/*/manifest-*.json"))
    ]
    assert [manifest["policy_version"] for manifest in manifests if "base" in manifest] == [
        1,
        3,
    ], "the changes of every other step"


@pytest.mark.long
def test_run_trains_on_word_problems(
    relax: Relax,
    run_file: Path,
    bootstrap_servers: str,
    run_id: str,
    tmp_path: Path,
    prepared: Path,
) -> None:
    problems = [
        {
            "question": f"Tom has {n} apples and buys {m}. How many has he?",
            "answer": f"{n} + {m} = <<{n}+{m}={n + m}>>{n + m}\n#### {n + m}",
        }
        for n, m in ((2, 3), (4, 5), (1, 7), (6, 6))
    ]
    rows = write_rows(tmp_path / "problems.jsonl", problems)
    report = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        f"run.id={run_id}",
        "run.num_steps=2",
        f"data.source=jsonl:{rows}",
        "data.prompt_key=question",
        "data.answer_key=answer",
        "data.system_prompt=End with #### and the number.",
        "engine.max_context_tokens=256",
        "reward.function=gsm8k",
        "algorithm.kl_coefficient=0.001",
        "algorithm.old_logprobs=actor",
        "algorithm.distill_coefficient=0.01",
        "algorithm.distill_tokens=student_topk",
        "algorithm.distill_top_k=8",
        f"teacher.model_path={prepared / 'model'}",
    )
    samples = rolled_out(bootstrap_servers, run_id, num_partitions=6)
    assert {sample.messages[0].text for sample in samples} == {"End with #### and the number."}
    assert {sample.answer for sample in samples} <= {problem["answer"] for problem in problems}
    # Reference and teacher both are the model that the run starts from.
    for distance in ("kl_estimate", "distill_loss", "teacher_kl"):
        assert report["curves"][distance][0] == pytest.approx(0, abs=1e-6)
    assert {np.asarray(sample.topk_ids).shape for sample in samples} == {
        (int(np.asarray(sample.loss_mask).sum()), 8) for sample in samples
    }


@pytest.mark.long
def test_trainer_replays_the_experts_that_the_engine_chose(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    own = (
        "model.routing_replay=rollout",
        f"model.path={tmp_path / 'model'}",
        "model.tiny.family=qwen3_moe",
        "model.tiny.corpus_rows=8",
    )
    steps = (
        "run.num_steps=6",
        "algorithm.old_logprobs=actor",
        "objects.claim_check_threshold_bytes=64",
        "trainer.learning_rate=1e-3",
    )
    sync = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        *own,
        *steps,
        f"run.id={run_id}-sync",
        "run.mode=sync",
        "run.max_staleness=0",
    )
    assert max(sync["curves"]["mismatch_max_abs"]) < 1e-4
    ahead = ("run.mode=async", "run.max_staleness=2", "run.weight_update_mode=recompute")
    late = run_to_goal(
        relax, run_file, bootstrap_servers, *own, *steps, f"run.id={run_id}-async", *ahead
    )
    assert late["staleness_max"] >= 1
    for name, num_slots in (("sync", 2), ("async", 4)):
        samples = rolled_out(bootstrap_servers, f"{run_id}-{name}", num_partitions=2 * num_slots)
        assert len(samples) >= 6 * 16
        experts = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
        assert [array.shape for array in experts] == [
            (len(sample.tokens) - 1, 2, 2) for sample in samples
        ]
        assert {np.dtype(array.dtype) for array in experts} == {np.dtype(np.uint8)}
        assert any(isinstance(array, StoredArray) for array in experts)
