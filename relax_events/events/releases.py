"""The schemas of each release, kept as files: what a log that was written by it may hold, and what
its readers understand.

`schemas/released/<version>.json` holds every event's schema, complete in itself, with its
fingerprint. Files are only ever added, by `relax schemas release`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.errors import ConfigError, SchemaError
from relax_events.events.schemas import (
    Schema,
    event_schemas,
    name_of,
    read_schemas,
    schema_fingerprint,
)

CURRENT = "current"
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
FOLDER = "released"


@dataclass(frozen=True, slots=True)
class Release:
    """The events of a release, by full name."""

    version: str
    schemas: dict[str, Schema]

    def find(self, name: str) -> Schema:
        """Return an event's schema by its full or its short name.

        Raises:
            ConfigError: There is none of that name; the text lists those there are.
        """
        found = [schema for full, schema in self.schemas.items() if name in (full, schema["name"])]
        if not found:
            known = ", ".join(sorted(schema["name"] for schema in self.schemas.values()))
            raise ConfigError(f"{self.version} has no event {name!r}; it has {known}")
        return found[0]


def current_release(directory: Path) -> Release:
    """Return the current schemas in a folder of .avsc files, released or not."""
    return Release(CURRENT, event_schemas(read_schemas(directory)))


def read_releases(directory: Path) -> list[Release]:
    """Return the releases in a schema folder, oldest first; none is fine.

    Raises:
        SchemaError: A file is not what `relax schemas release` wrote.
    """
    return sorted(
        (_read_release(path) for path in (directory / FOLDER).glob("*.json")),
        key=lambda release: version_key(release.version),
    )


def find_release(directory: Path, version: str) -> Release:
    """Return one release, or the current schemas for `current`.

    Raises:
        ConfigError: There is no such release; the text lists those there are.
    """
    if version == CURRENT:
        return current_release(directory)
    path = directory / FOLDER / f"{version}.json"
    if not VERSION.fullmatch(version) or not path.is_file():
        known = ", ".join(release.version for release in read_releases(directory)) or "none yet"
        raise ConfigError(
            f"there is no release {version!r}; released are {known}, and {CURRENT!r} names "
            "the current schemas"
        )
    return _read_release(path)


def write_release(directory: Path, release: Release) -> Path:
    """Write a release and return its file; an existing release is never changed.

    Raises:
        ConfigError: There is a release of that version already.
    """
    path = directory / FOLDER / f"{release.version}.json"
    rows = [
        {"fingerprint": schema_fingerprint(schema).hex(), "schema": schema}
        for _, schema in sorted(release.schemas.items())
    ]
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(json.dumps({"version": release.version, "events": rows}, indent=1) + "\n")
    except FileExistsError:
        raise ConfigError(
            f"{path} exists; a release is never changed, take the next version"
        ) from None
    return path


def version_key(version: str) -> tuple[int, ...]:
    """Return what versions are ordered by.

    Raises:
        ConfigError: The text is not of the form 1.2.3.
    """
    match = VERSION.fullmatch(version)
    if match is None:
        raise ConfigError(f"a version must look like 1.2.3, got {version!r}")
    return tuple(map(int, match.groups()))


def _read_release(path: Path) -> Release:
    try:
        document = json.loads(path.read_text())
        schemas = {name_of(row["schema"]): _checked(row) for row in document["events"]}
        version_key(document["version"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise SchemaError(
            f"{path} is not a release: {type(error).__name__} {error}; restore it from "
            "version control"
        ) from None
    return Release(document["version"], schemas)


def _checked(row: dict[str, Any]) -> Schema:
    schema: Schema = row["schema"]
    if schema_fingerprint(schema).hex() != row["fingerprint"]:
        raise ValueError(
            f"{name_of(schema)} has fingerprint {schema_fingerprint(schema).hex()}, the file "
            f"says {row['fingerprint']}"
        )
    return schema
