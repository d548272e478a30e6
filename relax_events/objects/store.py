"""The object store: content-addressed and named objects, verified when read. Media references on
the log are restricted to it and to further roots that the run file allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from os import fstat
from typing import Any, BinaryIO, Self

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from relax_events.errors import EnvironmentProblem, ObjectError
from relax_events.events.parts import ChatMessage, MediaRef, ObjectRef
from relax_events.objects.backends import (
    LOOK_UP,
    Backend,
    Deadlines,
    open_backend,
    translate_errors,
)
from relax_events.objects.local_files import KEY_PATTERN, LocalFiles
from relax_events.objects.outages import ResultT, outages
from relax_events.objects.unfinished import ABANDONED_SECONDS

PART_BYTES = 16 * 1024**2
NUM_PARALLEL_PARTS = 8


class ObjectStore:
    """Objects under one root. Writes are atomic: a reader sees the complete object or none.
    Thread-safe.
    """

    def __init__(
        self, backend: Backend, *, uri_aliases: Iterable[str] = (), waits: bool = True
    ) -> None:
        """Wrap an opened storage; most callers use `open`."""
        self._former_roots = tuple(f"{uri.rstrip('/')}/" for uri in uri_aliases)
        self._backend, self._waits = backend, waits
        self._storage = backend.storage
        self._is_remote = backend.is_remote
        self._files = None if backend.directory is None else LocalFiles(backend.directory)
        self._root = backend.root

    @classmethod
    def open(
        cls,
        uri: str,
        *,
        deadlines: Deadlines | None = None,
        uri_aliases: Iterable[str] = (),
        waits: bool = True,
    ) -> Self:
        """Open the store at a URI; every `memory://` is a new, empty one.

        Args:
            uri: `file:///directory` (made if missing), `memory://`, `s3://bucket/prefix` or
                `gs://bucket/prefix`.
            deadlines: Time limits of calls to a remote store.
            uri_aliases: URIs of stores whose objects were copied here; references to them are
                resolved here.
            waits: Whether a worker waits for the store during an outage (see `outages`); otherwise
                a call fails after its own deadline.
        Raises:
            ConfigError: The URI is invalid, or the store can't be opened.
        """
        return cls(
            open_backend(uri, deadlines=deadlines or Deadlines()),
            uri_aliases=uri_aliases,
            waits=waits,
        )

    def without_waiting(self) -> Self:
        """Return the same store; during an outage its calls fail after their own deadlines."""
        return type(self)(self._backend, uri_aliases=self._former_roots, waits=False)

    def put(self, data: bytes | memoryview, *, suffix: str = "", folder: str = "") -> ObjectRef:
        """Store bytes under their digest, `sha256/ab/abcd...`; existing content is not sent again.

        Args:
            data: The content; any contiguous buffer.
            suffix: Appended to the digest, for example `.png`.
            folder: A folder, with a slash at its end; equal content in another folder is stored
                again.
        Raises:
            StoreUnavailable: The store is full, denies access, or does not respond before the
                deadline.
        """
        digest = sha256(data)
        key = f"{folder}sha256/{digest.hexdigest()[:2]}/{digest.hexdigest()}{suffix}"
        num_bytes = memoryview(data).nbytes
        if self.num_bytes(key) != num_bytes:
            self._write(key, data)
        return ObjectRef(self.uri(key), digest.digest(), num_bytes)

    def put_at(self, key: str, data: bytes | memoryview) -> ObjectRef:
        """Store bytes under a name, replacing an existing object.

        Raises:
            ObjectError: As for `put`, or the name has characters other than ASCII alphanumerics,
                `._=-` and `/`.
        """
        self._write(key, data)
        return ObjectRef(self.uri(key), sha256(data).digest(), memoryview(data).nbytes)

    def put_unhashed(self, key: str, data: bytes | memoryview) -> ObjectRef:
        """Store bytes under a name, replacing an existing object; what verifies them is not in the
        reference, whose digest is empty.

        Raises:
            ObjectError: As for `put_at`.
        """
        self._write(key, data)
        return ObjectRef(self.uri(key), b"", memoryview(data).nbytes)

    def put_new(self, key: str, data: bytes) -> None:
        """Store bytes under a name unless an object has it.

        Raises:
            StoreUnavailable: As for `put`.
        """
        try:
            self._call(
                "write",
                self._require_key(key),
                lambda: self._create(key, data),
            )
        except ObjectError as error:
            if not isinstance(error.__cause__, AlreadyExistsError):
                raise

    def get(self, reference: ObjectRef) -> bytes:
        """Read an object and verify its size and digest.

        Raises:
            ObjectError: The object is missing, unreadable, of another size or digest, or outside of
                this store. An object of another size is not read.
        """
        key = self.key(reference.uri)
        data = self._call("read", key, lambda: self._read(key, expected_bytes=reference.num_bytes))
        _require_digest(reference, sha256(data).digest())
        return data

    def get_buffer(self, reference: ObjectRef) -> memoryview:
        """Read an object, once, and verify its size; and its SHA-256, where the reference has one.

        What is returned is memory of this process alone, and writable: no later write to the
        object changes it.

        Raises:
            ObjectError: As for `get`.
        """
        key = self.key(reference.uri)
        size = reference.num_bytes
        data = self._call("read", key, lambda: self._read_into_memory(key, num_bytes=size))
        if reference.digest:
            _require_digest(reference, sha256(data).digest())
        return data

    def get_at(self, key: str) -> bytes:
        """Read a named object without verification.

        Raises:
            ObjectError: The object is missing or unreadable.
        """
        return self._call("read", self._require_key(key), lambda: self._read(key))

    def copy_to(self, reference: ObjectRef, file: BinaryIO) -> None:
        """Copy an object into an open file, and verify the size, and the SHA-256 where the
        reference has one, of the bytes that are written. Memory: a few parts of 16 MiB.

        Args:
            reference: The object.
            file: Empty, and of this process alone. After an error its content is undefined.
        Raises:
            EnvironmentProblem: The file can't be written.
            ObjectError: As for `get`.
        """
        key = self.key(reference.uri)
        seen = self._call("read", key, lambda: self._copy(key, reference, file))
        _require_digest(reference, seen)

    def _copy(self, key: str, reference: ObjectRef, file: BinaryIO) -> bytes:
        """Copy an object; return the SHA-256 of what was written, if it is to be compared."""
        digest = sha256()
        with _writing(file, reference.uri):
            file.seek(0)
            file.truncate()
        for part in self._stream(key, num_bytes=reference.num_bytes):
            with _writing(file, reference.uri):
                file.write(part)
            if reference.digest:
                digest.update(part)
        with _writing(file, reference.uri):
            file.flush()
        return digest.digest() if reference.digest else b""

    def exists(self, key: str) -> bool:
        """Return whether an object has this name."""
        return self.num_bytes(key) is not None

    def list_folders(self, prefix: str) -> list[str]:
        """Return the sorted subfolders of a folder, with a slash at their end, at the cost of one
        request per thousand.

        Raises:
            StoreUnavailable: The store does not respond.
        """
        files, storage = self._files, self._storage
        folders = self._call(
            "list",
            prefix,
            lambda: (
                obstore.list_with_delimiter(storage, prefix)["common_prefixes"]
                if files is None
                else files.list_folders(prefix)
            ),
        )
        return sorted(f"{folder.rstrip('/')}/" for folder in folders)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names of all objects under a folder.

        Args:
            prefix: A folder, with or without the slash at its end; `""` lists the whole store.
        Raises:
            ObjectError: The store can't be read.
        """
        files, storage = self._files, self._storage
        return self._call(
            "list",
            prefix,
            lambda: (
                sorted(item["path"] for item in obstore.list(storage, prefix or None).collect())
                if files is None
                else files.list_objects(prefix)
            ),
        )

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects by name, in the given order for a local store; missing objects are
        skipped.

        Raises:
            ObjectError: The store refuses the deletion.
        """
        checked = [self._require_key(key) for key in keys]
        if self._files is not None:
            for key in checked:
                self._call("delete", key, partial(self._files.delete, key))
            return
        batches = ([checked] if checked else []) if self._is_remote else [[key] for key in checked]
        for batch in batches:
            try:
                self._call("delete", batch[0], partial(obstore.delete, self._storage, batch))
            except ObjectError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def delete_unfinished(self, folder: str, *, min_age_seconds: float = ABANDONED_SECONDS) -> None:
        """Delete what killed writers have left in a folder of a local store. A remote store keeps
        their parts out of sight, for as long as its lifecycle rules say.

        Args:
            folder: A folder, with a slash at its end.
            min_age_seconds: How long ago a file must have grown last; 0 where no writer is alive.
        Raises:
            ObjectError: The store refuses the deletion.
        """
        if self._files is not None:
            files = self._files
            self._call(
                "delete",
                folder,
                lambda: files.delete_unfinished(folder, min_age_seconds=min_age_seconds),
            )

    def uri(self, key: str) -> str:
        """Return the URI of a name; `""` gives the store's root."""
        return self._root + key

    def key(self, uri: str) -> str:
        """Return the name of a URI.

        Raises:
            ObjectError: The URI lies outside this store.
        """
        root = next(
            (root for root in (self._root, *self._former_roots) if uri.startswith(root)), None
        )
        if root is None:
            raise ObjectError(
                f"{uri} lies outside the object store {self._root}; set objects.uri to the "
                "store that it was written to"
            )
        return self._require_key(uri.removeprefix(root))

    def _require_key(self, key: str) -> str:
        if not KEY_PATTERN.fullmatch(key):
            raise ObjectError(
                f"{key!r} can't name an object: use ASCII alphanumerics, '_', '=', '-', inner "
                "'.', and '/' between parts"
            )
        return key

    def num_bytes(self, key: str) -> int | None:
        """Return the size of a named object, or None."""
        try:
            size: int = self._call(LOOK_UP, self._require_key(key), lambda: self._look_up_size(key))
        except ObjectError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return size

    def _write(self, key: str, data: bytes | memoryview) -> None:
        content = memoryview(data).cast("B")
        if not self._is_remote and self._backend.directory is None:
            content = memoryview(bytes(content))  # `memory://` keeps what it is given
        put = partial(
            self._put, key, content, chunk_size=PART_BYTES, max_concurrency=NUM_PARALLEL_PARTS
        )
        self._call("write", self._require_key(key), put)

    def _put(self, key: str, content: bytes | memoryview, **options: Any) -> None:
        if self._files is not None:
            self._files.require_no_links(key)
        obstore.put(self._storage, key, content, **options)

    def _create(self, key: str, data: bytes) -> None:
        """Store an object unless there is one, which a process without the right to write it may
        wait for.
        """
        try:
            self._put(key, data, mode="create")
        except PermissionDeniedError as error:
            try:
                self._look_up_size(key)
            except FileNotFoundError:
                raise error from None

    def _call(self, action: str, key: str, call: Callable[[], ResultT]) -> ResultT:
        """Call the storage, waiting during an outage if this store waits."""

        def attempt() -> ResultT:
            with translate_errors(self._backend, action, key):
                return call()

        return outages.call_until_available(self._root, attempt) if self._waits else attempt()

    def _look_up_size(self, key: str) -> int:
        """Return an object's size. A local file is asked for directly: that takes microseconds,
        and tens of them through the storage library.
        """
        if self._files is not None:
            return self._files.num_bytes(key)
        num_bytes: int = obstore.head(self._storage, key)["size"]
        return num_bytes

    def _read_into_memory(self, key: str, *, num_bytes: int) -> memoryview:
        memory = np.empty(num_bytes, dtype=np.uint8).data
        if self._files is not None:
            with self._files.open(key) as file:
                _require_size(fstat(file.fileno()).st_size, num_bytes, uri=self.uri(key))
                _require_size(_fill(memory, file), num_bytes, uri=self.uri(key))
            return memory
        _require_size(self._look_up_size(key), num_bytes, uri=self.uri(key))

        def read(start: int) -> None:
            end = min(start + PART_BYTES, num_bytes)
            memory[start:end] = self._read_part(key, start, end)

        starts = range(0, num_bytes, PART_BYTES)
        if len(starts) <= 1:
            deque(map(read, starts), maxlen=0)
            return memory
        with ThreadPoolExecutor(NUM_PARALLEL_PARTS) as pool:
            deque(pool.map(read, starts), maxlen=0)
        return memory

    def _read(self, key: str, *, expected_bytes: int | None = None) -> bytes:
        if self._files is not None:
            with self._files.open(key) as file:
                num_bytes = fstat(file.fileno()).st_size
                _require_size(num_bytes, expected_bytes, uri=self.uri(key))
                data = file.read(num_bytes)
            _require_size(len(data), num_bytes, uri=self.uri(key))
            return data
        num_bytes = self._look_up_size(key)
        _require_size(num_bytes, expected_bytes, uri=self.uri(key))
        if num_bytes <= PART_BYTES:
            return bytes(obstore.get(self._storage, key).bytes())
        return b"".join(self._read_parts(key, num_bytes=num_bytes))

    def _stream(self, key: str, *, num_bytes: int) -> Iterator[bytes | memoryview]:
        """Yield an object in parts, of which memory holds a few.

        Raises:
            ObjectError: The object has another size, or becomes shorter meanwhile.
        """
        if self._files is None:
            _require_size(self._look_up_size(key), num_bytes, uri=self.uri(key))
            yield from self._read_parts(key, num_bytes=num_bytes)
            return
        with self._files.open(key) as file:
            _require_size(fstat(file.fileno()).st_size, num_bytes, uri=self.uri(key))
            memory = memoryview(bytearray(min(PART_BYTES, num_bytes)))
            for start in range(0, num_bytes, PART_BYTES):
                part = memory[: num_bytes - start]
                _require_size(start + _fill(part, file), start + len(part), uri=self.uri(key))
                yield part

    def _read_parts(self, key: str, *, num_bytes: int) -> Iterator[memoryview]:
        """Read in parallel parts, because the deadline of one request must not bound an object's
        size. Memory holds as many as are read at a time.
        """
        starts = range(0, num_bytes, PART_BYTES)
        with ThreadPoolExecutor(NUM_PARALLEL_PARTS) as pool:
            for first in range(0, len(starts), NUM_PARALLEL_PARTS):
                yield from pool.map(
                    lambda start: self._read_part(key, start, min(start + PART_BYTES, num_bytes)),
                    starts[first : first + NUM_PARALLEL_PARTS],
                )

    def _read_part(self, key: str, start: int, end: int) -> memoryview:
        data = obstore.get_range(self._storage, key, start=start, end=end)
        return memoryview(data).cast("B")


