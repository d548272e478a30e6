"""External values that a replay or fork would inherit from the log: code, programs, addresses,
files, variables. They are inert data until the caller agrees.

The description on a log comes from any process that may write there, and an imported one from the
author of the files. So a value is inherited only where the caller's own run file or an argument
sets it, or where the user has seen the list and accepted it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from relax_events.config import RewardConfig, RunConfig, load_run_config
from relax_events.config.external_values import Named, names_in
from relax_events.config.loading import ENVIRONMENT_PREFIX
from relax_events.errors import ConfigError
from relax_events.runtime.run_description import build_run_description

NOT_INHERITED: tuple[str, ...] = ("broker.", "parent.", "run.id")
"""Keys that the new run file sets."""
UNUSED_BY_REPLAY = (
    "data.",
    "engine.",
    "environment.",
    "reward.",
    "judge.",
    "teacher.",
    "teachers.",
)
"""Keys that a replay does not use: it trains recorded and scored rollouts."""
MAX_SHOWN = 1000


class UntrustedSettingsError(ConfigError):
    """The log of a run names external values that the caller has not accepted."""

    def __init__(self, source: str, named: Sequence[Named]) -> None:
        self.source, self.named = source, named
        begin = (
            f"the log of run {source} names what would be used here, and no run file of yours "
            "says the same"
        )
        remedy = (
            "give --config with a run file that does, set these keys by arguments, or give "
            "--trust-source to inherit them as they are"
        )
        super().__init__(f"{begin}; {remedy}\n{format_values(named)}")


Accept = Callable[[UntrustedSettingsError], None]


def require_trust(
    source: RunConfig,
    *,
    is_replay: bool,
    run_files: Iterable[RunConfig],
    directory: Path,
    overrides: Sequence[str],
    accept: Accept,
) -> None:
    """Return if everything external in the parent's description is known here, or is accepted.

    Args:
        source: As the log describes it.
        is_replay: Whether nothing is to be generated.
        run_files: The caller's run files.
        directory: Where the new run keeps its files.
        overrides: section.key=value, applied over the parent's settings; the environment is below.
        accept: Is given the rest, and raises it if the caller does not agree.
    Raises:
        UntrustedSettingsError: Something is not known, and `accept` has raised it.
    """
    keys_set = [
        *(override.partition("=")[0].strip() for override in overrides),
        *_keys_of_environment(),
    ]
    trusted = {
        _mark(named)
        for config in run_files
        for named in external_values(config, is_replay=config.is_replay)
    }
    trusted.add(("run.directory", str(directory.resolve())))
    evaluates = any(
        key.startswith(("evaluation", "model.path", "model.tiny")) for key in keys_set
    )  # then more may be used than by the parent
    used = external_values(source, is_replay=is_replay and not evaluates)
    if left := [
        named for named in used if _mark(named) not in trusted and not _is_set(named.key, keys_set)
    ]:
        accept(UntrustedSettingsError(source.run.id, left))


def require_trusted_reward(
    source: RunConfig, *, run_files: Iterable[RunConfig], accept: Accept
) -> RewardConfig:
    """Return the reward section of a run as its log describes it, if everything external in it is
    known here, or is accepted.

    Raises:
        UntrustedSettingsError: Something is not known, and `accept` has raised it.
    """
    trusted = {_mark(named) for config in run_files for named in _named_by_reward(config)}
    if left := [named for named in _named_by_reward(source) if _mark(named) not in trusted]:
        accept(UntrustedSettingsError(source.run.id, left))
    return source.reward


def _named_by_reward(config: RunConfig) -> list[Named]:
    return [
        named
        for named in external_values(config, is_replay=False)
        if named.key.startswith("reward.")
    ]


def external_values(config: RunConfig, *, is_replay: bool) -> list[Named]:
    """Return the external values of a run file or description.

    Args:
        config: The run.
        is_replay: Whether it trains recorded rollouts only: then fewer are used.
    """
    tree: Mapping[str, Any] = orjson.loads(build_run_description(config).config)
    unused = NOT_INHERITED
    if is_replay and not _generates(config):
        unused += UNUSED_BY_REPLAY
    if config.objects.uri:
        unused += ("run.directory",)
    return [named for named in names_in(tree, RunConfig) if not named.key.startswith(unused)]


def _generates(config: RunConfig) -> bool:
    """Return whether a replay generates after all: for evaluations, or for the SFT warm-up of a
    model that is to be made.
    """
    return bool(config.evaluation.datasets) or (
        config.model.tiny is not None and not config.model.path.exists()
    )


def read_own_run_files(
    directory: Path, *run_ids: str, named: RunConfig | None
) -> Iterator[RunConfig]:
    """Yield the caller's run files: the one that was named, and those with which these runs were
    started from this directory.
    """
    if named is not None:
        yield named
    for run_id in filter(None, run_ids):
        for name in ("run.json", "run-file.json"):
            with suppress(ConfigError):  # missing, or of another release
                yield load_run_config(directory / "runs" / run_id / name, environment={})


def format_values(named: Iterable[Named]) -> str:
    """Return a line for each value, with its use."""
    return "\n".join(
        f"  {_key_shown(one.key)} = {_shown(one.value)}  ({one.what.value})" for one in named
    )


def _key_shown(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]+", key) else _shown(key)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return (
        text
        if len(text) <= MAX_SHOWN
        else f"{text[:MAX_SHOWN]}... and {len(text) - MAX_SHOWN} characters more"
    )


def _mark(named: Named) -> tuple[str, str]:
    return named.key, named.value if isinstance(named.value, str) else orjson.dumps(
        named.value
    ).decode()


def _keys_of_environment() -> Iterator[str]:
    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            yield name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")


def _is_set(key: str, keys: Iterable[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)
