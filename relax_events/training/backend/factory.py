"""Finds and opens the trainer backend of a run."""

from __future__ import annotations

from relax_events.config import RunConfig, TrainerConfig
from relax_events.errors import ConfigError
from relax_events.plugins import TRAINER_BACKENDS, find_plugin
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.ranks import Ranks


def find_backend(trainer: TrainerConfig) -> type[TrainerBackend]:
    """Return the class of the trainer backend.

    Raises:
        ConfigError: None of that name is installed.
    """
    name = trainer.backend
    backend: type[TrainerBackend] = find_plugin(
        TRAINER_BACKENDS, name, what=f"trainer.backend = {name!r}"
    ).load()
    return backend


def open_backend(config: RunConfig, ranks: Ranks) -> TrainerBackend:
    """Load the backend for training.

    Raises:
        ConfigError: As `find_backend`; or the model can't be loaded or trained, or the engine's
            routing not be replayed where it is to.
    """
    make: type = find_backend(config.trainer)
    backend: TrainerBackend = make(config, ranks=ranks)
    if config.model.replays_routing and backend.experts is None:
        raise ConfigError(
            "model.routing_replay = 'rollout' needs a backend that replays the routing from the "
            f"samples, and trainer.backend = {config.trainer.backend!r} does not; leave it out"
        )
    return backend