def _fill(memory: memoryview, file: BinaryIO) -> int:
    """Read a file into memory; return the number of bytes, fewer if the file ends before."""
    position = 0
    while position < len(memory):
        num_bytes = file.readinto(memory[position:])  # type: ignore[attr-defined] # regular files have it
        if not num_bytes:
            break
        position += num_bytes
    return position


@contextmanager
def _writing(file: BinaryIO, uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{uri} can't be copied to {file.name}: {error.strerror}; free space there, or give "
            "another folder"
        ) from error


def _require_digest(reference: ObjectRef, seen: bytes) -> None:
    if seen != reference.digest:
        raise ObjectError(
            f"{reference.uri} was altered: its SHA-256 must be {reference.digest.hex()}, "
            f"got {seen.hex()}"
        )


def _require_size(num_bytes: int, expected_bytes: int | None, *, uri: str) -> None:
    """Refuse an object of another size than expected."""
    if expected_bytes is not None and num_bytes != expected_bytes:
        raise ObjectError(
            f"{uri} was altered: it must have {expected_bytes} bytes, got {num_bytes}"
        )


@dataclass(frozen=True, slots=True)
class AllowedRoots:
    """Roots of permitted media references. Any other reference is never opened."""

    roots: tuple[str, ...]

    @classmethod
    def for_store(cls, store_root: str, extra: Iterable[str] = ()) -> AllowedRoots:
        """Allow a store and further roots."""
        return cls(tuple(root.rstrip("/") + "/" for root in (store_root, *extra)))

    def check(self, event: Any) -> None:
        """Refuse an event with a media reference outside of the roots.

        Raises:
            ObjectError: A reference lies outside; the text names it and the roots.
        """
        for media in list_media(event):
            if not self._contains(media.uri):
                raise ObjectError(
                    f"media must lie under {' or '.join(self.roots)}, without '..' or other "
                    f"detours, got {media.uri!r}; add its root to objects.allowed_roots if the run "
                    "may read there"
                )

    def _contains(self, uri: str) -> bool:
        # The rest of the URI must match our object keys, which excludes '..' and encoded forms of
        # it.
        return any(
            uri.startswith(root) and KEY_PATTERN.fullmatch(uri.removeprefix(root))
            for root in self.roots
        )


def list_media(event: Any) -> list[MediaRef]:
    """Return all media references of an event, in order; references of a sample of several paths
    may occur twice.
    """
    references = list(getattr(event, "media", ()))
    for name in ("messages", "turns"):
        if messages := getattr(event, name, ()):
            references += list_message_media(messages)
    if by_path := getattr(event, "path_media", ()):
        references += chain.from_iterable(by_path)
    return references


def list_message_media(messages: Iterable[ChatMessage]) -> list[MediaRef]:
    """Return the media references of a conversation, in order."""
    return [part.media for message in messages for part in message.parts if part.media is not None]
