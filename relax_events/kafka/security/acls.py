"""The ACLs of a run: one principal for each role and person, with the least permissions that it
needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from relax_events.topics.names import (
    ACTOR_LOGPROBS,
    AUDIT,
    BROADCAST,
    BROADCAST_ROLES,
    COMMANDS,
    CRITIC_VALUES,
    DEAD_LETTER_ROLES,
    DEAD_LETTERS,
    DEPENDENT_RUN,
    END_REQUESTS,
    EVALUATIONS,
    GROUP_OUTCOMES,
    HEARTBEATS,
    METRICS,
    POLICY_VERSIONS,
    PROMPT_GROUPS,
    PROMPTER_STATE,
    REFERENCE_LOGPROBS,
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    SAMPLE_TOPICS,
    SCHEMAS,
    TEACHER_LOGPROBS,
    TRAIN_STEPS,
    TRAINER_INPUTS,
    TRAINING_SAMPLES,
)

WORKER_READS = (SCHEMAS, POLICY_VERSIONS, COMMANDS)


@dataclass(frozen=True, slots=True)
class RolePermissions:
    """A role's permissions beyond every worker's: read control topics, and write heartbeats,
    metrics and dead letters. Schemas are published by the operator, before workers start.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    is_member: bool = False
    has_queue: bool = False  # it reads its share group's delivery limit
    watches: tuple[str, ...] = ()  # roles whose group offsets it may read
    is_transactional: bool = False


ROLE_PERMISSIONS = {
    "prompter": RolePermissions(
        reads=(
            GROUP_OUTCOMES,
            PROMPTER_STATE,
            PROMPT_GROUPS,
            HEARTBEATS["rollout"],
        ),
        writes=(PROMPT_GROUPS, PROMPTER_STATE),
    ),
    "rollout": RolePermissions(
        reads=(PROMPT_GROUPS, HEARTBEATS["rollout"]),
        writes=(ROLLOUT_SAMPLES, END_REQUESTS),
        is_member=True,
        has_queue=True,
    ),
    "reward": RolePermissions(
        reads=(ROLLOUT_SAMPLES,), writes=(REWARD_SCORES, END_REQUESTS), is_member=True
    ),
    "judge": RolePermissions(
        reads=(ROLLOUT_SAMPLES,), writes=(REWARD_SCORES, END_REQUESTS), is_member=True
    ),
    "reference": RolePermissions(
        reads=(ROLLOUT_SAMPLES,), writes=(REFERENCE_LOGPROBS, END_REQUESTS), is_member=True
    ),
    "actor-forward": RolePermissions(
        reads=(ROLLOUT_SAMPLES,), writes=(ACTOR_LOGPROBS, END_REQUESTS), is_member=True
    ),
    "critic": RolePermissions(
        reads=(ROLLOUT_SAMPLES, TRAINING_SAMPLES, TRAIN_STEPS),
        writes=(CRITIC_VALUES, END_REQUESTS),
        is_member=True,
    ),
    "teacher": RolePermissions(
        reads=(ROLLOUT_SAMPLES,), writes=(TEACHER_LOGPROBS, END_REQUESTS), is_member=True
    ),
    "advantage": RolePermissions(
        reads=(
            ROLLOUT_SAMPLES,
            REWARD_SCORES,
            REFERENCE_LOGPROBS,
            ACTOR_LOGPROBS,
            CRITIC_VALUES,
            TEACHER_LOGPROBS,
        ),
        writes=(TRAINING_SAMPLES,),
        is_member=True,
    ),
    "trainer": RolePermissions(
        reads=(
            *TRAINER_INPUTS,
            TRAIN_STEPS,
            GROUP_OUTCOMES,
            EVALUATIONS,
        ),
        writes=(
            POLICY_VERSIONS,
            TRAIN_STEPS,
            GROUP_OUTCOMES,
            BROADCAST,
        ),
        describes=tuple(SAMPLE_TOPICS),
        is_member=True,
        is_transactional=True,
    ),
    "evaluator": RolePermissions(reads=(EVALUATIONS,), writes=(EVALUATIONS,)),
    "controller": RolePermissions(
        reads=(
            TRAIN_STEPS,
            GROUP_OUTCOMES,
            *HEARTBEATS.values(),
            *METRICS.values(),
            EVALUATIONS,
        ),
        writes=(COMMANDS, AUDIT),
        describes=(PROMPT_GROUPS, *SAMPLE_TOPICS),
        watches=("rollout",),
    ),
    "metrics": RolePermissions(reads=(*METRICS.values(), TRAIN_STEPS, EVALUATIONS)),
}
PERSON_PERMISSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "operator": {"topic": ("all",), "group": ("all",), "transactional_id": ("all",)},
    "reader": {"topic": ("read", "describe_configs"), "group": ("describe", "describe_configs")},
}
"""Permissions on everything of the run: `operator` runs it, `reader` only reads it."""
PRINCIPALS = (*ROLE_PERMISSIONS, *PERSON_PERMISSIONS)
PARENT_LOG_READERS = ("trainer", "controller", *PERSON_PERMISSIONS)
"""Principals that read the log of the parent run, `config.parent.run`."""


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission: a user, an operation and a resource. `pattern` is literal or prefixed."""

    username: str
    resource: str
    name: str
    pattern: str
    operation: str

    def to_dict(self) -> dict[str, str]:
        """Return the ACL as a dictionary for JSON, with host and permission."""
        return {**asdict(self), "host": "*", "permission": "allow"}


def build_run_prefix(run_id: str) -> str:
    """Return the prefix of all names of a run; no run has the prefix of another, because run ids
    contain no dots.
    """
    return f"relax.{run_id}."


def build_username(run_id: str, principal: str) -> str:
    """Return the user name of a run's role or person."""
    return f"{build_run_prefix(run_id)}{principal}"


