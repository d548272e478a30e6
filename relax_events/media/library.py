"""Store and load a run's media: each file is stored once, and preprocessed once on each machine.

    dataset row --add--> checks --> arrays into the machine's cache, bytes into the object store
    --> MediaRef on the log
    MediaRef --load--> memory, or the machine's cache, or: fetch, verify, check, decode --> arrays

A problem with a file is a `MediaError` that names it; it fails one row or one prompt group only.
"""

from __future__ import annotations

import asyncio
import mimetypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

from relax_events.config import RunConfig
from relax_events.errors import MediaError, ObjectError
from relax_events.events.parts import MediaRef, Modality, ObjectRef
from relax_events.media.decoder import Decoder
from relax_events.media.host_cache import HostCache
from relax_events.media.items import MediaItem, MediaKey
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.preprocessing import DecodePlan, MediaPreprocessor
from relax_events.media.token_layout import MediaLayout, read_modality
from relax_events.objects.store import ObjectStore

Result = TypeVar("Result")
MEMORY_BYTES = 256 * 1024**2
"""Preprocessed media that one worker keeps in memory."""
MAX_CACHED_REFERENCES = 4096
"""Cached references of added files: a row is read when it is filtered, and again when it is issued.
"""
CACHE_FOLDER = "media-cache"
MAX_CACHE_BYTES = 4 * 1024**3
RUN_STORE = ""
"""Key of the run's object store among the open stores."""


class MediaLibrary:
    """The media of a run. Used by one thread."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model_path: Path | None = None,
        store: ObjectStore | None = None,
        folder: Callable[[], str] = lambda: "",
    ) -> None:
        """Read the model's preprocessing settings; for a text model the other methods are not used.

        Args:
            config: The run.
            model_path: A model other than the run's.
            store: The run's open object store; if None, it is opened when needed.
            folder: Returns the store's folder for the next file.
        Raises:
            ConfigError: The model's settings for media are missing or not supported.
        """
        self._config, self._limits = config, config.model.media
        self._layout = MediaLayout.from_folder(model_path or config.model.path, self._limits)
        self._decoder = Decoder(self._limits)
        self._cache = HostCache(config.run.directory / CACHE_FOLDER, max_bytes=MAX_CACHE_BYTES)
        self._stores = {} if store is None else {RUN_STORE: store}
        self._memory: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._folder = folder
        self._added: OrderedDict[tuple[str, MediaKey], MediaRef] = OrderedDict()

    def add(self, item: MediaItem) -> MediaRef:
        """Check a media file and store it, unless the store has it already.

        Raises:
            MediaError: The file is missing, invalid, or not supported by the model; the text names
                it.
            ObjectError: The store failed.
        """
        folder = self._folder()
        if (reference := self._added.get((folder, item.key))) is not None:
            return reference
        data = item.read(self._limits)
        facts = self._check_and_process(data, item).reference
        stored = self._open_store(RUN_STORE).put(
            data, suffix=mimetypes.guess_extension(facts.media_type) or "", folder=folder
        )
        self._added[folder, item.key] = reference = replace(facts, uri=stored.uri)
        if len(self._added) > MAX_CACHED_REFERENCES:
            self._added.popitem(last=False)
        return reference

    def preprocess(self, item: MediaItem) -> ProcessedMedia:
        """Check and preprocess a media file without storing it; the URI of its reference is its
        location in the data.

        Raises:
            MediaError: As for `add`.
        """
        return self._check_and_process(item.read(self._limits), item)

    def _check_and_process(self, data: bytes, item: MediaItem) -> ProcessedMedia:
        """Check and preprocess; a truncated file fails here, before its row is issued."""
        self._require_layout()
        facts = self._decoder.inspect(data, item.modality, location=item.location)
        reference = MediaRef(
            item.location, sha256(data).digest(), num_bytes=len(data), **asdict(facts)
        )
        return self._process(reference, data)

    def load(self, reference: MediaRef) -> ProcessedMedia:
        """Return a preprocessed media file.

        Raises:
            MediaError: The file is missing, was modified, or doesn't match its reference; the text
                names it.
            ObjectError: The store failed.
        """
        name = self._cache_key(reference)
        if (processed := self._memory.get(name)) is not None:
            self._memory.move_to_end(name)
            return processed
        self._memory[name] = processed = self._process(reference)
        total = sum(piece.nbytes for piece in self._memory.values())
        while total > MEMORY_BYTES and len(self._memory) > 1:
            total -= self._memory.popitem(last=False)[1].nbytes
        return processed

    def prefetch(self, references: Iterable[MediaRef]) -> None:
        """Preprocess media files into this machine's cache, unless it has them; errors as for
        `load`.
        """
        for reference in references:
            name = self._cache_key(reference)
            if name not in self._memory and not self._cache.contains(name):
                self._process(reference)

    def require_fit(
        self,
        tokens: NDArray[np.generic],
        is_input: Bool[np.ndarray, " tokens"],
        media: Sequence[MediaRef],
    ) -> None:
        """Reject a token sequence whose placeholders don't match its media.

        Args:
            tokens: Prompt and completion.
            is_input: True for each token that the policy did not sample.
            media: The media files, in the order of the sequence.
        Raises:
            PoisonSample: There are more or fewer placeholders than media tokens, or of other
                modalities, or the model reads text only.
        """
        if media:
            self._require_layout().find_media_tokens(tokens, is_input, media)

    def _require_layout(self) -> MediaLayout:
        if self._layout is None:
            raise MediaError(
                (
                    "the model reads text only, and the prompt has media; use a model of a "
                    "family that reads them"
                ),
                reason="text_model",
            )
        return self._layout

    def find_sample_rate(self, reference: MediaRef) -> int:
        """Return the rate, in hertz, at which the model reads a medium's audio."""
        return self._preprocessor_for(reference).plan(reference).rate_hertz

    def _preprocessor_for(self, reference: MediaRef) -> MediaPreprocessor:
        return self._require_layout().preprocessor_for(reference)

    def _cache_key(self, reference: MediaRef) -> str:
        """Build the cache key: content, facts of the reference, and preprocessing settings."""
        values = (reference.width, reference.height, reference.num_frames, reference.rate_hertz)
        facts = "x".join(str(value) for value in values if value is not None)
        return f"{reference.digest.hex()}-{facts}-{self._preprocessor_for(reference).digest}"

    def _process(self, reference: MediaRef, data: bytes | None = None) -> ProcessedMedia:
        """Return the preprocessed media, from the machine's cache or from the file, which is
        fetched if needed.
        """
        plan = self._preprocessor_for(reference).plan(reference)

        def make() -> bytes:
            file = self._fetch_and_check(reference) if data is None else data
            return self._decoder.decode(
                file, read_modality(reference), plan, location=reference.uri
            )

        return _split_arrays(reference, plan, self._cache.get(self._cache_key(reference), make))

    def fetch_file(self, reference: MediaRef) -> bytes:
        """Fetch an original file and verify it; errors as for `load`."""
        if reference.num_bytes > self._limits.max_item_bytes:
            raise MediaError(
                f"{reference.uri} must be at most model.media.max_item_bytes = "
                f"{self._limits.max_item_bytes}, got {reference.num_bytes} bytes",
                reason="too_large",
            )
        root = next(
            (
                root
                for root in self._config.objects.allowed_roots
                if reference.uri.startswith(root.rstrip("/") + "/")
            ),
            RUN_STORE,
        )
        try:
            data = self._open_store(root).get(
                ObjectRef(reference.uri, reference.digest, reference.num_bytes)
            )
        except ObjectError as error:
            if error.__cause__ is None:
                raise MediaError(str(error), reason="altered") from None
            if isinstance(error.__cause__, FileNotFoundError):
                raise MediaError(str(error), reason="vanished") from None
            raise
        return data

    def _fetch_and_check(self, reference: MediaRef) -> bytes:
        """Fetch, verify and check."""
        data = self.fetch_file(reference)
        self._require_match(reference, data)
        return data

    def _require_match(self, reference: MediaRef, data: bytes) -> None:
        """Reject a file that differs from its reference, which determined its number of tokens."""
        facts = self._decoder.inspect(data, read_modality(reference), location=reference.uri)
        extent = replace(reference, **asdict(facts)).extent
        if extent != reference.extent:
            raise MediaError(
                f"{reference.uri} is {extent}, but its reference has {reference.extent}",
                reason="wrong_size",
            )

    def _open_store(self, root: str) -> ObjectStore:
        if root not in self._stores:
            uri, uri_aliases = (
                (root, ()) if root else (self._config.objects_uri, self._config.objects.uri_aliases)
            )
            self._stores[root] = ObjectStore.open(uri, uri_aliases=uri_aliases)
        return self._stores[root]


