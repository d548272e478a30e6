"""Compute the version of a reward: a digest of its code, settings and package versions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import orjson


def reward_digest(
    module: ModuleType,
    function_name: str,
    *,
    options: Mapping[str, Any],
    weights: Mapping[str, float],
    packages: tuple[str, ...],
) -> str:
    """Return the SHA-256, in hex, of the canonical JSON of everything that determines the rewards.

    The code is the function's module and the modules that it uses from the same folder or below.
    Two machines with the same files, settings and packages agree, independent of the folder's path.
    """
    facts = {
        "files": {
            name: sha256(path.read_bytes()).hexdigest()
            for name, path in source_files(module).items()
        },
        "function": function_name,
        "options": dict(options),
        "weights": dict(weights),
        "packages": {name: _version(name) for name in packages},
    }
    return sha256(
        orjson.dumps(facts, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    ).hexdigest()


def source_files(module: ModuleType) -> dict[str, Path]:
    """Return the module's file and the files that it uses in the same folder or below, by relative
    path.
    """
    folder = Path(str(module.__file__)).resolve().parent
    files: dict[str, Path] = {}
    unread = [module]
    while unread:
        path = Path(str(unread[-1].__file__)).resolve()
        name = path.relative_to(folder).as_posix()
        used = unread.pop()
        if name not in files:
            files[name] = path
            unread += [other for other in _used_by(used) if _lies_in(folder, other)]
    return files


def file_stamps(files: Iterable[Path | str]) -> dict[str, list[int]]:
    """Return modification time, size and inode by file: cheap change detection without reading.
    Missing files are left out.
    """
    stamps = {}
    for file in files:
        with suppress(FileNotFoundError):
            stat = Path(file).stat()
            stamps[str(file)] = [stat.st_mtime_ns, stat.st_size, stat.st_ino]
    return stamps


def _used_by(module: ModuleType) -> Iterator[ModuleType]:
    for value in list(vars(module).values()):
        named = value if isinstance(value, FunctionType | type) else type(value)
        other = value if isinstance(value, ModuleType) else sys.modules.get(named.__module__)
        if other is not None:
            yield other


def _lies_in(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    return path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
