"""The ACL table covers the topic plan and the installed roles, so neither changes without the
other.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from relax_events.kafka.security.acls import (
    PERSON_PERMISSIONS,
    PRINCIPALS,
    ROLE_PERMISSIONS,
    Acl,
    build_acls,
    build_run_prefix,
    build_username,
)
from relax_events.plugins import ROLES
from relax_events.topics import TopicPlan

PLAN = TopicPlan("demo", 1, 2, 4, 1, "none")
TOPICS = {spec.name for spec in PLAN.specs()}
ACLS = build_acls("demo")


def allowed(operation: str) -> dict[str, set[str]]:
    """Return who has an operation on each topic, roles only."""
    found: dict[str, set[str]] = {}
    for acl in ACLS:
        if acl.resource == "topic" and acl.pattern == "literal" and acl.operation == operation:
            found.setdefault(acl.name, set()).add(acl.username.removeprefix("relax.demo."))
    return found


def test_acl_permissions_exist_exactly_for_the_installed_roles() -> None:
    assert {entry.name for entry in entry_points(group=ROLES)} == set(ROLE_PERMISSIONS)


def test_every_topic_but_the_schemas_has_a_writer_and_acls_name_only_planned_topics() -> None:
    """The operator publishes the schemas."""
    assert set(allowed("write")) == TOPICS - {PLAN.topic("control.schemas")}
    assert set(allowed("read")) | set(allowed("describe")) <= TOPICS


def test_every_topic_has_a_reader_but_those_that_people_alone_read() -> None:
    assert TOPICS - set(allowed("read")) == {
        name for name in TOPICS if name.endswith((".dead-letters", ".control.audit"))
    }


def test_only_roles_with_engines_read_the_token_with_which_an_engine_joins() -> None:
    assert allowed("read")[PLAN.topic("control.broadcast-membership")] == {
        "rollout",
        "actor-forward",
        "trainer",
    }


@pytest.mark.parametrize(
    ("entity", "writers"),
    [
        ("control.policy-versions", {"trainer"}),
        ("control.train-steps", {"trainer"}),
        ("control.prompt-group-outcomes", {"trainer"}),
        ("control.commands", {"controller"}),
        ("prompt.groups", {"prompter"}),
        ("rollout.samples", {"rollout"}),
        ("reward.scores", {"reward", "judge"}),  # each for samples of its own
    ],
)
def test_each_topic_is_writable_only_by_its_responsible_roles(
    entity: str, writers: set[str]
) -> None:
    assert allowed("write")[PLAN.topic(entity)] == writers


def test_roles_may_not_create_alter_or_delete() -> None:
    roles = {build_username("demo", role) for role in ROLE_PERMISSIONS}
    assert {acl.operation for acl in ACLS if acl.username in roles} == {
        "read",
        "write",
        "describe",
        "describe_configs",
    }
    looked_at = [
        (acl.username, acl.resource, acl.name)
        for acl in ACLS
        if acl.username in roles and acl.operation == "describe_configs"
    ]
    assert looked_at == [("relax.demo.rollout", "group", "relax.demo.rollout")]


def test_only_the_trainer_may_use_the_planned_transactional_id() -> None:
    owners = [
        acl
        for acl in ACLS
        if acl.resource == "transactional_id" and acl.username.split(".")[-1] in ROLE_PERMISSIONS
    ]
    assert {acl.username for acl in owners} == {"relax.demo.trainer"}
    assert all(PLAN.transactional_id("trainer").startswith(acl.name) for acl in owners)


def test_reader_can_change_nothing() -> None:
    assert {acl.operation for acl in ACLS if acl.username == "relax.demo.reader"} == {
        "read",
        "describe",
        "describe_configs",
    }


def test_acls_allow_nothing_outside_the_run() -> None:
    assert all(
        acl.name.startswith("relax.demo.") and acl.username.startswith("relax.demo.")
        for acl in ACLS
    )
    assert len(set(ACLS)) == len(ACLS)
    assert (
        {acl.username.removeprefix("relax.demo.") for acl in ACLS}
        == set(PRINCIPALS)
        == {*ROLE_PERMISSIONS, *PERSON_PERMISSIONS}
    )


@pytest.mark.parametrize("other", ["demo-2", "dem", "demo2", "a-demo"])
def test_run_prefix_never_matches_another_run(other: str) -> None:
    assert not build_run_prefix(other).startswith(build_run_prefix("demo"))
    assert not build_run_prefix("demo").startswith(build_run_prefix(other))


def test_acl_is_exported_as_a_dict_for_other_tools() -> None:
    written = Acl("relax.demo.reader", "topic", "relax.demo.", "prefixed", "read").to_dict()
    assert written == {
        "username": "relax.demo.reader",
        "resource": "topic",
        "name": "relax.demo.",
        "pattern": "prefixed",
        "operation": "read",
        "host": "*",
        "permission": "allow",
    }


def test_replay_may_only_read_its_source_run() -> None:
    more = set(build_acls("demo", source_run_id="first")) - set(ACLS)
    assert set(ACLS) < set(build_acls("demo", source_run_id="first"))
    topics = {acl for acl in more if acl.resource == "topic"}
    assert {(acl.name, acl.pattern) for acl in topics} == {("relax.first.", "prefixed")}
    assert {acl.operation for acl in topics} == {"read", "describe_configs"}
    assert {acl.username for acl in topics} == {
        f"relax.demo.{name}" for name in ("trainer", "controller", "operator", "reader")
    }
    # How far it is, the replay's trainer reports and the source's operator may know.
    assert {(acl.username, acl.resource, acl.name, acl.operation) for acl in more - topics} == {
        ("relax.demo.trainer", "group", "relax.demo.follower", "read"),
        ("relax.first.operator", "group", "relax.demo.follower", "describe"),
    }