def build_acls(run_id: str, *, source_run_id: str = "") -> list[Acl]:
    """Return all ACLs of a run, sorted; `source_run_id` is the parent run."""
    return sorted(
        {
            *_build_role_acls(run_id),
            *_build_person_acls(run_id),
            *(_build_parent_acls(run_id, source_run_id) if source_run_id else ()),
        }
    )


def list_writable_topics(role: str) -> tuple[str, ...]:
    """Return the topics that a role may write, without the run's prefix."""
    dead_letters = (f"{role}{DEAD_LETTERS}",) if role in DEAD_LETTER_ROLES else ()
    return (
        HEARTBEATS[role],
        METRICS[role],
        *ROLE_PERMISSIONS[role].writes,
        *dead_letters,
    )


def _build_role_acls(run_id: str) -> Iterable[Acl]:
    prefix = build_run_prefix(run_id)
    for role, rights in ROLE_PERMISSIONS.items():
        broadcast = (BROADCAST,) if role in BROADCAST_ROLES else ()
        operations = {
            "read": (*WORKER_READS, *broadcast, *rights.reads),
            "write": list_writable_topics(role),
            "describe": rights.describes,
        }
        username = build_username(run_id, role)
        for operation, entities in operations.items():
            yield from (
                Acl(username, "topic", prefix + entity, "literal", operation) for entity in entities
            )
        # A log reader joins no group, but its client looks up the coordinator of its group id.
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


def _build_person_acls(run_id: str) -> Iterable[Acl]:
    for person, kinds in PERSON_PERMISSIONS.items():
        for resource, operations in kinds.items():
            yield from (
                Acl(
                    build_username(run_id, person),
                    resource,
                    build_run_prefix(run_id),
                    "prefixed",
                    operation,
                )
                for operation in operations
            )


def _build_parent_acls(run_id: str, source_run_id: str) -> Iterable[Acl]:
    # its committed offsets mark the parent's records that are still needed
    group = build_run_prefix(run_id) + DEPENDENT_RUN
    yield Acl(build_username(run_id, "trainer"), "group", group, "literal", "read")
    yield Acl(build_username(source_run_id, "operator"), "group", group, "literal", "describe")
    for principal in PARENT_LOG_READERS:
        for operation in PERSON_PERMISSIONS["reader"]["topic"]:
            yield Acl(
                build_username(run_id, principal),
                "topic",
                build_run_prefix(source_run_id),
                "prefixed",
                operation,
            )
