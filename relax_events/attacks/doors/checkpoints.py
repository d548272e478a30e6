"""Hostile distributed checkpoints against the converter."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from relax_events.attacks.attacked_run import build_tiny_model
from relax_events.attacks.checkpoints import metadata_pickles
from relax_events.attacks.doors.stored import refuse
from relax_events.attacks.suite import Assault, Attack, NotPossible
from relax_events.attacks.targets import Targets
from relax_events.confinement.entry_points import CHECKPOINT_CONVERTER
from relax_events.errors import ConfigError
from relax_events.packages.megatron.foreign_checkpoint.metadata import read_metadata
from relax_events.packages.megatron.model_conversion import convert_model

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
CODE = "os.system"
"""The pickle that stands for the others in the converter's process."""


def checkpoint_assaults() -> Iterator[Assault]:
    """Give the assaults of checkpoints: all pickles against their reader, and a few checkpoints
    against the whole converter, whose process takes long to start.
    """
    point = CHECKPOINT_CONVERTER
    yield Assault(point.name, point.doors, point.profile, _prepare_conversions)
    yield Assault(point.name, point.doors, point.profile, _prepare_metadata, "metadata")


@contextmanager
def _prepare_metadata(targets: Targets) -> Iterator[list[Attack]]:
    pickles = metadata_pickles(targets.canary)
    yield [Attack(name, partial(_read, content)) for name, content in pickles.items()]


def _read(content: bytes) -> str:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / ".metadata").write_bytes(content)
        return refuse(lambda: read_metadata(Path(name)), ConfigError)


@contextmanager
def _prepare_conversions(targets: Targets) -> Iterator[list[Attack]]:
    if importlib.util.find_spec("megatron") is None:
        raise NotPossible("megatron-core is not installed")
    code = metadata_pickles(targets.canary)[CODE]
    changes: dict[str, Callable[[Path], object]] = {
        "pickle as .metadata": lambda folder: (folder / ".metadata").write_bytes(code),
        "pickle as common.pt": lambda folder: (folder / "common.pt").write_bytes(code),
        "pipe as .metadata": lambda folder: os.mkfifo(folder / ".metadata"),
    }
    with tempfile.TemporaryDirectory() as name:
        base = build_tiny_model(Path(name) / "base")
        yield [Attack(what, partial(_convert, base, make)) for what, make in changes.items()]


def _convert(base: Path, make: Callable[[Path], object]) -> str:
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        (source / "metadata.json").write_text(json.dumps(FORMAT))
        make(source)
        target = Path(name) / "target"
        convert = partial(convert_model, source, target, format="hf", base=base)
        return refuse(convert, ConfigError)
