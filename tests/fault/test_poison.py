"""Unknown producers write garbage into the run's topics: it is dead-lettered with a reason, and
other prompt groups are unaffected.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import numpy as np
from event_samples import changed, rolled_out
from harness import LIVING_SECONDS, FaultRun, assert_ledger_balances
from poison import CODEC, FORGED, STRANGE, poison_prompts, poison_samples, poisoned

from relax_events.errors import ForeignRecord, PoisonSample
from relax_events.events.types import PromptGroupEnded
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord

SCORERS = ("reward", "reference", "actor-forward", "advantage")


def count_errors(run: FaultRun, role: str) -> Counter[str]:
    """Count a role's dead letters by the class of their error. The trainer rejects a prompt group
    that was not issued before it reads the arrays.
    """
    errors = Counter(
        str(dead_letter.headers["error-class"])
        for dead_letter in run.records(f"{role}.dead-letters")
    )
    if role == "trainer":
        errors[PoisonSample.__name__] += errors[ForeignRecord.__name__]
    return errors


def test_poison_is_dead_lettered_and_the_run_continues(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 16, "max_failed_prompt_groups": 1})
    run.start()
    run.wait_until_steps(3)
    paused = run.signal(signal.SIGSTOP, "trainer-0")  # records of a stale version are skipped
    run.follow_for(1.0)
    version = run.state.policy_version
    sample = rolled_out(STRANGE, of=4, version=version)
    strange_version = changed(
        sample, policy_version=10**6, min_policy_version=10**6, max_policy_version=10**6
    )
    strange_tokens = changed(
        sample,
        tokens=np.array([5, 6, 10**8, 8], np.int32),
        prompt_group_id="000900-0001-0",
        sample_id="000900-0001-0/0",
    )
    producer = RecordProducer(run.connection)
    poison_samples(producer, run.plan, version=version)
    num_prompts = poison_prompts(producer, run.plan, version=version)
    for event in (strange_version, strange_tokens):
        producer.send(
            ProducerRecord(
                run.plan.topic("rollout.samples"),
                CODEC.encode(event),
                key=event.prompt_group_id,
                partition=0,
            )
        )
    producer.flush()
    producer.close()
    expected = Counter(name for name, _ in poisoned(sample) for _ in range(2))
    run.wait_until(
        lambda: all(expected <= count_errors(run, role) for role in SCORERS),
        "all scorers have rejected the poison",
    )
    run.signal_process(signal.SIGCONT, paused["trainer-0"])
    run.recovers_within(LIVING_SECONDS)
    pids = {worker_id: run.pid(worker_id) for worker_id in run.worker_ids}

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert {worker_id: run.pid(worker_id) for worker_id in run.worker_ids} == pids, (
        "poison killed no worker"
    )
    ended = [
        event
        for record in run.records("control.prompt-group-outcomes")
        if isinstance(event := CODEC.decode(record.value), PromptGroupEnded)
    ]
    assert (ledger["outcomes"]["failed"], ledger["outcomes"]["issued"]) == (0, 16 * 8), (
        f"valid prompt groups are unaffected: {[end for end in ended if end.reason]}"
    )
    assert ledger["samples_foreign"] > 0
    for role in (*SCORERS, "trainer"):
        dead_letters = run.records(f"{role}.dead-letters")
        assert expected <= count_errors(run, role), (role, count_errors(run, role))
        assert all(
            dead_letter.headers["error-text"] and dead_letter.headers["origin-offset"].isdigit()
            for dead_letter in dead_letters
        )
    assert len(run.records("rollout.dead-letters")) == num_prompts
    unissued = {STRANGE, *(prompt.prompt_group_id for prompt in FORGED)}
    assert not unissued & {event.prompt_group_id for event in ended}, (
        "an unknown producer's prompt group has no outcome, which could end the run"
    )
