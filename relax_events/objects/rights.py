"""What each role may do in the run's object store: the least that it needs, by folder.

The only place that says so: policies of a bucket, mounts of containers and their documentation are
made from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WEIGHTS, CHECKPOINTS, CRITIC = "weights/", "checkpoints/", "critic/"
SAMPLES, MEDIA, PARTIALS = "samples/", "sha256/", "partials/"
MARKER = "relax-run.json"
PROBE = "doctor/"
FOLDERS = (WEIGHTS, CHECKPOINTS, CRITIC, PARTIALS, SAMPLES, MEDIA)
"""The folders of all objects that a run writes, each with a slash at its end; besides the marker,
other objects under the same URI belong to others."""
S3_LANGUAGE = "2012-10-17"
"""Version of the language of S3's policies."""
READ, WRITE, DELETE = (
    ("s3:GetObject",),
    ("s3:PutObject", "s3:AbortMultipartUpload"),
    ("s3:DeleteObject",),
)


@dataclass(frozen=True, slots=True)
class StoreRights:
    """A role's rights, by folder. Each role may also read the store's marker and list names."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        """The folders in which it writes or deletes, for stores that treat these alike."""
        return tuple(folder for folder in FOLDERS if folder in {*self.writes, *self.deletes})


ROLE_STORE_RIGHTS = {
    "prompter": StoreRights(reads=(MEDIA,), writes=(MEDIA,)),
    "rollout": StoreRights(
        reads=(WEIGHTS, SAMPLES, MEDIA, PARTIALS), writes=(SAMPLES, PARTIALS), deletes=(PARTIALS,)
    ),
    "reward": StoreRights(reads=(SAMPLES,)),
    "judge": StoreRights(reads=(SAMPLES, MEDIA)),
    "reference": StoreRights(reads=(WEIGHTS, SAMPLES, MEDIA), writes=(SAMPLES,)),
    "actor-forward": StoreRights(reads=(WEIGHTS, SAMPLES, MEDIA), writes=(SAMPLES,)),
    "critic": StoreRights(
        reads=(CRITIC, SAMPLES, MEDIA), writes=(CRITIC, SAMPLES), deletes=(CRITIC,)
    ),
    "teacher": StoreRights(reads=(SAMPLES, MEDIA), writes=(SAMPLES,)),
    "advantage": StoreRights(reads=(SAMPLES,), writes=(SAMPLES,)),
    "trainer": StoreRights(
        reads=(WEIGHTS, CHECKPOINTS, SAMPLES, MEDIA),
        writes=(WEIGHTS, CHECKPOINTS),
        deletes=(WEIGHTS, CHECKPOINTS),
    ),
    "evaluator": StoreRights(reads=(WEIGHTS, MEDIA), writes=(MEDIA,)),
    "controller": StoreRights(reads=(CHECKPOINTS,), deletes=(SAMPLES,)),
    "metrics": StoreRights(),
}
ALL = (*FOLDERS, PROBE)
PERSON_STORE_RIGHTS = {
    "operator": StoreRights(reads=ALL, writes=ALL, deletes=ALL),
    "reader": StoreRights(reads=FOLDERS),
}
"""`operator` runs the commands; `reader` only reads."""
STORE_RIGHTS = ROLE_STORE_RIGHTS | PERSON_STORE_RIGHTS
MARKER_WRITERS = ("controller", "operator")
"""Principals that make the store's marker; a role that starts before the controller waits for it.
"""
PARENT_STORE_READERS = ("trainer", "critic", "controller", *PERSON_STORE_RIGHTS)
"""Principals that read the store of the parent run, for a replay or a fork."""


def build_bucket_policy(
    principal: str, *, bucket: str, prefix: str = "", parent_prefix: str | None = None
) -> dict[str, Any]:
    """Return the S3 policy of a role or person: attach it to the user whose keys it gets.

    Names of objects can be listed in the whole bucket: without that, S3 answers 403 instead of 404
    for an object that is not there.

    Args:
        principal: A key of `STORE_RIGHTS`.
        bucket: Of the run's store.
        prefix: Of the run's store in the bucket; no slash at its end.
        parent_prefix: Of the parent run's store in the same bucket, if it has one.
    """
    rights = STORE_RIGHTS[principal]
    root = f"arn:aws:s3:::{bucket}/" + (f"{prefix}/" if prefix else "")
    reads = [f"{root}{folder}*" for folder in rights.reads]
    if parent_prefix is not None and principal in PARENT_STORE_READERS:
        reads.append(f"arn:aws:s3:::{bucket}/" + (f"{parent_prefix}/*" if parent_prefix else "*"))
    marker = [root + MARKER] if principal in MARKER_WRITERS else []
    statements = [
        _allow(["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"]),
        _allow(READ, [root + MARKER, *reads]),
        _allow(WRITE, [f"{root}{folder}*" for folder in rights.writes] + marker),
        _allow(DELETE, [f"{root}{folder}*" for folder in rights.deletes] + marker),
    ]
    return {
        "Version": S3_LANGUAGE,
        "Statement": [statement for statement in statements if statement["Resource"]],
    }


def _allow(actions: Iterable[str], resources: list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": resources}
