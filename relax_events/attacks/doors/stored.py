"""Hostile exports, records and objects against their readers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

from relax_events.attacks.archives import ATTACKS, ArchiveAttack
from relax_events.attacks.records import RecordAttack, amplifying_records
from relax_events.attacks.small_export import read_export, write_export
from relax_events.attacks.stores import (
    AFTER_READING,
    BEFORE_READING,
    KEYS_OUTSIDE,
    foreign_claims,
    keep_second_name,
    link_folder,
)
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.confinement.entry_points import (
    OBJECT_STORE,
    RECORD_READER,
    RUN_IMPORT,
    BoundedPoint,
)
from relax_events.errors import CheckFailed, ConfigError, CorruptRecord, ObjectError, RelaxError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.objects.download import download
from relax_events.objects.marker import claim_store
from relax_events.objects.rights import MARKER

RECORD_BYTES = 3 * 1024**2
STORE_KEY = "weights/00000001/files"
CONTENT = bytes(range(256)) * 40
Reader = Callable[[ObjectStore, ObjectRef, Path], Callable[[], bytes]]


def stored_assaults() -> Iterator[Assault]:
    """Yield the assaults on stored records and objects."""
    for point, prepare in (
        (RUN_IMPORT, _prepare_exports),
        (RECORD_READER, _prepare_records),
        (OBJECT_STORE, _prepare_objects),
    ):
        yield bounded_assault(point, prepare)


def bounded_assault(point: BoundedPoint, prepare: Callable[[Targets], object]) -> Assault:
    """Return the assault on an entry point without a child process."""
    return Assault(point.name, point.doors, "bounds", prepare)  # type: ignore[arg-type]


@contextmanager
def _prepare_exports(_: Targets) -> Iterator[list[Attack]]:
    yield [Attack(attack.name, partial(_import, attack)) for attack in ATTACKS]


def _import(attack: ArchiveAttack) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "exported"
        write_export(folder)
        attack.apply(folder)
        return refuse(lambda: read_export(folder), ConfigError, CheckFailed)


def refuse(call: Callable[[], object], *errors: type[RelaxError]) -> str:
    """Make a call that must fail with an error of these types."""
    try:
        result = call()
    except errors:
        return HELD
    except (RelaxError, OSError) as error:
        return f"it failed with {type(error).__name__}: {error}"
    return f"it was taken: {result!r:.100}"


@contextmanager
def _prepare_records(_: Targets) -> Iterator[list[Attack]]:
    yield [
        Attack(attack.name, partial(_decode, attack)) for attack in amplifying_records(RECORD_BYTES)
    ]


def _decode(attack: RecordAttack) -> str:
    codec = EventCodec()
    codec.learn(attack.schema_json)
    return refuse(lambda: codec.decode(attack.record), CorruptRecord)


def _read_bytes(store: ObjectStore, reference: ObjectRef, _: Path) -> Callable[[], bytes]:
    data = store.get(reference)
    return lambda: data


def _read_buffer(store: ObjectStore, reference: ObjectRef, _: Path) -> Callable[[], bytes]:
    data = store.get_buffer(reference)
    return lambda: bytes(data)


def _read_file(store: ObjectStore, reference: ObjectRef, folder: Path) -> Callable[[], bytes]:
    return download(store, reference, folder / "copy").read_bytes


def _read_stream(store: ObjectStore, reference: ObjectRef, _: Path) -> Callable[[], bytes]:
    file = BytesIO()
    store.copy_to(reference, file)
    return file.getvalue


READERS: dict[str, Reader] = {
    "get": _read_bytes,
    "get_buffer": _read_buffer,
    "download": _read_file,
    "copy_to": _read_stream,
}
"""The ways to read an object; each returns a function that reads the verified bytes."""


@contextmanager
def _prepare_objects(_: Targets) -> Iterator[list[Attack]]:
    yield [
        *(
            Attack(f"{reader}: {name}", partial(_read_attacked, name, reader))
            for reader in READERS
            for name in BEFORE_READING
        ),
        *(
            Attack(f"{reader}, afterwards: {name}", partial(_read_then_attack, name, reader))
            for reader in READERS
            for name in AFTER_READING
        ),
        *(Attack(f"key {key!r}", partial(_name_outside, key)) for key in KEYS_OUTSIDE),
        *(Attack(f"marker {name}", partial(_claim, name)) for name in foreign_claims("mine")),
        Attack("a link to a folder of the weights", _write_through_link),
    ]


@contextmanager
def _open_store() -> Iterator[tuple[ObjectStore, Path]]:
    with tempfile.TemporaryDirectory() as name:
        yield ObjectStore.open((Path(name) / "objects").as_uri()), Path(name)


def _read_attacked(attack: str, reader: str) -> str:
    with _open_store() as (store, folder):
        reference = store.put_at(STORE_KEY, CONTENT)
        BEFORE_READING[attack](folder / "objects" / STORE_KEY)
        return refuse(lambda: READERS[reader](store, reference, folder), ObjectError)


def _read_then_attack(attack: str, reader: str) -> str:
    with _open_store() as (store, folder):
        reference = store.put_at(STORE_KEY, CONTENT)
        second = keep_second_name(folder / "objects" / STORE_KEY, folder / "second")
        read = READERS[reader](store, reference, folder)
        AFTER_READING[attack](second)
        return HELD if read() == CONTENT else "the verified content has changed"


def _name_outside(key: str) -> str:
    with _open_store() as (store, _):
        reference = ObjectRef(store.uri("") + key, bytes(32), 1)
        calls = (
            lambda: store.put_at(key, b"x"),
            lambda: store.get_at(key),
            lambda: store.delete([key]),
            lambda: store.get(reference),
        )
        return "".join(refuse(call, ObjectError) for call in calls)


def _claim(name: str) -> str:
    with _open_store() as (store, _):
        store.put_at(MARKER, foreign_claims("mine")[name])
        return refuse(lambda: claim_store(store, run_id="mine", cluster_id="here"), ConfigError)


def _write_through_link() -> str:
    with _open_store() as (store, folder):
        store.put_at(STORE_KEY, CONTENT)
        link_folder(folder / "objects/samples", folder / "objects/weights")
        refusal = refuse(lambda: store.put_at("samples/00000001/files", b"other"), ObjectError)
        return refusal or (
            HELD if store.get_at(STORE_KEY) == CONTENT else "the weights have changed"
        )
