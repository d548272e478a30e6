"""Opens the engines of roles that generate: plain, or with the run's environment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import Engine
from relax_events.engines.sglang.memory import with_memory_saver
from relax_events.media.library import MediaLibrary
from relax_events.objects.version_objects import build_version_folder
from relax_events.plugins import DRIVERS, ENGINES, find_plugin
from relax_events.roles.engine_turns import OffloadingEngine
from relax_events.telemetry.component_metrics import ReplicaMetrics
from relax_events.telemetry.metrics import WorkerMetrics

if TYPE_CHECKING:
    from relax_events.episodes.engine import Driver

OpenEngine = Callable[[RunConfig], Engine]


@runtime_checkable
class RoutingMetricsReceiver(Protocol):
    """An engine that distributes requests over replicas and counts them."""

    def set_metrics(self, metrics: ReplicaMetrics) -> None:
        """Report to these metrics from now on."""


def open_engine(config: RunConfig, *, name: str, metrics: ReplicaMetrics) -> Engine:
    """Load an engine with the settings of the section `engine`; it reports to the worker's
    metrics.

    Raises:
        ConfigError: No engine of that name is installed.
    """
    plugin = find_plugin(ENGINES, name, what=f"engine.name = {name!r}")
    section = config.engine
    if config.devices.time_share and name == "sglang":
        section = with_memory_saver(section)
    engine: Engine = plugin.load()(config.model.path, config=section, model=config.model)
    if isinstance(engine, RoutingMetricsReceiver):
        engine.set_metrics(metrics)
    if config.devices.time_share and isinstance(engine, OffloadingEngine):
        engine.offload_to(config.devices_directory)
    return engine


def bound_engine_rows(config: RunConfig) -> RunConfig:
    """Return the configuration of a rollout worker's engine, with the rows that it needs."""
    update = {"max_running_samples": config.num_rollout_rows}
    return config.model_copy(update={"engine": config.engine.model_copy(update=update)})


def open_rollout_engine(
    config: RunConfig,
    *,
    name: str,
    metrics: WorkerMetrics,
    newest_version: Callable[[], int] | None = None,
    index: int = 0,
    opens: OpenEngine | None = None,
) -> Engine:
    """Load the engine that generates samples, with the run's environment if it has one.

    Args:
        config: The run.
        name: Name of the engine.
        metrics: Receive the counts of the engine and of episodes.
        newest_version: Returns the newest policy version; the environment's media are stored with
            its objects.
        index: The worker's, which is added to the port for harnesses.
        opens: Opens the engine of the turns; by default `open_engine`.
    Raises:
        ConfigError: As `open_engine`, or the environment can't be loaded.
    """
    opens = opens or partial(open_engine, name=name, metrics=metrics.routing)
    if not config.environment.name:
        return opens(config)
    from relax_events.episodes.engine import EpisodeEngine  # imports torch, as local engines do

    folder = (
        (lambda: build_version_folder(max(newest_version(), 0))) if newest_version else lambda: ""
    )
    libraries = partial(MediaLibrary, config, folder=folder)
    has_programs = config.environment.has_programs
    with ExitStack() as on_failure:
        if not has_programs:  # a wrong environment is refused before the model is loaded
            driver = _open_environment(config, libraries=libraries)
            on_failure.callback(driver.close)
        renderer = PromptRenderer.from_folder(
            config.model.path,
            config.data,
            media=config.model.media,
            tool_format=config.environment.tool_call_format,
        )
        engine = opens(config)
        on_failure.callback(engine.close)
        if has_programs:
            driver = _open_gateway(config, libraries=libraries, index=index)
        on_failure.pop_all()
    return EpisodeEngine(engine, driver, config=config, renderer=renderer, metrics=metrics.episodes)


def _open_environment(config: RunConfig, *, libraries: Callable[[], MediaLibrary]) -> Driver:
    """Start the environment of the run, and return what drives samples by it."""
    from relax_events.environments.pool import EnvironmentPool
    from relax_events.environments.session_pool import SessionPool
    from relax_events.episodes.environment_drivers import FunctionDriver, StatefulDriver

    if not config.environment.holds_sessions:
        return FunctionDriver(EnvironmentPool(config, libraries=libraries))
    pool = SessionPool(config, libraries=libraries)
    return StatefulDriver(pool, may_reward=config.environment.interface != "mcp")


def _open_gateway(
    config: RunConfig, *, libraries: Callable[[], MediaLibrary], index: int
) -> Driver:
    """Start the gateway of the run's programs, and return what drives samples by them."""
    plugin = find_plugin(DRIVERS, "program", what="the gateway for programs and harnesses")
    driver: Driver = plugin.load()(config, libraries=libraries, index=index)
    return driver
