"""Checks whether a run's topics and groups are in order, and changes nothing. Each finding names a
remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin, PartitionState, TopicState
from relax_events.kafka.offset_admin import ConsumerGroupState
from relax_events.ops.dead_letters import DeadLetter, read_dead_letters
from relax_events.ops.topic_apply import Change, plan_changes
from relax_events.projections.base import apply_events
from relax_events.projections.run_state import RunState
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS
from relax_events.topics.plan import list_role_inputs


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """A result of a check: `is_good`, or a problem with its remedy. `is_note` is information, no
    problem.
    """

    what: str
    text: str
    remedy: str = ""
    is_note: bool = False

    @property
    def is_good(self) -> bool:
        """Whether nothing has to be done."""
        return not self.remedy or self.is_note


def check_topics(config: RunConfig, admin: Admin) -> list[TopicFinding]:
    """Run all checks; problems come first."""
    plan = TopicPlan.from_config(config)
    topic_states = admin.topics(plan.topic(""))
    findings = [
        *drift_findings(plan_changes(plan.specs(), topic_states)),
        *partition_findings(admin.partitions(plan.topic("")), topic_states),
    ]
    if plan.topic(COMMANDS) in topic_states:
        with RunLog(config, name="check") as log:
            over = has_ended(log)
            findings += dead_letter_findings(read_dead_letters(log))
        findings += group_findings(config, admin.groups(plan.consumer_group("")), is_over=over)
        findings += transaction_findings(admin, topic_states, is_over=over)
    return sorted(findings, key=lambda finding: finding.is_good)


def has_ended(log: RunLog) -> bool:
    """Return whether the run has ended, or has not started: then no worker is expected."""
    state = RunState()
    apply_events(log.read_control_events(COMMANDS), state)
    return state.ended is not None or not log.versions


def drift_findings(changes: Iterable[Change]) -> Iterator[TopicFinding]:
    """Report where the topics differ from the plan."""
    changes = list(changes)
    for change in changes:
        if not change.is_drift:
            yield TopicFinding("plan", f"{change.topic}: {change.detail}", is_note=True)
        elif change.kind == "conflict":
            yield TopicFinding(
                "plan",
                f"{change.topic} {change.detail}",
                "use the run file that the run was started with, or another run.id",
            )
        else:
            yield TopicFinding(
                "plan",
                f"{change.topic}: {change.kind} {change.detail}",
                "relax topics apply brings it to the plan",
            )
    if not any(change.is_drift for change in changes):
        yield TopicFinding("plan", "the topics are as planned")


def partition_findings(
    partitions: Iterable[PartitionState], topic_states: Mapping[str, TopicState]
) -> Iterator[TopicFinding]:
    """Report partitions without a leader, with replicas out of sync, or with too few of them to be
    written.
    """
    count = wrong = 0
    for state in partitions:
        count += 1
        topic_partition = f"{state.topic}[{state.partition}]"
        needed = (
            int(topic_states[state.topic].settings.get("min.insync.replicas", "1"))
            if state.topic in topic_states
            else 1
        )
        missing = sorted(set(state.replicas) - set(state.in_sync))
        if state.leader < 0:
            yield TopicFinding(
                "partitions",
                (
                    f"{topic_partition} is offline: none of the brokers {list(state.replicas)} "
                    "leads it"
                ),
                "start those brokers",
            )
        elif len(state.in_sync) < needed:
            text = (
                f"{topic_partition} can't be written: {len(state.in_sync)} in sync, "
                "min.insync.replicas is "
                f"{needed}"
            )
            yield TopicFinding("partitions", text, f"start the brokers {missing}")
        elif missing:
            yield TopicFinding(
                "partitions",
                f"{topic_partition} is under-replicated: not in sync are the brokers {missing}",
                "start them, or wait for them",
            )
        else:
            continue
        wrong += 1
    if not wrong:
        yield TopicFinding(
            "partitions", f"all {count} partitions have their leader and all replicas in sync"
        )


def group_findings(
    config: RunConfig, groups: Mapping[str, ConsumerGroupState], *, is_over: bool
) -> Iterator[TopicFinding]:
    """Report the roles of a running run that have no members."""
    plan, missing = TopicPlan.from_config(config), []
    for role in list_role_inputs(config):
        group = groups.get(plan.consumer_group(role))
        if role != "trainer" and not (
            group and group.members
        ):  # the trainer assigns its partitions itself: fencing, not a group, keeps it single
            missing.append(role)
    if is_over:
        yield TopicFinding(
            "groups", "the run does not run now: no members are expected", is_note=True
        )
        return
    for role in missing:
        yield TopicFinding(
            "groups",
            f"{plan.consumer_group(role)} has no members",
            f"relax worker {role} RUN_FILE, or relax run RUN_FILE",
        )
    if not missing:
        yield TopicFinding("groups", "every role has members")


def transaction_findings(
    admin: Admin, topic_states: Mapping[str, TopicState], *, is_over: bool
) -> Iterator[TopicFinding]:
    """Report where an open transaction hides records. In a running run it is the trainer's, and
    short.
    """
    topic_partitions = [
        (name, partition)
        for name, state in sorted(topic_states.items())
        for partition in range(state.num_partitions)
    ]
    stable, ends = admin.last_stable_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    hidden = {
        topic_partition: ends[topic_partition] - stable[topic_partition]
        for topic_partition in topic_partitions
        if stable[topic_partition] < ends[topic_partition]
    }
    for (topic, partition), count in hidden.items():
        yield TopicFinding(
            "transactions",
            f"{topic}[{partition}]: {count} record(s) lie behind an open transaction",
            "start the run's trainer again: it aborts the transaction of its predecessor",
            is_note=not is_over,
        )
    if not hidden:
        yield TopicFinding("transactions", "none is open")


def dead_letter_findings(dead_letters: Iterable[DeadLetter]) -> Iterator[TopicFinding]:
    """Count the open dead letters by role."""
    waiting = Counter(
        dead_letter.role for dead_letter in dead_letters if not dead_letter.resolution
    )
    for role, count in sorted(waiting.items()):
        yield TopicFinding(
            "dead letters",
            f"{role} could not process {count} record(s)",
            f"relax deadletter RUN_FILE --role {role}",
        )
    if not waiting:
        yield TopicFinding("dead letters", "none is open")
