"""Finds the files of a dataset of the Hugging Face hub: of a config and a split, by the dataset's
card or by the layout of its folders, as the library `datasets` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from relax_events.config.hub_names import HubName, parse_hub_name
from relax_events.errors import ConfigError

CARD_FILE = "README.md"
DATA_FILE = re.compile(r".*\.(parquet|jsonl|ndjson|json)(\.(gz|zst|bz2))?")
NOT_DATA = re.compile(r"(.*/)?(\..*|dataset_infos?\.json)")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
DEFAULT = "default"
CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps public datasets as Parquet."""
Splits = dict[str, list[str]]


def find_cached_files(source: str, split: str, *, key: str) -> list[Path] | None:
    """Return the files of a source that is named on the hub; None if this host's cache lacks one.

    Args:
        source: `hf:org/name@commit:config:split`.
        split: The split where the name has none.
        key: Of the source, for errors.
    Raises:
        ConfigError: The dataset has no such config or split, or in another format.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    name = parse_hub_name(source, "dataset")
    if not name.is_pinned:
        return None
    try:
        tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.revision)
    except CachedRepoTreeNotFoundError:
        return None
    paths = [file.path for file in tree]
    if CARD_FILE in paths and not (name.folder / CARD_FILE).is_file():
        return None
    chosen = choose_files(paths, read_card(name), name, split=split, key=key)
    files = [name.folder / path for path in chosen]
    return files if all(file.is_file() for file in files) else None


def locate_files(source: str, split: str, *, key: str) -> list[Path]:
    """Return the files of a source that is named on the hub, all in this host's cache.

    Raises:
        ConfigError: As `find_cached_files`, or they were not fetched; the text names the command.
    """
    if (files := find_cached_files(source, split, key=key)) is None:
        command = "relax models prepare RUN_FILE"
        remedy = (
            f"name it so in the run file, and fetch it: {command}"  # lists take no overrides
            if "[" in key
            else f"fetch it: {command} {key}={source}"
        )
        raise ConfigError(f"{key} {source} is not in this host's cache of the hub; {remedy}")
    return files


def read_card(name: HubName) -> Mapping[str, Any]:
    """Return the settings at the top of a dataset's card; empty without a card.

    Raises:
        ConfigError: They are not YAML.
    """
    from huggingface_hub.repocard import metadata_load

    path = name.folder / CARD_FILE
    try:
        card = metadata_load(path) if path.is_file() else None
    except Exception as error:  # the library passes on whatever its parser of YAML raises
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} can't be read: {problem}; name another revision") from None
    return card or {}


def choose_files(
    paths: Iterable[str], card: Mapping[str, Any], name: HubName, *, split: str, key: str
) -> list[str]:
    """Return the files of a dataset's config and split, sorted: Parquet files, or one file of JSON
    lines.

    Args:
        paths: All files of the dataset.
        card: The settings of its card.
        name: Says config and split.
        split: The split where the name has none.
        key: Of the source, for errors.
    Raises:
        ConfigError: There is none, or another format, or several and none is named; the text lists
            them.
    """
    paths = sorted(path for path in paths if not NOT_DATA.fullmatch(path))
    configs = _list_by_card(paths, card) or _list_by_layout(paths)
    config_name, split_name = _read_parts(name, configs)
    config = _choose(configs, config_name, what="config", name=name, key=key)
    splits = configs[config]
    files = splits[_choose(splits, split_name or split, what="split", name=name, key=key)]
    others = [path for path in files if not DATA_FILE.fullmatch(path)]
    if others or (len(files) > 1 and not all(path.endswith(".parquet") for path in files)):
        problem = f"{others[0]} is of another format" if others else f"{len(files)} files hold it"
        raise ConfigError(
            f"{key}: {name} is neither Parquet nor one file of JSON lines ({problem}); the hub "
            f"keeps public datasets as Parquet: hf:{name.repo}@{CONVERTED}:CONFIG:SPLIT"
        )
    return files


def _read_parts(name: HubName, configs: Mapping[str, Splits]) -> tuple[str, str]:
    """Return config and split of a name; a single part is a config, if one has this name."""
    if len(name.parts) == 1:
        (part,) = name.parts
        return (part, "") if part in configs else ("", part)
    config, split = name.parts or ("", "")
    return config, split


def _choose(choices: Mapping[str, Any], choice: str, *, what: str, name: HubName, key: str) -> str:
    """Return the choice that is named, the only one, or the default."""
    if choice in choices:
        return choice
    if not choice and (len(choices) == 1 or DEFAULT in choices):
        return next(iter(choices)) if len(choices) == 1 else DEFAULT
    if not choices:
        raise ConfigError(
            f"{key}: {name} holds no Parquet file and no JSON lines; the hub keeps public datasets "
            f"as Parquet: hf:{name.repo}@{CONVERTED}:CONFIG:SPLIT"
        )
    problem = f"no {what} {choice!r}, only" if choice else f"several {what}s:"
    raise ConfigError(
        f"{key}: {name} has {problem} {', '.join(choices)}; name one in hf:{name.repo}:CONFIG:SPLIT"
    )


def _list_by_card(paths: list[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    """Return the files by config and split, as a card's `configs` names them."""
    configs: dict[str, Splits] = {}
    for config in card.get("configs") or ():
        if not isinstance(config, Mapping):
            continue
        name, root = str(config.get("config_name", DEFAULT)), str(config.get("data_dir") or "")
        below = [path for path in paths if path.startswith(f"{root}/".lstrip("/"))]
        data_files = config.get("data_files")
        configs[name] = (
            _list_by_patterns(below, root, data_files) if data_files else _list_splits(below)
        )
    return configs


def _list_by_patterns(paths: list[str], root: str, data_files: Any) -> Splits:
    """Return the files by split, of a card's patterns: one, a list, or a list with splits."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: Splits = {}
    for entry in entries:
        pair = entry if isinstance(entry, Mapping) else {"path": entry}
        patterns = pair.get("path") or ()
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        patterns = [f"{root}/{pattern}".lstrip("/") for pattern in patterns]
        files = [path for path in paths if any(_matches(path, one) for one in patterns)]
        splits.setdefault(str(pair.get("split", "train")), []).extend(files)
    return {split: files for split, files in splits.items() if files}


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path fits a pattern, whose `*` stays in a folder and whose `**` does not."""
    pattern = pattern.removeprefix("./")
    same_depth = path.count("/") == pattern.count("/")
    return (same_depth or "**" in pattern) and (
        fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))
    )


def _list_by_layout(paths: list[str]) -> dict[str, Splits]:
    """Return the files by config and split of a dataset without such a card: `config/split/file`,
    or one config whose splits are words in the paths.
    """
    files = [path for path in paths if DATA_FILE.fullmatch(path)]
    if not files or not all(path.count("/") == 2 for path in files):
        return {DEFAULT: _list_splits(files)} if files else {}
    configs: dict[str, Splits] = {}
    for path in files:
        config, split, _ = path.split("/")
        configs.setdefault(config, {}).setdefault(split, []).append(path)
    return configs


def _list_splits(paths: Iterable[str]) -> Splits:
    """Return the data files by the split whose word is in their path; all are `train` where none
    has one.
    """
    files = [path for path in paths if DATA_FILE.fullmatch(path)]
    splits: Splits = {}
    for split, words in SPLIT_WORDS.items():
        word = re.compile(rf"(^|[-._ /\d])({'|'.join(words)})([-._ /\d]|$)")
        if named := [path for path in files if word.search(path)]:
            splits[split] = named
    return splits or ({"train": files} if files else {})
