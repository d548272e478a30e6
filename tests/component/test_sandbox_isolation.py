"""Which isolation the sandbox chooses, and the error where none is sufficient."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.sandbox import Isolation, probing, require_isolation


@pytest.fixture(autouse=True)
def forget_isolation() -> Iterator[None]:
    """Nothing is remembered of walls that were found before, and nothing is left."""
    probing.find_isolation.cache_clear()
    yield
    probing.find_isolation.cache_clear()


def test_isolation_unavailable_in_a_container_is_skipped_for_a_weaker_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose engine refuses new namespaces: the command that leads there ends with
    an error."""
    weaker = next(
        one for one in probing._candidates() if not one.has_namespaces and probing._works(one)
    )
    monkeypatch.setattr(
        probing,
        "_candidates",
        lambda: [
            Isolation(("false",), has_namespaces=True, landlock=weaker.landlock, filters=True),
            weaker,
        ],
    )
    assert probing.find_isolation() == weaker


def test_kernel_or_container_without_landlock_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = next(one for one in [Isolation(filters=True), Isolation()] if probing._works(one))
    monkeypatch.setattr(probing, "_candidates", lambda: [without])
    with pytest.raises(
        EnvironmentProblem,
        match=r"nothing isolates them from files .*in a container, a seccomp profile that lets Landlock through",
    ):
        require_isolation()


def test_error_explains_that_root_cannot_switch_to_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        probing, "_candidates", lambda: [Isolation(("false",), landlock=1, filters=True)]
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(
        EnvironmentProblem,
        match=r"run it as a user other than root, or give it the capabilities CHOWN, .* SETUID$",
    ):
        require_isolation()
