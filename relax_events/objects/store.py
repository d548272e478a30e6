"""The object store: content-addressed or named objects, verified on read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Self

import obstore

from relax_events.errors import ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.objects.backends import LOOK_UP, Backend, Deadlines, open_backend, translated

PART_BYTES = 16 * 1024**2
NUM_PARALLEL_PARTS = 8
KEY_PATTERN = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


class ObjectStore:
    """Objects under one root. Writes are atomic: a reader sees the whole object or none. Safe to use from several threads."""

    def __init__(self, backend: Backend, *, moved_from: Iterable[str] = ()) -> None:
        """Wrap an opened storage; `open` is the usual way."""
        self._former_roots = tuple(f"{uri.rstrip('/')}/" for uri in moved_from)
        self._storage = backend.storage
        self._is_remote = backend.is_remote
        self._root = backend.root

    @classmethod
    def open(cls, uri: str, *, deadlines: Deadlines | None = None, moved_from: Iterable[str] = ()) -> Self:
        """Open the store at a URI; every `memory://` is a new, empty one.

        Args:
            uri: `file:///directory` (made if missing), `memory://`, `s3://bucket/prefix` or `gs://bucket/prefix`.
            deadlines: Of calls to a remote store.
            moved_from: URIs of stores whose objects were copied here: what refers to those is found here.
        Raises:
            ConfigError: The URI names no store, or one that can't be opened.
        """
        return cls(open_backend(uri, deadlines=deadlines or Deadlines()), moved_from=moved_from)

    def put(self, data: bytes | memoryview, *, suffix: str = "") -> ObjectRef:
        """Store bytes under their own digest, `sha256/ab/abcd...`; content that is there already is not sent again.

        Args:
            data: The content; any contiguous buffer.
            suffix: Put behind the digest, such as `.png`.
        Raises:
            ObjectError: The store is full, refuses, or does not answer before the deadline.
        """
        digest = sha256(data)
        key = f"sha256/{digest.hexdigest()[:2]}/{digest.hexdigest()}{suffix}"
        num_bytes = memoryview(data).nbytes
        if self._num_bytes(key) != num_bytes:
            self._write(key, data)
        return ObjectRef(self.uri(key), digest.digest(), num_bytes)

    def put_at(self, key: str, data: bytes | memoryview) -> ObjectRef:
        """Store bytes under a name, in place of what had it.

        Raises:
            ObjectError: As for `put`, or the name has other characters than letters, digits, `._=-` and `/`.
        """
        self._write(key, data)
        return ObjectRef(self.uri(key), sha256(data).digest(), memoryview(data).nbytes)

    def get(self, reference: ObjectRef) -> bytes:
        """Read an object and prove that it is the one that was stored.

        Raises:
            ObjectError: It is missing, unreadable, of another size or digest, or lies outside this store.
        """
        data = self.get_at(self.key(reference.uri))
        if len(data) != reference.num_bytes:
            raise ObjectError(f"{reference.uri} was altered: it must have {reference.num_bytes} bytes, got {len(data)}")
        if (seen := sha256(data).digest()) != reference.digest:
            raise ObjectError(f"{reference.uri} was altered: its SHA-256 must be {reference.digest.hex()}, got {seen.hex()}")
        return data

    def get_at(self, key: str) -> bytes:
        """Read the object of a name, unverified.

        Raises:
            ObjectError: It is missing or unreadable.
        """
        uri = self.uri(self._checked(key))
        with translated("read", uri):
            if not self._is_remote:
                return bytes(obstore.get(self._storage, key).bytes())
            return self._read_parts(key, num_bytes=obstore.head(self._storage, key)["size"])

    def exists(self, key: str) -> bool:
        """Whether an object has this name."""
        return self._num_bytes(key) is not None

    def list(self, prefix: str) -> list[str]:
        """Give the names of all objects under a folder, sorted.

        Args:
            prefix: A folder, with or without the slash at its end; `""` lists the whole store.
        Raises:
            ObjectError: The store can't be read.
        """
        with translated("list", self.uri(prefix)):
            return sorted(item["path"] for item in obstore.list(self._storage, prefix or None).collect())

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects by name, a local store in the given order; names that are gone already are passed over.

        Raises:
            ObjectError: The store refuses.
        """
        checked = [self._checked(key) for key in keys]
        batches = ([checked] if checked else []) if self._is_remote else [[key] for key in checked]
        for batch in batches:
            try:
                with translated("delete", self.uri(batch[0])):
                    obstore.delete(self._storage, batch)
            except ObjectError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def uri(self, key: str) -> str:
        """Give the URI of a name; `""` gives that of the store's top."""
        return self._root + key

    def key(self, uri: str) -> str:
        """Give the name behind a URI.

        Raises:
            ObjectError: The URI lies outside this store.
        """
        root = next((root for root in (self._root, *self._former_roots) if uri.startswith(root)), None)
        if root is None:
            raise ObjectError(f"{uri} lies outside the object store {self._root}; set objects.uri to the store that it was written to")
        return self._checked(uri.removeprefix(root))

    def _checked(self, key: str) -> str:
        if not KEY_PATTERN.fullmatch(key):
            raise ObjectError(f"{key!r} can't name an object: use letters, digits, '_', '=', '-', inner '.', and '/' between parts")
        return key

    def _num_bytes(self, key: str) -> int | None:
        try:
            with translated(LOOK_UP, self.uri(self._checked(key))):
                size: int = obstore.head(self._storage, key)["size"]
        except ObjectError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return size

    def _write(self, key: str, data: bytes | memoryview) -> None:
        with translated("write", self.uri(self._checked(key))):
            obstore.put(self._storage, key, memoryview(data).cast("B"), chunk_size=PART_BYTES, max_concurrency=NUM_PARALLEL_PARTS)

    def _read_parts(self, key: str, *, num_bytes: int) -> bytes:
        """Read in parts, side by side: the deadline of a request must not bound the size of an object."""
        if num_bytes <= PART_BYTES:
            return bytes(obstore.get(self._storage, key).bytes())

        def read(start: int) -> obstore.Bytes:
            return obstore.get_range(self._storage, key, start=start, end=min(start + PART_BYTES, num_bytes))

        with ThreadPoolExecutor(NUM_PARALLEL_PARTS) as pool:
            return b"".join(pool.map(read, range(0, num_bytes, PART_BYTES)))
