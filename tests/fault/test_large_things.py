"""Large arrays travel by claim check, and their objects can get lost; a record that is too large is
rejected by its producer.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from harness import LIVING_SECONDS, FaultRun, assert_ledger_balances
from poison import OVERSIZE_BYTES
from run_setup import DEVICE_CELLS

from relax_events.errors import BrokerRefused
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome, StoredArray
from relax_events.events.types import PromptGroupEnded, TrainStepCommitted
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord

# tokens and log-probabilities of every sample are larger, here as elsewhere those of long ones
CLAIM_CHECK_THRESHOLD_BYTES = 64


def rolled_out(run: FaultRun) -> dict[str, Path]:
    """Return the object references of the tokens of one sample of each prompt group."""
    return {
        sample.prompt_group_id: Path(unquote(urlsplit(sample.tokens.reference.uri).path))
        for sample in run.samples()
        if isinstance(sample.tokens, StoredArray)
    }


def num_waiting(run: FaultRun) -> int:
    """Return how many prompt groups were issued and have no sample yet."""
    issued = {
        record.key
        for record in run.records("prompt.groups", num_partitions=run.plan.queue_partitions)
    }
    return len(issued - rolled_out(run).keys())


def test_lost_and_corrupt_objects_fail_only_their_prompt_groups(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(
        run={"num_steps": 12}, objects={"claim_check_threshold_bytes": CLAIM_CHECK_THRESHOLD_BYTES}
    )
    run.start()
    run.wait_until_steps(2)
    run.signal(signal.SIGSTOP, "rollout-0")
    run.wait_until(lambda: num_waiting(run) >= 2, "prompt groups wait for rollout")
    # The reward role alone will not have read what comes now: the advantage role will, and wait for
    # scores that never come.
    run.signal(signal.SIGSTOP, "reward-0")
    before = rolled_out(run)
    run.signal(signal.SIGCONT, "rollout-0")
    run.wait_until(
        lambda: len(rolled_out(run).keys() - before.keys()) >= 2, "samples wait for their reward"
    )
    run.wait_until(
        lambda: run.state.workers["rollout-0"].num_in_flight == 0, "nothing is being generated"
    )
    (lost, lost_path), (altered, altered_path) = sorted(
        (group, path) for group, path in rolled_out(run).items() if group not in before
    )[-2:]
    lost_path.unlink()
    altered_path.write_bytes(altered_path.read_bytes()[:-1] + b"\xff")
    run.signal(signal.SIGCONT, "reward-0")
    run.recovers_within(LIVING_SECONDS)

    assert run.wait_until_ended(run.process) == 0
    assert assert_ledger_balances(run)["outcomes"]["failed"] == 2
    dead_letters = {
        dead_letter.key: dead_letter.headers for dead_letter in run.records("reward.dead-letters")
    }
    assert {group: headers["error-class"] for group, headers in dead_letters.items()} == {
        lost: "ObjectError",
        altered: "ObjectError",
    }
    assert "there is no such object" in dead_letters[lost]["error-text"]
    assert "was altered: its SHA-256 must be" in dead_letters[altered]["error-text"]
    events = [
        EventCodec().decode(record.value) for record in run.records("control.prompt-group-outcomes")
    ]
    outcomes = {
        event.prompt_group_id: event.outcome.value
        for event in events
        if isinstance(event, PromptGroupEnded)
    }
    assert (outcomes[lost], outcomes[altered]) == ("failed", "failed")


@pytest.mark.parametrize("entity", ["prompt.groups", "rollout.samples"])
def test_oversize_record_is_rejected_by_the_broker(
    start_run: Callable[..., FaultRun], entity: str
) -> None:
    run = start_run()
    producer = RecordProducer(run.connection)
    with pytest.raises(BrokerRefused, match="MSG_SIZE_TOO_LARGE"):
        producer.write([ProducerRecord(run.plan.topic(entity), bytes(OVERSIZE_BYTES), partition=0)])
    producer.write(
        [ProducerRecord(run.plan.topic(entity), b"the producer is of use still", partition=0)]
    )
    producer.close()
    assert [record.value for record in run.records(entity)] == [b"the producer is of use still"]


AGENT = """
import http.client, json, os, sys, zlib
from urllib.parse import urlsplit
task = json.load(open(os.environ["RELAX_TASK_FILE"]))
group_id = task["prompt_group_id"]
step, index, attempt = map(int, group_id.split("-"))
number = 4 * step + index
base = urlsplit(os.environ["OPENAI_BASE_URL"])
for path in range(40 if number % 10 == 1 else 1):
    text = f"{path} of {number}"
    if number % 10 == 5 and not attempt:
        text = "a very long text " * 3
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=60)
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 2})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    connection.request("POST", base.path + "/chat/completions", body, headers)
    reply = connection.getresponse()
    answer = json.load(reply)
    if reply.status != 200:
        sys.exit(answer["error"]["message"])
