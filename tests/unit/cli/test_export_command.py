"""`relax models export` of a run whose trainer deletes versions meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from relax_events.cli import model_export
from relax_events.config import RunConfig
from relax_events.events.parts import ObjectRef
from relax_events.ops.model_export import export, run_settings
from relax_events.ops.model_export.sources import VersionLost
from relax_events.ops.model_export.versions import PublishedVersions

CONFIG = cast("RunConfig", None)


class FastRun:
    """A run that publishes a version whenever its log is read, and keeps the newest of some."""

    def __init__(self, *, num_lost: int, is_stuck: bool = False) -> None:
        self.num_lost, self.is_stuck = num_lost, is_stuck
        self.newest = 0
        self.tried: list[int] = []

    def read_versions(self, _: RunConfig) -> PublishedVersions:
        self.newest += not self.is_stuck
        artifact = ObjectRef("file:///w", b"", 1)
        return PublishedVersions("run", dict.fromkeys(range(self.newest + 1), artifact))

    def export_version(self, *arguments: Any, **_: Any) -> int:
        version = cast("int", arguments[2])
        self.tried.append(version)
        if len(self.tried) <= self.num_lost:
            raise VersionLost(f"version {version} is gone")
        return version


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(run: FastRun) -> FastRun:
        monkeypatch.setattr(model_export, "_read_versions", run.read_versions)
        monkeypatch.setattr(model_export, "_newest", lambda _: run.newest + (not run.is_stuck))
        monkeypatch.setattr(export, "export_version", run.export_version)
        monkeypatch.setattr(run_settings, "as_described", lambda config, _: config)
        return run

    return install


def test_newest_version_that_was_deleted_is_chosen_again(install: Any) -> None:
    run = install(FastRun(num_lost=2))
    assert cast("int", model_export._export(CONFIG, Path("x"), version=None, best="")) == 3
    assert run.tried == [1, 2, 3]


@pytest.mark.parametrize(
    ("run", "version", "tried"),
    [
        (FastRun(num_lost=99), None, [1, 2, 3, 4, 5]),
        (FastRun(num_lost=99, is_stuck=True), None, [0]),
        (FastRun(num_lost=99), 1, [1]),
    ],
    ids=["always too late", "ended", "named"],
)
def test_lost_version_is_an_error_at_last(
    install: Any, run: FastRun, version: int | None, tried: list[int]
) -> None:
    install(run)
    with pytest.raises(VersionLost, match=f"version {tried[-1]} is gone"):
        model_export._export(CONFIG, Path("x"), version=version, best="")
    assert run.tried == tried
