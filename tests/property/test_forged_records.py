"""Forged records in the trainer's input, from a compromised role or an unknown producer, before the
valid ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from event_samples import ended, ready
from simulated_run import SimulatedRun

from relax_events.events.parts import Outcome
from relax_events.events.types import Event, PromptGroupEnded, PromptGroupIssued, TrainStepCommitted

ROLES = ("trainer", "prompter", "reward", "advantage")
MAX_ROUNDS = 60
BACK_DOOR = np.array([6, 6, 6], np.int32)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedRun]:
    run = SimulatedRun(monkeypatch, num_steps=2)
    for role in ROLES:
        run.start(role)
    yield run
    run.close()


def everyone_works(run: SimulatedRun) -> None:
    for process in run.processes.values():
        process.turn()
    run.update_ledger()


def due(run: SimulatedRun) -> dict[int, PromptGroupIssued]:
    return {
        offset: issued
        for offset, issued in run.open_leases.items()
        if 0 <= issued.required_policy_version <= run.published_version
    }


def write(run: SimulatedRun, entity: str, event: Event, *, group_id: str) -> None:
    topic_partition = (run.plan.topic(entity), run.plan.partition(group_id, 0))
    run.kafka.append(
        topic_partition,
        key=group_id.encode(),
        value=run.codec.encode(event),
        headers=[("policy-version", b"0")],
    )


def finish(run: SimulatedRun) -> None:
    for _ in range(MAX_ROUNDS):
        for offset, issued in due(run).items():
            run.roll_out(issued, policy_version=run.published_version)
            del run.open_leases[offset]
        everyone_works(run)
        if run.num_steps == run.config.run.num_steps:
            return
    raise AssertionError(f"stuck at step {run.num_steps}")


def dead_letters(run: SimulatedRun) -> Counter[str]:
    """Let the trainer end, and count its dead letters by their reason."""
    trainer = run.processes["trainer-0"]
    assert trainer.worker is not None
    trainer.worker.drain.start()
    while trainer.is_running:
        trainer.turn()
    entries = [
        entry
        for topic_partition in run.topic_partitions("trainer.dead-letters")
        for entry in run.kafka.visible(topic_partition, 0)
    ]
    return Counter(dict(entry.carried)["error-class"].decode() for entry in entries)


def test_forged_samples_and_end_events_written_first_have_no_effect(run: SimulatedRun) -> None:
    while not due(run):
        everyone_works(run)
    victims = [issued.prompt_group_id for issued in due(run).values()]
    for name in victims:
        arrays = {
            "tokens": BACK_DOOR,
            "loss_mask": np.array([0, 1, 1], np.int8),
            "rollout_logprobs": np.zeros(3, np.float32),
        }
        for index in range(2):
            forged = ready(name, index, **arrays, advantages=np.full(3, 100, np.float32))
            write(run, "prompt.end-requests", forged, group_id=name)
        alone = ready(name, 0, of=1, **arrays, advantages=np.full(3, 100, np.float32))
        write(run, "advantage.samples", alone, group_id=name)
        write(run, "advantage.samples", ended(name, Outcome.TRAINED), group_id=name)
        write(run, "prompt.end-requests", ended(name, Outcome.TRAINED), group_id=name)
        write(run, "prompt.end-requests", ended(name, Outcome.FILTERED), group_id=name)
    for _ in range(4):
        everyone_works(run)
    assert not [
        end
        for end in run.events("control.prompt-group-outcomes")
        if isinstance(end, PromptGroupEnded)
    ]
    finish(run)
    assert run.ledger.problems() == []
    assert dead_letters(run)["ForeignRecord"] == 6 * len(victims)
    first = next(
        step for step in run.events("control.train-steps") if isinstance(step, TrainStepCommitted)
    )
    assert set(first.prompt_group_ids) & set(victims), (
        "the honest samples of the same prompt groups were trained"
    )


def test_forged_end_request_can_only_fail_its_prompt_group(run: SimulatedRun) -> None:
    while not due(run):
        everyone_works(run)
    victim = next(iter(due(run).values())).prompt_group_id
    write(
        run, "prompt.end-requests", ended(victim, Outcome.FAILED, reason="forged"), group_id=victim
    )
    finish(run)
    assert run.ledger.problems() == []
    outcomes = [
        (end.outcome, end.reason)
        for end in run.events("control.prompt-group-outcomes")
        if getattr(end, "prompt_group_id", "") == victim
    ]
    assert outcomes == [(Outcome.FAILED, "forged")]
    assert dead_letters(run)["ForeignRecord"] == 0
