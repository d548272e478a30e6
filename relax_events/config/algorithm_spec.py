"""What an algorithm is: one declarative spec, found by its installed name or in a file. Neither
torch nor numpy is loaded for it.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import Any, Literal

from pydantic import ValidationInfo

from relax_events.config.base import get_tables
from relax_events.errors import ConfigError
from relax_events.plugins import ALGORITHMS, FilePlugin, find_plugin

LearnsFrom = Literal["rewards", "answers", "pairs"]
Function = str | Callable[..., Any]
"""A function, or `module:function` of one whose module is loaded only where it is called."""


@dataclass(frozen=True, slots=True)
class FromLog:
    """The context in which a description from a log is validated: others wrote it, so none of the
    code that it names is run.

    Attributes:
        own_algorithm: Name of the algorithm in a run file of one's own, which may be run.
    """

    own_algorithm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm by its parts.

    Attributes:
        name: Name in a run file.
        summary: What it is, in a sentence.
        formula: Advantage and loss, as text; lp is the trained policy's log-probability of a token,
            lo the old policy's.
        source: The paper, with the equations that are meant, and where this differs from it.
        advantage: Takes the GroupRewards of a prompt group, gives one advantage for each sample.
            Needs no torch. Where the settings name `gae_lambda` the critic role is needed: then it
            takes the GroupValues, and gives one for each token.
        policy_loss: Takes the LossTokens of a micro-batch, gives a loss for each token: a
            `PolicyLossOutput`, or the losses alone.
        advantage_settings: Names of the settings that `advantage` takes as keywords.
        loss_settings: Names of the settings that `policy_loss` takes as keywords.
        settings: Its own defaults. A setting that only some algorithms have is used if it stands
            here.
        options: Names and defaults of settings that no other algorithm has; a run file gives them
            in `[algorithm.options]`.
        excluded: Settings that every algorithm has but this one, each with the reason.
        reward_kl: Where the KL estimate goes that a reward is lessened by: into the sample's one
            reward, or token by token, each token answering for those that follow it.
        by_token: Whether `advantage` takes GroupValues and gives one for each token without a
            critic; its values are zeros then.
        components: Whether rewards must come in components.
        learns_from: `rewards` of samples that the policy generates; or what the data bring: one of
            the `answers` for each prompt, or `pairs` of a chosen and a rejected one. With those
            nothing is generated and nothing is rewarded.
        reference: Whether the loss takes the reference model's log-probabilities, whatever the KL
            coefficient is.
        whole_prompt_groups: Whether the loss takes the samples of a prompt group together: they
            come side by side, by index.
        one_update: Why a train step may only be one optimizer step (`trainer.num_epochs`,
            `trainer.num_mini_batches`); empty where it may be several.
        metrics: Names of the metrics that the loss reports for a step: the keys of
            `PolicyLossOutput.metrics`.
        notes: Differences from the papers, and pitfalls.
    """

    name: str
    summary: str
    formula: str
    source: str
    advantage: Function
    policy_loss: Function
    advantage_settings: tuple[str, ...] = ()
    loss_settings: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    reward_kl: Literal["sequence", "token"] = "sequence"
    by_token: bool = False
    components: bool = False
    learns_from: LearnsFrom = "rewards"
    reference: bool = False
    whole_prompt_groups: bool = False
    one_update: str = ""
    metrics: tuple[str, ...] = ()
    notes: str = ""


def find_algorithm(name: str) -> AlgorithmSpec:
    """Return an algorithm by its installed name, or as `path/to/file.py:NAME`.

    Raises:
        ConfigError: There is none of that name, the file fails to load, or what it holds is no
            AlgorithmSpec.
    """
    plugin = find_plugin(ALGORITHMS, name, what=f"algorithm.name = {name!r}", accepts=AlgorithmSpec)
    return _loaded(
        plugin,
        hashlib.sha256(plugin.path.read_bytes()).digest()
        if isinstance(plugin, FilePlugin)
        else b"",
    )


def is_path(name: str) -> bool:
    """Return whether an algorithm is named by its file."""
    return name.rpartition(":")[0].endswith(".py")


def is_from_log(name: str, info: ValidationInfo) -> bool:
    """Return whether only a log names an algorithm by its file, which is then not run; see
    `FromLog`.
    """
    return (
        isinstance(info.context, FromLog) and is_path(name) and name != info.context.own_algorithm
    )


@lru_cache(maxsize=64)
def _loaded(plugin: EntryPoint | FilePlugin, _: bytes) -> AlgorithmSpec:
    """Load once for each content of the file: a run's configuration is checked many times in a
    process.
    """
    spec = plugin.load()
    if not isinstance(spec, AlgorithmSpec):
        raise ConfigError(
            f"algorithm {plugin!r} must be an AlgorithmSpec, got {type(spec).__name__}; fix "
            "the package that offers it"
        )
    return spec


def resolve(function: Function) -> Callable[..., Any]:
    """Return a function of a spec, loading its module if need be."""
    if not isinstance(function, str):
        return function
    target: Callable[..., Any] = pkgutil.resolve_name(function)
    return target


GROUP_SIZES = {"answers": 1, "pairs": 2}
"""Samples of a prompt group, by what the algorithm learns from."""


def with_group_size(tree: Any, info: ValidationInfo) -> Any:
    """Fill in `run.samples_per_prompt` where the algorithm leaves no choice and the run file does
    not name it.
    """
    tables = get_tables(tree, "algorithm", "run")
    if not tables or "samples_per_prompt" in tables[1]:
        return tree
    algorithm, run = tables
    name = str(algorithm.get("name", "grpo"))
    if is_from_log(name, info):
        return tree
    try:
        size = GROUP_SIZES.get(find_algorithm(name).learns_from)
    except ConfigError:  # reported by the section's own check
        return tree
    return tree if size is None else {**tree, "run": {**run, "samples_per_prompt": size}}
