"""Each role's rights on the object store: least, complete, and as the code lays objects out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_events.kafka.security.acls import PERSON_PERMISSIONS, ROLE_PERMISSIONS
from relax_events.objects.rights import (
    FOLDERS,
    PERSON_STORE_RIGHTS,
    ROLE_STORE_RIGHTS,
    STORE_RIGHTS,
    StoreRights,
    build_bucket_policy,
)
from relax_events.objects.version_objects import PREFIX as SAMPLES
from relax_events.roles.handover import PREFIX as PARTIALS
from relax_events.training.checkpoint.checkpoints import PREFIX as CHECKPOINTS
from relax_events.training.checkpoint.critic_checkpoints import FOLDER as CRITIC_CHECKPOINTS
from relax_events.weights.artifact_writer import PREFIX as WEIGHTS

MEDIA = "sha256/"
ROOT = Path(__file__).parents[3]


def test_every_role_and_person_of_the_log_has_store_rights() -> None:
    assert ROLE_STORE_RIGHTS.keys() == ROLE_PERMISSIONS.keys()
    assert PERSON_STORE_RIGHTS.keys() == PERSON_PERMISSIONS.keys()


def test_folders_are_those_that_the_code_writes() -> None:
    critic = CRITIC_CHECKPOINTS.partition("/")[0] + "/"
    assert set(FOLDERS) == {WEIGHTS, CHECKPOINTS, critic, PARTIALS, SAMPLES, MEDIA}
    for rights in ROLE_STORE_RIGHTS.values():
        assert {*rights.reads, *rights.writes, *rights.deletes} <= set(FOLDERS)


@pytest.mark.parametrize("folder", [WEIGHTS, CHECKPOINTS])
def test_trainer_alone_changes_weights_and_checkpoints(folder: str) -> None:
    assert [role for role, rights in ROLE_STORE_RIGHTS.items() if folder in rights.changes] == [
        "trainer"
    ]


def test_checkpoints_are_read_by_those_that_restore_and_purge_alone() -> None:
    readers = [role for role, rights in ROLE_STORE_RIGHTS.items() if CHECKPOINTS in rights.reads]
    assert readers == ["trainer", "controller"]


@pytest.mark.parametrize("role", ["reward", "judge", "metrics"])
def test_roles_that_only_score_or_count_change_nothing(role: str) -> None:
    assert ROLE_STORE_RIGHTS[role].changes == ()


@pytest.mark.parametrize("role", ROLE_STORE_RIGHTS)
def test_role_that_deletes_or_writes_reads_what_it_writes(role: str) -> None:
    rights = ROLE_STORE_RIGHTS[role]
    assert set(rights.writes) <= set(rights.reads), "a look-up comes before a write"


def test_policy_of_reward_allows_reading_samples_alone() -> None:
    assert build_bucket_policy("reward", bucket="b", prefix="runs/one") == {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": ["arn:aws:s3:::b"]},
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject"],
                "Resource": [
                    "arn:aws:s3:::b/runs/one/relax-run.json",
                    "arn:aws:s3:::b/runs/one/samples/*",
                ],
            },
        ],
    }


@pytest.mark.parametrize("principal", STORE_RIGHTS)
def test_policy_never_reaches_beyond_the_run(principal: str) -> None:
    policy = build_bucket_policy(principal, bucket="b", prefix="one")
    for statement in policy["Statement"]:
        for resource in statement["Resource"]:
            assert resource == "arn:aws:s3:::b" or resource.startswith("arn:aws:s3:::b/one/")
            assert resource != "arn:aws:s3:::b/one/*"


def test_policy_of_a_fork_reads_the_parent_and_changes_nothing_there() -> None:
    policy = build_bucket_policy("trainer", bucket="b", prefix="two", parent_prefix="one")
    named = [
        statement["Action"]
        for statement in policy["Statement"]
        if "arn:aws:s3:::b/one/*" in statement["Resource"]
    ]
    assert named == [["s3:GetObject"]]
    reward = build_bucket_policy("reward", bucket="b", prefix="two", parent_prefix="one")
    assert reward == build_bucket_policy("reward", bucket="b", prefix="two")


def test_docs_page_lists_the_rights_of_each_role() -> None:
    page = (ROOT / "docs" / "how-to" / "secure-a-cluster.md").read_text()
    text = page.partition("| role | reads | writes | deletes in |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    listed = {
        role: StoreRights(*(tuple(re.findall(r"`([a-z0-9]+/)`", cell)) for cell in cells))
        for role, *cells in rows
    }
    assert listed == ROLE_STORE_RIGHTS
