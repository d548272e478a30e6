"""Who may do what on the broker: one principal for each role and person, and the least that it
needs. Everything else is denied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from relax_events.topics.plan import (
    DEAD_LETTER_ROLES,
    END_REQUESTS,
    FOLLOWER,
    HEARTBEATS,
    METRICS,
    SAMPLE_TOPICS,
    TRAINED_FROM,
    TRAINER_INPUTS,
)

WORKER_READS = ("control.schemas", "control.policy-versions", "control.commands", "control.engines")
WORKER_WRITES = ("control.schemas",)


@dataclass(frozen=True, slots=True)
class Rights:
    """What a role may do besides what every worker may: follow control, publish its schemas, beat,
    keep dead letters.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    is_member: bool = False
    has_queue: bool = False  # its group says after how many deliveries a record is dropped
    watches: tuple[str, ...] = ()  # roles whose groups it may ask how far they are
    is_transactional: bool = False


ROLE_RIGHTS = {
    "prompter": Rights(
        reads=("control.group-outcomes", "control.summaries", "prompt.groups"),
        writes=("prompt.groups", "control.summaries"),
    ),
    "rollout": Rights(
        reads=("prompt.groups", HEARTBEATS["rollout"]),
        writes=("rollout.samples", END_REQUESTS),
        is_member=True,
        has_queue=True,
    ),
    "reward": Rights(
        reads=("rollout.samples",), writes=("reward.scores", END_REQUESTS), is_member=True
    ),
    "judge": Rights(
        reads=("rollout.samples",), writes=("reward.scores", END_REQUESTS), is_member=True
    ),
    "reference": Rights(
        reads=("rollout.samples",), writes=("reference.logprobs", END_REQUESTS), is_member=True
    ),
    "actor-forward": Rights(
        reads=("rollout.samples",), writes=("actor.logprobs", END_REQUESTS), is_member=True
    ),
    "critic": Rights(
        reads=("rollout.samples", TRAINED_FROM, "control.train-steps"),
        writes=("critic.values", END_REQUESTS),
        is_member=True,
    ),
    "teacher": Rights(
        reads=("rollout.samples",), writes=("teacher.logprobs", END_REQUESTS), is_member=True
    ),
    "advantage": Rights(
        reads=(
            "rollout.samples",
            "reward.scores",
            "reference.logprobs",
            "actor.logprobs",
            "critic.values",
            "teacher.logprobs",
        ),
        writes=(TRAINED_FROM,),
        is_member=True,
    ),
    "trainer": Rights(
        reads=(
            *TRAINER_INPUTS,
            "control.train-steps",
            "control.group-outcomes",
            "control.evaluations",
        ),
        writes=(
            "control.policy-versions",
            "control.train-steps",
            "control.group-outcomes",
            "control.engines",
        ),
        describes=tuple(SAMPLE_TOPICS),
        is_member=True,
        is_transactional=True,
    ),
    "evaluator": Rights(reads=("control.evaluations",), writes=("control.evaluations",)),
    "controller": Rights(
        reads=(
            "control.train-steps",
            "control.group-outcomes",
            *HEARTBEATS.values(),
            *METRICS.values(),
            "control.evaluations",
        ),
        writes=("control.commands",),
        describes=("prompt.groups", *SAMPLE_TOPICS),
        watches=("rollout",),
    ),
    "metrics": Rights(reads=(*METRICS.values(), "control.train-steps", "control.evaluations")),
}
PERSON_RIGHTS: dict[str, dict[str, tuple[str, ...]]] = {
    "operator": {"topic": ("all",), "group": ("all",), "transactional_id": ("all",)},
    "reader": {"topic": ("read", "describe_configs"), "group": ("describe", "describe_configs")},
}
"""What a person may do with everything of the run: `operator` runs it, `reader` only looks."""
PRINCIPALS = (*ROLE_RIGHTS, *PERSON_RIGHTS)
SOURCE_READERS = ("trainer", "controller", *PERSON_RIGHTS)
"""Who reads the log of the run that this one replays or is forked from: `config.source.run`."""


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission: who may do which operation on what. `pattern` is literal or prefixed."""

    username: str
    resource: str
    name: str
    pattern: str
    operation: str

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON tools want it, the host and the permission spelt out."""
        return {**asdict(self), "host": "*", "permission": "allow"}


def prefix_of(run_id: str) -> str:
    """Return what all names of a run begin with; no run's prefix is another's, since ids have no
    dots.
    """
    return f"relax.{run_id}."


def username_of(run_id: str, principal: str) -> str:
    """Return the user name of a run's role or person."""
    return f"{prefix_of(run_id)}{principal}"


def acls_of(run_id: str, *, source_run_id: str = "") -> list[Acl]:
    """Return all permissions of a run, sorted; `source_run_id` names the run that it replays or is
    forked from.
    """
    return sorted(
        {
            *_of_roles(run_id),
            *_of_people(run_id),
            *(_on_source(run_id, source_run_id) if source_run_id else ()),
        }
    )


def written_by(role: str) -> tuple[str, ...]:
    """Return what a role may write."""
    letters = (f"{role}.dead-letters",) if role in DEAD_LETTER_ROLES else ()
    return (*WORKER_WRITES, HEARTBEATS[role], METRICS[role], *ROLE_RIGHTS[role].writes, *letters)


def _of_roles(run_id: str) -> Iterable[Acl]:
    prefix = prefix_of(run_id)
    for role, rights in ROLE_RIGHTS.items():
        operations = {
            "read": (*WORKER_READS, *rights.reads),
            "write": written_by(role),
            "describe": rights.describes,
        }
        username = username_of(run_id, role)
        for operation, entities in operations.items():
            yield from (
                Acl(username, "topic", prefix + entity, "literal", operation) for entity in entities
            )
        # A log reader joins no group, but the client looks up the coordinator of the one that it is
        # named by.
        yield Acl(username, "group", f"{prefix}{role}-", "prefixed", "describe")
        if rights.is_member:
            yield Acl(username, "group", prefix + role, "literal", "read")
        if rights.has_queue:
            yield Acl(username, "group", prefix + role, "literal", "describe_configs")
        yield from (
            Acl(username, "group", prefix + other, "literal", "describe")
            for other in rights.watches
        )
        if rights.is_transactional:
            yield from (
                Acl(username, "transactional_id", f"{prefix}{role}.", "prefixed", operation)
                for operation in ("write", "describe")
            )


def _of_people(run_id: str) -> Iterable[Acl]:
    for person, kinds in PERSON_RIGHTS.items():
        for resource, operations in kinds.items():
            yield from (
                Acl(username_of(run_id, person), resource, prefix_of(run_id), "prefixed", operation)
                for operation in operations
            )


def _on_source(run_id: str, source_run_id: str) -> Iterable[Acl]:
    group = prefix_of(run_id) + FOLLOWER  # tells the source which records are still needed
    yield Acl(username_of(run_id, "trainer"), "group", group, "literal", "read")
    yield Acl(username_of(source_run_id, "operator"), "group", group, "literal", "describe")
    for principal in SOURCE_READERS:
        for operation in PERSON_RIGHTS["reader"]["topic"]:
            yield Acl(
                username_of(run_id, principal),
                "topic",
                prefix_of(source_run_id),
                "prefixed",
                operation,
            )