def _split_arrays(
    reference: MediaRef, plan: DecodePlan, content: bytes | memoryview
) -> ProcessedMedia:
    """Split the decoder's output into arrays; they are writable, as torch requires."""
    buffer = bytearray(content)
    first = np.frombuffer(buffer, plan.dtype, count=int(np.prod(plan.shape))).reshape(plan.shape)
    if read_modality(reference) is Modality.AUDIO:
        return ProcessedMedia(reference, samples=first)
    samples = np.frombuffer(buffer, np.float32, offset=plan.num_bytes) if plan.num_samples else None
    return ProcessedMedia(reference, pixels=first, samples=samples)


class LibraryThreads:
    """Threads that read, store and load media; each has a library of its own."""

    def __init__(self, libraries: Callable[[], MediaLibrary], *, size: int, name: str) -> None:
        """Start no thread yet.

        Args:
            libraries: Opens a library of the run's media.
            size: Number of threads.
            name: Prefix of the threads' names.
        """
        self._libraries, self._local = libraries, threading.local()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def run(self, work: Callable[[MediaLibrary], Result]) -> Result:
        """Run a function with a library in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: work(self._open_library())
        )

    def close(self) -> None:
        """End the threads after the work that they have begun."""
        self._threads.shutdown(cancel_futures=True)

    def _open_library(self) -> MediaLibrary:
        if not hasattr(self._local, "library"):
            self._local.library = self._libraries()
        library: MediaLibrary = self._local.library
        return library
