"""Loads the current event schemas from `schemas/**/*.avsc` and the schemas of each release, and
identifies a schema by its CRC-64 fingerprint.

The current schemas are the contract of the log. `schemas/released/<version>.json` holds every
event's schema of one release, complete in itself, with its fingerprint: what a log written by that
release may hold, and what its readers understand. Files are only ever added, by `relax schemas
--add`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastavro.schema import (
    SchemaParseException,
    UnknownType,
    fingerprint,
    parse_schema,
    to_parsing_canonical_form,
)

from relax_events.errors import ConfigError, SchemaError

Schema = dict[str, Any]
TYPES_NAMESPACE = "relax.events.types"
PACKAGED = Path(__file__).parent.parent / "schemas"
CHECKOUT = Path(__file__).parent.parent.parent / "schemas"


@cache
def schema_directory() -> Path:
    """Return the folder of the .avsc files: inside an installed package, or at the top of a
    checkout.
    """
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


@cache
def current_schemas() -> dict[str, Schema]:
    """Return every schema of this code by full name, each complete in itself: the first use of a
    named type carries its definition.
    """
    return read_schemas(schema_directory())


def read_schemas(directory: Path) -> dict[str, Schema]:
    """Return every schema of a folder of .avsc files by full name, each complete in itself.

    Raises:
        SchemaError: There is none, or a file is not an Avro schema with a name; the text names the
            file.
    """
    files: dict[str, Schema] = {}
    for path in sorted(directory.rglob("*.avsc")):
        try:
            schema = json.loads(path.read_text())
            files[get_full_name(schema)] = schema
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(
                f"{path} is not an Avro schema with a name and a namespace: "
                f"{type(error).__name__} {error}"
            ) from None
    if not files:
        raise SchemaError(f"no schema found in {directory}; it should hold .avsc files")
    inlined: dict[str, Schema] = {
        name: inline_types(schema, files, set()) for name, schema in files.items()
    }
    for name, schema in inlined.items():
        _require_avro(name, schema)
    return inlined


def _require_avro(name: str, schema: Schema) -> None:
    try:
        parse_schema(schema, named_schemas={})
        if schema["type"] == "record":
            iter(schema["fields"])  # the parser takes a record without any
    except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{name} is not an Avro schema: {type(error).__name__} {error}") from None


def event_schemas(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schemas of events: records outside the namespace of the shared types."""
    return {
        name: schema
        for name, schema in schemas.items()
        if schema["type"] == "record" and schema["namespace"] != TYPES_NAMESPACE
    }


def get_full_name(schema: Schema) -> str:
    """Return the full name of a named schema."""
    return f"{schema['namespace']}.{schema['name']}"


def inline_types(node: Any, definitions: Mapping[str, Schema], seen: set[str]) -> Any:
    """Return a schema, or a part of one, with each type's definition where its name stands first.

    Args:
        node: The schema.
        definitions: Definitions of types by full name.
        seen: Full names of the types that are defined already; those met here are added.
    """
    if isinstance(node, str):
        is_first = node in definitions and node not in seen
        return inline_types(definitions[node], definitions, seen) if is_first else node
    if isinstance(node, list):
        return [inline_types(branch, definitions, seen) for branch in node]
    if "name" in node and "namespace" in node:
        seen.add(get_full_name(node))
    inlined = dict(node)
    for key in ("type", "items", "values"):
        if key in node:
            inlined[key] = inline_types(node[key], definitions, seen)
    if "fields" in node:
        inlined["fields"] = [inline_types(field, definitions, seen) for field in node["fields"]]
    return inlined


def schema_fingerprint(schema: Schema) -> bytes:
    """Return the CRC-64-AVRO fingerprint of a schema as the eight little-endian bytes of
    single-object encoding.
    """
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


def runtime_schema(schema: Schema) -> Schema:
    """Parse a schema for the codec: without logical types, since events hold times as integers, and
    with interned names, by which the fields of every record are looked up.

    Raises:
        TypeError: It is no record's schema, but a bare type's or a union.
    """
    parsed = parse_schema(_interned(without_logical_types(schema)), named_schemas={})
    if not isinstance(parsed, dict):
        raise TypeError(f"the schema of an event must be a record's, got {parsed!r}")
    return parsed


def without_logical_types(node: Any) -> Any:
    """Return a schema, or a part of one, without its logical types: what is on the wire."""
    if isinstance(node, dict):
        return {
            key: without_logical_types(value) for key, value in node.items() if key != "logicalType"
        }
    return [without_logical_types(item) for item in node] if isinstance(node, list) else node


def _interned(node: Any) -> Any:
    if isinstance(node, dict):
        return {sys.intern(key): _interned(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_interned(item) for item in node]
    return sys.intern(node) if isinstance(node, str) else node


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
        matches = [
            schema for full, schema in self.schemas.items() if name in (full, schema["name"])
        ]
        if not matches:
            names = ", ".join(sorted(schema["name"] for schema in self.schemas.values()))
            raise ConfigError(f"{self.version} has no event {name!r}; it has {names}")
        return matches[0]


def current_release(directory: Path) -> Release:
    """Return the current schemas in a folder of .avsc files, released or not."""
    return Release(CURRENT, event_schemas(read_schemas(directory)))


def read_releases(directory: Path) -> list[Release]:
    """Return the releases in a schema folder, oldest first; none is fine.

    Raises:
        SchemaError: A file is not what `relax schemas --add` wrote.
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
        versions = ", ".join(release.version for release in read_releases(directory)) or "none yet"
        raise ConfigError(
            f"there is no release {version!r}; released are {versions}, and {CURRENT!r} names "
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
        schemas = {get_full_name(row["schema"]): _checked(row) for row in document["events"]}
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
            f"{get_full_name(schema)} has fingerprint {schema_fingerprint(schema).hex()}, the file "
            f"says {row['fingerprint']}"
        )
    return schema