"""
BUDGET = 2 * DEVICE_CELLS
NUM_STEPS = 4


@pytest.fixture
def start_agent_run(start_run: Callable[..., FaultRun], tmp_path: Path) -> Callable[..., FaultRun]:
    """Lay out a run of `AGENT`, of which one episode in ten has 40 paths."""

    def start(*, trainer: dict[str, Any], **sections: dict[str, Any]) -> FaultRun:
        file = tmp_path / "agent.py"
        file.write_text(AGENT)
        return start_run(
            run={"num_steps": NUM_STEPS, "prompts_per_step": 4},
            engine={"sampling": {"max_new_tokens": 120}},
            environment={
                "command": [sys.executable, "-I", "-S", str(file)],
                "concurrency": 8,
                "max_turns": 40,
            },
            trainer={"max_tokens_per_micro_batch": BUDGET} | trainer,
            **sections,
        )

    return start


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ranks": 2},
        pytest.param({"num_mini_batches": 2}, marks=pytest.mark.long),
        {"ranks": 2, "sharding": "full"},
    ],
    ids=["one rank", "two ranks", "mini-batches", "sharded"],
)
def test_an_episode_of_many_paths_is_trained_and_a_path_that_fits_nowhere_ends_its_prompt_group(
    settings: dict[str, Any], start_agent_run: Callable[..., FaultRun], directory: Path
) -> None:
    """Passes run in `accumulate`, or in the optimizer step, where an error ends the process."""
    run = start_agent_run(
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "rollout"},
        trainer={"backend": f"{directory / 'trainer.py'}:Small"} | settings,
    )
    # killed before the gradients are discarded, and after a step that has smaller passes
    # in the optimizer step, a process comes to each of them once
    in_step = bool(settings.keys() & {"num_mini_batches", "sharding"})
    points = (
        ("step_out_of_memory", "after_commit") if in_step else ("out_of_memory:2", "after_commit:2")
    )
    run.arm(*(f"trainer.{point}=kill" for point in points))
    assert run.wait_until_ended(run.start(), timeout_seconds=600) == 0
    assert len(run.fired()) == 2
    ledger = assert_ledger_balances(run)
    assert (ledger["outcomes"]["failed"], ledger["prompt_groups_too_large"]) == (2, 2)
    assert {len(sample.path_lengths) for sample in run.samples()} == {0, 40}
    assert max(len(sample.tokens) for sample in run.samples()) > 4 * BUDGET
    assert_too_large_by_name(run)
    steps = [run.decode(record) for record in run.records("control.train-steps")]
    assert all(isinstance(one, TrainStepCommitted) for one in steps)
    budgets = [one.max_cells for one in steps]
    assert any(budgets), "a step that was trained in smaller passes names them"
    assert max(budgets) <= DEVICE_CELLS
    replays = run.logged("trainer-0", "train_steps.replayed")
    assert sum(line["num_steps"] for line in replays) > 0
    assert all(line["identical"] for line in replays)


def assert_too_large_by_name(run: FaultRun) -> None:
    """Assert that the two prompt groups with a path that fits nowhere ended for it."""
    ends = [run.decode(record) for record in run.records("control.prompt-group-outcomes")]
    failed = [
        one for one in ends if isinstance(one, PromptGroupEnded) and one.outcome is Outcome.FAILED
    ]
    assert {one.prompt_group_id for one in failed} == {"000001-0001-0", "000003-0003-0"}
    for one in failed:
        assert one.reason.startswith("out of memory: a path of ")
        assert "run.max_failed_prompt_groups" in one.reason


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_path_whose_values_fit_nowhere_ends_its_prompt_group(
    start_agent_run: Callable[..., FaultRun], directory: Path, ranks: int
) -> None:
    """One rank computes values again in smaller passes; several do so in their next processes."""
    run = start_agent_run(
        algorithm={"name": "ppo"},
        critic={"ranks": ranks},
        trainer={"backend": f"{directory / 'trainer.py'}:SmallCritic"},
    )
    if ranks == 1:
        run.arm("scorer.out_of_memory=kill")
    assert run.wait_until_ended(run.start(), timeout_seconds=600) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["outcomes"]["failed"], ledger["prompt_groups_too_large"]) == (2, 2)
    assert_too_large_by_name(run)
    restarts = len(run.logged("critic-0", "worker.started")) - 1
    assert restarts == len(run.fired()) == 1 if ranks == 1 else restarts >= 2
