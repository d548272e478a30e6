"""Loads the weights that training starts from: the parent's checkpoint of a version for a replay or
fork, or its published weights of that version.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from relax_events.errors import ConfigError, ObjectError, WeightsError
from relax_events.events.parts import CheckpointRef
from relax_events.events.types import PolicyVersionPublished
from relax_events.models.adapters import encode_base_digest
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.runtime.run_description import ParentRun
from relax_events.runtime.worker import Worker
from relax_events.topics.names import POLICY_VERSIONS
from relax_events.training.backend.master_weights import reconcile
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.backend.state import OverlaidState, StateSource, TrainerState
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import Ranks
from relax_events.weights.artifact_reader import is_stored
from relax_events.weights.transport import StoreReader


@dataclass(frozen=True, slots=True)
class InitialState:
    """Weights to start from; `kind` is `checkpoint` (with the optimizer) or `weights`."""

    kind: str
    state: StateSource


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
        for event in source.events(POLICY_VERSIONS)
        if isinstance(event, PolicyVersionPublished)
    ]
    transport = StoreReader(store)
    for event in published:
        if event.policy_version == version:
            try:
                weights = transport.fetch(event)
            except WeightsError as error:
                raise _not_left(source, version) from error
            tensors = {f"model.{name}": tensor for name, tensor in weights.tensors.items()}
            tensors |= encode_base_digest(weights.base_digest)
            return InitialState("weights", TrainerState(policy_version=version, tensors=tensors))
    raise _not_left(source, version)


def _not_left(source: ParentRun, version: int) -> ConfigError:
    run_id = source.config.run.id
    left = f"relax runs show {run_id} lists the versions that are left under `starts`"
    return ConfigError(
        f"run {run_id} has neither a checkpoint nor weights of version {version} any more; "
        f"{left}, and version 0 always is"
    )


log = structlog.get_logger()


def is_newest_lost(published: PolicyVersionPublished, *, store: ObjectStore, ranks: Ranks) -> bool:
    """Tell all ranks whether objects of the newest version are missing in the store.
    Collective.
    """
    is_lost = ranks.rank == 0 and not is_stored(store, published.artifact)
    return bool(ranks.broadcast(b"lost" * is_lost if ranks.rank == 0 else None))


def load_parent_weights(
    source: ParentRun,
    worker: Worker,
    backend: TrainerBackend,
    *,
    ranks: Ranks,
    checkpoints: Checkpoints,
) -> CheckpointRef | None:
    """Load the parent run's weights, and write them as a checkpoint of our own, so that the parent
    may delete them. Return the checkpoint; None where the model's own weights are the start.
    """
    version = worker.config.first_version
    start = read_initial_state(source, version, ranks=ranks)
    if start is None:
        return None
    _require_same_adapters(source, worker)
    backend.load_state(OverlaidState(version, backend.state(), start.state))
    with worker.lifecycle.transfer("write the first checkpoint"):
        pending = checkpoints.save(backend.state(), extra={"consumed": [], "id_window": []})
        checkpoint = pending.wait(worker.config.health.start_seconds)
    log.info(
        "parent.loaded",
        parent_run=source.config.run.id,
        policy_version=version,
        kind=start.kind,
    )
    return checkpoint


def _require_same_adapters(source: ParentRun, worker: Worker) -> None:
    """Require that this run trains what the parent run does.

    Raises:
        ConfigError: One trains adapters and the other the whole model, or other adapters.
    """
    theirs, mine = source.config.model.lora, worker.config.model.lora
    if theirs != mine:
        parent = worker.config.parent
        raise ConfigError(
            f"model.lora must be as in run {parent.run} to start from its version "
            f"{parent.from_version}: it has {theirs or 'none'}, this run has {mine or 'none'}; "
            "start from version 0, or export that version with `relax models export` and give the "
            "folder as model.path of a new run"
        )


def load_published_weights(
    history: TrainingHistory, backend: TrainerBackend, *, run_id: str, store: ObjectStore
) -> None:
    """Load the newest published weights, to which replayed steps only come near where kernels are
    not deterministic.

    Raises:
        WeightsError: They can't be read; the text names the remedy.
    """
    try:
        published = StoreReader(store).fetch(history.published[-1])
    except WeightsError as error:
        older = max(history.published[-1].policy_version - 1, 0)
        raise WeightsError(
            f"{error}; replay ended near this version, so the trainer needs its weights: restore "
            f"its objects, or continue as another run: relax runs fork {run_id} NEW --at-version "
            f"{older}"
        ) from error
    state, reconciliation = reconcile(backend.state(), published.tensors)
    backend.load_state(state)
    log.warning(
        "replay.diverged",
        policy_version=state.policy_version,
        num_weights=reconciliation.num_weights,
        num_moved=reconciliation.num_moved,
        largest_move=reconciliation.largest_move,
    )
