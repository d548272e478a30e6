"""Reads a run file and lays environment and flags over it, with errors that name the key and the
remedy.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from relax_events.config.addresses import refuse_secret_values, secret_in
from relax_events.config.broker import SECRET_CLIENT_KEYS, secret_remedy
from relax_events.config.hub_names import CommitFinder, find_cached_commit, pin_names
from relax_events.config.run_config import RunConfig
from relax_events.config.wrong_files import explain_path, explain_tree
from relax_events.errors import ConfigError

ENVIRONMENT_PREFIX = "RELAX_"
MAX_DEPTH = 64
"""Of sections and lists within each other; a run file's are some six deep."""
MAX_TOLD = 20
"""Number of problems of a run file that are reported: to find the key that was meant takes some
milliseconds each."""
HOUSE_FORM = {
    "Input should be": "must be",
    "String should match pattern": "must match",
    "String should": "must",
    "greater than or equal to": ">=",
    "greater than": ">",
    "less than or equal to": "<=",
    "less than": "<",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    ", unable to interpret input": "",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "a string",
}


def load_run_config(
    path: Path,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    find_commit: CommitFinder = find_cached_commit,
) -> RunConfig:
    """Read a run file; `RELAX_SECTION__KEY` overrides it, and `section.key=value` overrides both.

    Args:
        path: A TOML file.
        overrides: `section.key=value`, the value in TOML syntax or a bare string.
        environment: Defaults to the process's own.
        find_commit: Returns the commit of a name on the hub; by default the one in this host's
            cache, and a name that is not there stays without.
    Raises:
        ConfigError: The file is missing, not TOML, or a key or value is not allowed; the text names
            the key.
    """
    return build_run_config(_read(path), path, overrides, environment, find_commit=find_commit)


def build_run_config(
    tree: dict[str, Any],
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    find_commit: CommitFinder = find_cached_commit,
) -> RunConfig:
    """Check the sections of a run file; arguments and errors as for `load_run_config`.

    Args:
        tree: The sections, which the overrides change.
        path: Where they come from, for errors.
        overrides: See `load_run_config`, as for the other arguments.
        environment: Likewise.
        find_commit: Likewise.
    """
    environment = os.environ if environment is None else environment
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            _set_override(
                tree,
                name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"),
                environment[name],
                name,
            )
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or "." not in key:
            raise ConfigError(
                f"override {shown(override)!r} is not of the form section.key=value; for "
                "example run.seed=1"
            )
        _set_override(tree, key.strip().split("."), value.strip(), override)
    _require_shallow(tree, path)
    _refuse_secrets(tree)
    refuse_secret_values(tree)
    try:
        unpinned = pin_names(tree, find_commit)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return RunConfig.model_validate(tree).with_unpinned_names(unpinned)
    except ValidationError as error:
        problems = error.errors()
        more = (
            [f"{path}: {len(problems) - MAX_TOLD} problems more"]
            if len(problems) > MAX_TOLD
            else []
        )
        raise ConfigError(
            "\n".join([*(_explain(item, path) for item in problems[:MAX_TOLD]), *more])
        ) from None


def _read(path: Path) -> dict[str, Any]:
    if wrong := explain_path(path):
        raise ConfigError(wrong)
    try:
        text = path.read_text()
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"run file {path} does not exist; give the path of a TOML file, for example "
            "configs/quickstart.toml, which `relax init` writes"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} can't be read: {error}") from None
    except (ValueError, RecursionError) as error:  # TOML's, JSON's, or a number without end
        raise ConfigError(
            f"run file {path} is not {path.suffix.lstrip('.').upper() or 'TOML'}: {error}"
        ) from None
    if isinstance(tree, dict | list) and (wrong := explain_tree(path, tree)):
        raise ConfigError(wrong)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"run file {path} must hold sections, got a {type(tree).__name__}; for example "
            "configs/quickstart.toml"
        )
    return tree


def _require_shallow(tree: Mapping[str, Any], path: Path | str) -> None:
    """Refuse a run file that nests too many sections: later steps recurse into each of them."""
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        inner = [
            list(value.values() if isinstance(value, dict) else value)
            for value in level
            if isinstance(value, dict | list)
        ]
        level = [value for values in inner for value in values]
    if level:
        raise ConfigError(
            f"{path}, an argument or a variable has sections and lists more than {MAX_DEPTH} "
            "deep; write the key of one section"
        )


def _refuse_secrets(tree: Mapping[str, Any]) -> None:
    """Refuse a secret among the client's settings, also one whose dots made tables of it, before
    anything shows its value.
    """
    broker = tree.get("broker")
    for key in _dotted(broker.get("client") if isinstance(broker, dict) else None):
        if key in SECRET_CLIENT_KEYS:
            raise ConfigError(
                f"broker.client: {key} is a secret and must not be in a run file, an argument or a "
                f"log; {secret_remedy(key)}"
            )


def _dotted(table: Any) -> Iterator[str]:
    if isinstance(table, dict):
        for name, value in table.items():
            yield name
            yield from (f"{name}.{rest}" for rest in _dotted(value))


def shown(text: str) -> str:
    """Return an argument as an error may show it: nothing of an argument that may hold a secret."""
    names_secret = any(
        word in text.lower() for word in ("password", "secret", "passphrase", "ssl.key")
    )
    return "(hidden: it names a secret)" if names_secret or secret_in(text) else text


def _set_override(tree: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{shown(origin)}: {key} is a value, not a section")
    tree[keys[-1]] = read_value(text)


def read_value(text: str) -> Any:
    """Return what a value on the command line or in the environment means: what it is in TOML, or
    else the text itself.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(item: Mapping[str, Any], path: Path | str) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key {key}; {_nearest(location)}"
    if item["type"] == "missing":
        return f"{path}: {key} is required"
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{path}: {key + ': ' if key else ''}{text}"
    value = "(hidden)" if location[:2] == ["broker", "client"] else repr(item["input"])
    return f"{path}: {key} {_rule(text)}, got {value}; set {key}"


def _rule(text: str) -> str:
    """Turn pydantic's sentence into the house form: `must be >= 0`."""
    for theirs, ours in HOUSE_FORM.items():
        text = text.replace(theirs, ours)
    return text


def _nearest(location: list[str]) -> str:
    keys = _known_keys(RunConfig)
    unknown_key = ".".join(location)
    close = difflib.get_close_matches(unknown_key, keys, n=1, cutoff=0.4)
    same_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == location[-1]]
    candidates = same_leaf or close
    return (
        f"did you mean {candidates[0]}?"
        if candidates
        else f"known sections are {', '.join(RunConfig.model_fields)}"
    )


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys
