"""Members join and leave a run's consumer groups every second: the run continues, and few samples
are processed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from harness import LIVING_SECONDS, FaultRun, assert_ledger_balances

from relax_events.deadline import Deadline
from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleScored
from relax_events.kafka.consumer import SubscribedConsumer

NUM_VISITS = 20
VISIT_SECONDS = 1.0
TOPICS = {
    "reward": ["rollout.samples"],
    "advantage": ["rollout.samples", "reward.scores", "reference.logprobs", "actor.logprobs"],
}


def visit(run: FaultRun, role: str) -> int:
    """Join a role's group, wait until partitions are given, commit nothing, leave; return how many
    there were."""
    given: set[tuple[str, int]] = set()
    member = SubscribedConsumer(
        run.connection,
        consumer_group=run.plan.consumer_group(role),
        topics=[run.plan.topic(entity) for entity in TOPICS[role]],
        on_assigned=lambda offsets: given.update(
            (offset.topic, offset.partition) for offset in offsets
        ),
    )
    deadline = Deadline(LIVING_SECONDS)
    try:
        while not given and not deadline.passed:
            member.fetch(timeout_seconds=VISIT_SECONDS / 2)
            run.follow_for(VISIT_SECONDS / 2)
    finally:
        member.close()
    return len(given)


@pytest.mark.long
@pytest.mark.parametrize("prompt_queue", ["share_group", "consumer_group"])
def test_run_continues_while_group_members_join_and_leave(
    start_run: Callable[..., FaultRun], prompt_queue: str
) -> None:
    run = start_run(run={"num_steps": 192}, broker={"prompt_queue": prompt_queue})
    run.start()
    run.wait_until_steps(3)
    pids = {worker_id: run.pid(worker_id) for worker_id in run.worker_ids}
    before = run.state.num_steps
    num_given = sum(visit(run, role) for _ in range(NUM_VISITS // 2) for role in TOPICS)
    print(
        f"{prompt_queue}: {num_given} partitions moved, {run.state.num_steps - before} steps "
        "meanwhile"
    )
    assert num_given >= NUM_VISITS, "partitions moved"
    assert run.state.num_steps < run.config.run.num_steps
    run.recovers_within(LIVING_SECONDS)

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert {worker_id: run.pid(worker_id) for worker_id in run.worker_ids} == pids, (
        "no worker was started again"
    )
    codec = EventCodec()
    events = [
        event
        for record in run.records("reward.scores", num_partitions=run.plan.num_sample_partitions)
        for event in split_samples(codec.decode(record.value))
    ]
    times_scored = Counter(event.sample_id for event in events if isinstance(event, SampleScored))
    num_again = times_scored.total() - len(times_scored)
    print(f"{prompt_queue}: {num_again} of {len(times_scored)} samples scored again")
    assert num_again <= len(times_scored) / 2, (
        "a partition that moves is read again from its last commit, not from its beginning"
    )
