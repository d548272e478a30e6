"""Finds, describes and loads reward functions, by installed name or by file. The decorator
`@reward` attaches the description.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from pydantic import ConfigDict, StrictBool, ValidationError, create_model

from relax_events.errors import ConfigError
from relax_events.plugins import FUNCTION, REWARDS, find_plugin, list_installed, select_named
from relax_events.rewards.code_version import reward_digest, source_files

Function = TypeVar("Function", bound=Callable[..., Any])
INFO_ATTRIBUTE = "reward_facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer that a reward function extracted, its location, and why it is right or wrong."""

    answer: str | None
    location: str
    why: str


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """Source, requirements and preparation of a reward function."""

    source: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    prepare: Callable[[], object] | None = None
    require: Callable[[Mapping[str, Any]], object] | None = None
    explain: Callable[..., Explanation] | None = None


def reward(
    *,
    source: str = "",
    metadata: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = (),
    prepare: Callable[[], object] | None = None,
    require: Callable[[Mapping[str, Any]], object] | None = None,
    explain: Callable[..., Explanation] | None = None,
) -> Callable[[Function], Function]:
    """Attach information to a reward function; it is optional.

    Args:
        source: The paper or program whose rules it follows.
        metadata: Keys of the sample's metadata that it reads, each with a description.
        packages: Distributions whose versions are part of the reward's version.
        prepare: Called once before the first call, outside of its time limit, for slow imports.
        require: Called with the options before `prepare`; raises EnvironmentProblem if this machine
            lacks a requirement.
        explain: Called with the function's arguments; explains the reward for `relax rewards`.
    """
    facts = RewardInfo(source, metadata or {}, packages, prepare, require, explain)

    def attach(function: Function) -> Function:
        setattr(function, INFO_ATTRIBUTE, facts)
        return function

    return attach


def read_info(function: Callable[..., Any]) -> RewardInfo:
    """Return a function's information, or the defaults."""
    info = getattr(function, INFO_ATTRIBUTE, None)
    return info if isinstance(info, RewardInfo) else RewardInfo()


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """Description of a reward; `scores` is what one call scores, `failures` are the cases without a
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
    """Describe an installed reward, or one of a file, without preparing it for calls.

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
        failures=_read_failures(raised),
        metadata=dict(facts.metadata),
        options=list_options(function),
        source=facts.source,
        packages=facts.packages,
    )


def _read_failures(section: str) -> list[str]:
    """Return what each entry of a docstring's section says; its further lines are indented."""
    entries = re.split(r"\n(?= {4}\S)", section.partition("\n\n")[0])
    texts = [" ".join(entry.split()).partition(": ")[2] for entry in entries]
    return [text for text in texts if text]


PROMPT_GROUP_PARAMETER = "completions"
CALL_ARGUMENTS = ("answer", "metadata", "prompt")
OPTIONAL_ARGUMENTS = ("turns", "token_ids", "environment_rewards")
"""Passed to functions that have a parameter of that name."""
CALL_TEXT = (
    "Each call gives the completion and, as far as the function names them, "
    f"{', '.join((*CALL_ARGUMENTS, *OPTIONAL_ARGUMENTS))}"
)


class RewardFunction(Protocol):
    """Scores one completion: a number, or named components whose total is `reward`, else their sum.

    A function whose first parameter is `completions` gets the completions of a whole prompt group,
    and returns a list with one element for each; an element may be a `RewardError`. Both may be
    `async def`. A parameter `turns` gets the sample's messages from the first completion to the
    last, as `role` and `content`; `token_ids` gets the ids of the sampled tokens;
    `environment_rewards` gets the rewards that a stateful environment gave to each turn. For a
    prompt group each is a list with an element for each completion. A function may leave out the
    parameters that it does not read: `(completion)` is enough. Further keyword arguments are
    options.

    A function with a parameter `completions` and a `**` parameter is called by TRL's convention:
    with `prompts`, `completions`, `completion_ids` and each column of the row by its name, all as
    lists with an element for each completion; `answer` is the reference answer. None in the list
    that it returns gives the sample no reward, and the sample is not trained.

    It may also return `turn_rewards`, a number for each completion, and `token_rewards`, one for
    each sampled token. They are added to the total; algorithms with token-level advantages use
    their positions.
    """

    def __call__(
        self, completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
    ) -> float | dict[str, float | list[float]]:
        """Score a completion.

        Args:
            completion: Text of the completion, without special tokens.
            answer: The reference answer of the prompt.
            metadata: Metadata of the prompt.
            prompt: Text of the prompt.
        """


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with bound options, its call signature, and its version."""

    name: str
    function: Callable[..., Any]
    digest: str = ""
    takes_prompt_group: bool = False
    is_async: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    optional_arguments: tuple[str, ...] = ()
    named_arguments: tuple[str, ...] = CALL_ARGUMENTS


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
    """Load an installed reward function, or one of a file given as `path/to/file.py:function`, and
    prepare it for calls.

    This runs the file's code: outside of tests only a reward child calls it.

    Args:
        name: As in `reward.function`.
        options: As in `reward.options`.
        weights: As in `reward.weights`; they are part of the version.
    Raises:
        ConfigError: There is no such name, file or function, the file fails to load, or an option
            does not fit; the text says where.
        EnvironmentProblem: A package or another requirement of the function is missing.
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
    by_columns = takes_columns(function)
    if by_columns:
        _refuse_arguments_of_other_calls(function, name)
    called = pass_columns(function) if by_columns else function
    bound = partial(called, **checked) if checked else called
    files = tuple(source_files(module).values())
    optional_arguments = tuple(
        argument
        for argument in OPTIONAL_ARGUMENTS
        if argument in inspect.signature(function).parameters
        or (by_columns and argument == OPTIONAL_ARGUMENTS[1])
    )
    return LoadedReward(
        name,
        bound,
        digest,
        takes_prompt_group(function),
        inspect.iscoroutinefunction(function),
        weights or {},
        files,
        optional_arguments,
        select_named(function, CALL_ARGUMENTS),
    )


