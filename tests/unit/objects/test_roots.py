"""A record's references must point to the run's own store or an allowed root, or the record is
rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from event_samples import issued, ready, rolled_out

from relax_events.config import RunConfig
from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    MediaRef,
    Modality,
    ObjectRef,
    StoredArray,
)
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.objects.store import AllowedRoots
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.weights.transport import StoreReader

STORE = "s3://runs/demo/objects/"
ESCAPES = [
    "s3://runs/other/objects/a.png",
    "s3://runs/demo/objects/../../other/a.png",
    "s3://runs/demo/objects/%2e%2e/a.png",
    "s3://runs/demo/objects",
    "s3://runs/demo/objects/",
    "s3://runs/demo/objects-of-mine/a.png",
    "s3://runs/demo/objects/a.png?versionId=1",
    "s3://runs/demo/objects//etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "https://runs/demo/objects/a.png",
    "S3://runs/demo/objects/a.png",
    "",
]


def image(uri: str) -> MediaRef:
    return MediaRef(uri, bytes(32), "image/png", 10)


def events_with(uri: str) -> list[Event]:
    """Return each kind of event that refers to media."""
    message = ChatMessage(
        "user",
        [ContentPart(Modality.TEXT, text="look"), ContentPart(Modality.IMAGE, media=image(uri))],
    )
    return [
        replace(issued(), messages=[message]),
        rolled_out(messages=[message]),
        ready(media=[image(uri)]),
    ]


@pytest.mark.parametrize("uri", ESCAPES)
def test_media_outside_of_the_roots_are_refused(uri: str) -> None:
    roots = AllowedRoots.for_store(STORE)
    for event in events_with(uri):
        with pytest.raises(
            ObjectError,
            match=r"media must lie under s3://runs/demo/objects/, .*objects.allowed_roots",
        ):
            roots.check(event)


@pytest.mark.parametrize(
    "uri", [STORE + "sha256/ab/abcd.png", "s3://images/cats/1.png", "file:///data/sets/1.png"]
)
def test_media_in_the_store_or_an_allowed_root_pass(uri: str) -> None:
    roots = AllowedRoots.for_store(STORE, ["s3://images", "file:///data/sets/"])
    for event in events_with(uri):
        roots.check(event)


def test_worker_rejects_media_outside_the_roots_before_fetching(tmp_path: Path) -> None:
    store = ObjectStore.open((tmp_path / "objects").as_uri())
    claim_check = StoreClaimCheck(store, claim_check_threshold_bytes=1)
    inside = ready(media=[image(store.put(b"an image", suffix=".png").uri)])
    ahead = claim_check.open_ahead()
    assert ahead.check_out(inside) is inside
    with pytest.raises(ObjectError, match="media must lie under"):
        ahead.check_out(ready(media=[image("file:///etc/passwd")]))


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "{root}../secret",
        "{root}a/../../secret",
        "http://127.0.0.1/x",
        "s3://bucket/x",
    ],
)
def test_array_and_artifact_outside_of_the_store_are_refused(tmp_path: Path, uri: str) -> None:
    (tmp_path / "secret").write_bytes(b"not yours")
    store = ObjectStore.open((tmp_path / "objects").as_uri())
    reference = ObjectRef(uri.format(root=store.uri("")), bytes(32), 9)
    stored = ready(tokens=StoredArray("<i4", (4,), reference))
    with pytest.raises(ObjectError, match=r"lies outside the object store|can't name an object"):
        StoreClaimCheck(store, claim_check_threshold_bytes=1).open_ahead().check_out(stored)
    announced = PolicyVersionPublished(
        policy_version=1, artifact=reference, transports=["store"], start_offsets=[]
    )
    with pytest.raises(WeightsError, match=r"lies outside the object store|can't name an object"):
        StoreReader(store).fetch(announced)


def test_run_file_allows_more_roots(make_run_config: Callable[..., RunConfig]) -> None:
    assert make_run_config().objects.allowed_roots == ()
    assert make_run_config(objects={"allowed_roots": ["s3://images/"]}).objects.allowed_roots == (
        "s3://images/",
    )
