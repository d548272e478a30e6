"""Large arrays travel by claim check, and their objects can get lost; a record that is too large is
rejected by its producer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from harness import LIVING_SECONDS, FaultRun, assert_ledger_balances
from poison import OVERSIZE_BYTES

from relax_events.errors import BrokerRefused
from relax_events.events.codec import EventCodec
from relax_events.events.parts import StoredArray
from relax_events.events.types import PromptGroupEnded
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
