"""What there is to say about a reward, for people.

The reward hub: from a name, or a file of the user's, to a function with its settings and its
    version.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pydantic import ConfigDict, ValidationError, create_model

from relax_events.errors import ConfigError
from relax_events.plugins import FUNCTION, REWARDS, find_plugin, list_installed
from relax_events.rewards.code_version import reward_digest, source_files
from relax_events.rewards.declaration import read_info


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """A reward in words; `scores` says what one call is about, `failures` when a sample gets no
    reward.
    """

    name: str
    scores: str
    summary: str
    text: str
    failures: list[str]
    metadata: Mapping[str, str]
    options: list[RewardOption]
    source: str
    packages: tuple[str, ...]


def describe_reward(name: str) -> RewardDescription:
    """Describe a reward of the hub, or of a file, without making it ready to be called.

    Raises:
        ConfigError: There is no such reward, or its file fails to load.
    """
    function, _ = find_function(name)
    facts, (text, _, raised) = (
        read_info(function),
        (inspect.getdoc(function) or "").partition("\n\nRaises:\n"),
    )
    return RewardDescription(
        name=name,
        scores="prompt groups" if takes_prompt_group(function) else "samples",
        summary=text.partition("\n")[0],
        text=text,
        failures=[line.partition(": ")[2] for line in raised.splitlines()],
        metadata=dict(facts.metadata),
        options=options_of(function),
        source=facts.source,
        packages=facts.packages,
    )


PROMPT_GROUP_PARAMETER = "completions"
REQUIRED_ARGUMENTS = ("answer", "metadata", "prompt")
OPTIONAL_ARGUMENTS = ("turns", "token_ids")
"""Given to functions that have a parameter of that name."""


class RewardFunction(Protocol):
    """Scores one completion: a number, or named components of which `reward` is the total (without
    it, their sum is).

    A function whose first parameter is called `completions` gets those of a whole prompt group, and
    returns a list with an element for each; an element may be a `RewardError`. Either may be `async
    def`. With a parameter `turns` it is given the answers of the sample and what was said to them,
    as `role` and `content`, ending with the last answer; with `token_ids` the ids of the tokens
    that the policy chose. Of a prompt group these are lists of them. Further keyword arguments are
    its options.

    Beside its components it may return `turn_rewards`, a list with a number for each answer, and
    `token_rewards`, one for each token that the
    policy chose: they come on top of the total, and algorithms with an advantage for each token
        know where they were earned.
    """

    def __call__(
        self, completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
    ) -> float | dict[str, float | list[float]]:
        """Score a completion.

        Args:
            completion: What the model wrote, without special tokens.
            answer: The reference answer of the prompt.
            metadata: What the prompt's source gave with it.
            prompt: Text of the prompt.
        """


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its options filled in, how it wants to be called, and its version."""

    name: str
    function: Callable[..., Any]
    digest: str = ""
    takes_prompt_group: bool = False
    is_async: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    optional_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardOption:
    """An option of a reward function."""

    name: str
    kind: str
    default: Any
    is_required: bool


def reward_names() -> list[str]:
    """Return the names of all installed rewards."""
    return sorted(list_installed(REWARDS))


def load_reward(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    weights: Mapping[str, float] | None = None,
) -> LoadedReward:
    """Load a reward function of the hub, or of a file given as `path/to/file.py:function`, and make
    it ready to be called.

    This runs the file's code: outside of tests only a reward child does it.

    Args:
        name: As in `reward.function`.
        options: As in `reward.options`.
        weights: As in `reward.weights`; they are part of the version.
    Raises:
        ConfigError: There is no such name, file or function, the file fails to load, or an option
            does not fit; the text says where.
        EnvironmentProblem: The function needs a package that is not installed, or something else
            that this machine lacks.
    """
    function, module = find_function(name)
    facts = read_info(function)
    checked = check_options(function, name, options or {})
    if facts.require is not None:
        facts.require(checked)
    if facts.prepare is not None:
        facts.prepare()
    digest = reward_digest(
        module, function.__name__, options=checked, weights=weights or {}, packages=facts.packages
    )
    bound = partial(function, **checked) if checked else function
    files = tuple(source_files(module).values())
    on_demand = tuple(
        given for given in OPTIONAL_ARGUMENTS if given in inspect.signature(function).parameters
    )
    return LoadedReward(
        name,
        bound,
        digest,
        takes_prompt_group(function),
        inspect.iscoroutinefunction(function),
        weights or {},
        files,
        on_demand,
    )


def find_function(name: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return a reward function, without its options and not made ready, and the module that holds
    it.

    Raises:
        ConfigError: There is no such name, file or function, or the file fails to load.
    """
    function = find_plugin(
        REWARDS, name, what=f"reward.function = {name!r}", accepts=FUNCTION
    ).load()
    if not inspect.isfunction(function):
        raise ConfigError(
            f"reward.function = {name!r} is a {type(function).__name__}; it must be a "
            "function, defined by def or async def"
        )
    return function, sys.modules[function.__module__]


def takes_prompt_group(function: Callable[..., Any]) -> bool:
    """Tell whether a function wants the completions of a whole prompt group."""
    return next(iter(inspect.signature(function).parameters), "") == PROMPT_GROUP_PARAMETER


def options_of(function: Callable[..., Any]) -> list[RewardOption]:
    """Return the options that a function takes: its keyword arguments besides those that every
    reward function gets.
    """
    return [
        RewardOption(
            name,
            inspect.formatannotation(hint),
            None if default is ... else default,
            default is ...,
        )
        for name, (hint, default) in _option_fields(function).items()
    ]


def check_options(
    function: Callable[..., Any], name: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options as the function's annotations want them, without those that were not
    given.

    Raises:
        ConfigError: The function does not take what every reward function gets, an option is
            unknown, missing or of another type.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any and (
        missing := [given for given in REQUIRED_ARGUMENTS if given not in inspect.signature(function).parameters]
    ):
        text = f"{name} does not take {', '.join(missing)}"
        raise ConfigError(
            f"{text}; define it as (completion, *, answer, metadata, prompt), or with "
            "completions for whole prompt groups"
        )
    settings = ConfigDict(
        extra="allow" if takes_any else "forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    model = create_model(
        "Options", __config__=settings, **typing.cast("dict[str, Any]", _option_fields(function))
    )
    try:
        checked: dict[str, Any] = model.model_validate(dict(options)).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        known = ", ".join(option.name for option in options_of(function)) or "none"
        raise ConfigError(
            f"reward.options.{place}: {first['msg']}, got {first['input']!r:.60}; {name} "
            f"takes {known}; set reward.options"
        ) from None
    return checked


def _option_fields(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # Names that only a type checker imports: then anything goes.
        hints = {}
    return {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in list(inspect.signature(function).parameters.values())[1:]
        if parameter.name not in (*REQUIRED_ARGUMENTS, *OPTIONAL_ARGUMENTS)
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
