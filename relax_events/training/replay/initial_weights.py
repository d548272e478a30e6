"""Reads the weights that a replay or fork starts from: the parent's checkpoint of that version, or
its published weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from relax_events.errors import ConfigError, ObjectError, WeightsError
from relax_events.events.types import PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.runtime.parent_run import ParentRun
from relax_events.training.backend.protocol import TrainerState
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import Ranks
from relax_events.weights.transport import StoreReader

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class InitialState:
    """Weights to start from; `kind` is `checkpoint` (with the optimizer) or `weights`."""

    kind: str
    state: TrainerState


def read_initial_state(source: ParentRun, version: int, *, ranks: Ranks) -> InitialState | None:
    """Return the source's state at a version: its checkpoint of that version if there is one, else
    its published weights.

    Returns:
        None where that is the model of `model.path`, which needs no reading.
    Raises:
        ConfigError: Neither is left; the text says which versions are.
    """
    if version == 0 and not source.config.parent.run:
        return None
    store = ObjectStore.open(source.objects_uri, uri_aliases=source.config.objects.uri_aliases)
    named = (step.checkpoint for step in source.steps() if step.checkpoint is not None)
    reference = next(
        (reference for reference in named if reference.policy_version == version), None
    )
    if reference is not None:
        with Checkpoints(store, ranks=ranks, keep=1) as checkpoints:
            try:
                return InitialState("checkpoint", checkpoints.load(reference).state)
            except ObjectError as error:
                log.info("checkpoint.deleted", policy_version=version, error=str(error))
    published = [
        event
        for event in source.events("control.policy-versions")
        if isinstance(event, PolicyVersionPublished)
    ]
    transport = StoreReader(store)
    for event in published:
        if event.policy_version == version:
            try:
                tensors = {
                    f"model.{name}": tensor
                    for name, tensor in transport.fetch(event).tensors.items()
                }
            except WeightsError as error:
                raise _not_left(source, version) from error
            return InitialState("weights", TrainerState(policy_version=version, tensors=tensors))
    raise _not_left(source, version)


def _not_left(source: ParentRun, version: int) -> ConfigError:
    run_id = source.config.run.id
    left = f"relax runs show {run_id} lists the versions that are left under `starts`"
    return ConfigError(
        f"run {run_id} has neither a checkpoint nor weights of version {version} any more; "
        f"{left}, and version 0 always is"
    )