def find_function(name: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return a reward function without bound options, not prepared, and its module.

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
    """Return whether a function takes the completions of a whole prompt group."""
    first = next(iter(inspect.signature(function).parameters), "")
    return first == PROMPT_GROUP_PARAMETER or takes_columns(function)


def takes_columns(function: Callable[..., Any]) -> bool:
    """Return whether a function is called by TRL's convention; see `RewardFunction`."""
    parameters = inspect.signature(function).parameters
    return PROMPT_GROUP_PARAMETER in parameters and any(
        one.kind is one.VAR_KEYWORD for one in parameters.values()
    )


def pass_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a prompt group as all others do, and calls one of TRL's
    convention.
    """

    @wraps(function)
    def call(
        completions: list[str],
        *,
        answer: str,
        metadata: Mapping[str, Any],
        prompt: str,
        token_ids: list[list[int]],
        **options: Any,
    ) -> Any:
        columns = {"answer": answer, **metadata, "prompts": prompt}
        lists = {name: [value] * len(completions) for name, value in columns.items()}
        lists |= {PROMPT_GROUP_PARAMETER: completions, "completion_ids": token_ids}
        return function(**lists | options)

    return call


def _refuse_arguments_of_other_calls(function: Callable[..., Any], name: str) -> None:
    """Refuse a function of TRL's convention that requires an argument of our other calls.

    Raises:
        ConfigError: It does so; each call would fail.
    """
    others = {*CALL_ARGUMENTS[1:], *OPTIONAL_ARGUMENTS}
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name in others:
            raise ConfigError(
                f"{name} has a ** parameter, so it is called by TRL's convention, which has no "
                f"{one.name}; remove the ** parameter, or {one.name} and read the row's columns by "
                f"their names. Where {one.name} is a column, put it in front of the *"
            )


def list_options(function: Callable[..., Any]) -> list[RewardOption]:
    """Return the options of a function: its keyword arguments except the arguments that every
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
    """Convert the given options to the types of the function's annotations.

    Raises:
        ConfigError: An option is unknown, missing or of a wrong type.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    settings = ConfigDict(
        extra="allow" if takes_any else "forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )
    fields: dict[str, Any] = {
        option: (_exact(hint), default)
        for option, (hint, default) in _option_fields(function).items()
    }
    model = create_model("Options", __config__=settings, **fields)
    try:
        checked: dict[str, Any] = model.model_validate(dict(options)).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        option_path = ".".join(str(part) for part in first["loc"])
        option_names = ", ".join(option.name for option in list_options(function)) or "none"
        if first["type"] == "missing":
            raise ConfigError(
                f"{name} needs {option_path}, which no call gives and reward.options does not "
                f"set; the completion is the first parameter, of any name. Where {option_path} "
                f"is a column of the rows, read metadata[{option_path!r}], or set "
                f"data.answer_key = {option_path!r} and call the parameter answer. {CALL_TEXT}"
            ) from None
        raise ConfigError(
            f"reward.options.{option_path}: {first['msg']}, got {first['input']!r:.60}; {name} "
            f"takes {option_names}; set reward.options. {CALL_TEXT}"
        ) from None
    return checked


def _option_fields(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # Names imported for type checkers only: any type is accepted.
        hints = {}
    parameters = list(inspect.signature(function).parameters.values())
    by_columns = takes_columns(function)
    return {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in (parameters if by_columns else parameters[1:])
        if not (by_columns and parameter.default is parameter.empty)
        and parameter.name not in (*CALL_ARGUMENTS, *OPTIONAL_ARGUMENTS)
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def _exact(hint: Any) -> Any:
    """Return a hint that takes no other value for true or false: `"yes"` or 1 may be a mistake, and
    a protection depends on some options.
    """
    return StrictBool if hint is bool else hint
