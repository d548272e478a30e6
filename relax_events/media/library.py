"""A run's media, where its workers put them and get them from: every piece is stored once, and
processed once on each machine.

    row of the data --admit--> checks --> arrays into the machine's cache, bytes into the object
    store --> MediaRef on the log MediaRef --processed--> memory, or the machine's cache, or: fetch,
    verify, check, decode --> what the model is shown

What goes wrong with a piece of media is a `MediaError` that names it: it ends one row, or one
prompt group, and nothing else.
"""

from __future__ import annotations

import mimetypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

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
from relax_events.media.token_layout import MediaLayout, modality_of
from relax_events.objects.store import ObjectStore

MEMORY_BYTES = 256 * 1024**2
"""Processed media that one worker keeps in memory."""
MAX_REMEMBERED = 4096
"""References of admitted pieces that are remembered: a row is looked at when it is judged, and
again when it is issued."""
CACHE_FOLDER = "media-cache"
OWN_ROOT = ""
"""Stands for the run's own store among those that a reference may lie in."""


class MediaLibrary:
    """Of a run whose model may read media. Used by one thread."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model_path: Path | None = None,
        store: ObjectStore | None = None,
        folder: Callable[[], str] = lambda: "",
    ) -> None:
        """Read how the model is shown media; where it reads text alone nothing else will be asked
        of the library.

        Args:
            config: The run.
            model_path: Another model than the run's.
            store: The run's object store, where it is open already; else it is opened when
                something is wanted from it.
            folder: Of the store, where the next piece is put.
        Raises:
            ConfigError: The model's settings for media are missing or not known.
        """
        self._config, self._bounds = config, config.model.media
        self._layout = MediaLayout.from_folder(model_path or config.model.path, self._bounds)
        self._decoder = Decoder(self._bounds)
        self._cache = HostCache(
            config.run.directory / CACHE_FOLDER, max_bytes=self._bounds.cache_bytes
        )
        self._stores = {} if store is None else {OWN_ROOT: store}
        self._memory: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._folder = folder
        self._added: OrderedDict[tuple[str, MediaKey], MediaRef] = OrderedDict()

    def add(self, item: MediaItem) -> MediaRef:
        """Check a piece of media and put it into the store; one that is there already is not sent
        again.

        Raises:
            MediaError: It is missing, hostile, or nothing that the model can be shown; the text
                names it.
            ObjectError: The store failed.
        """
        folder = self._folder()
        if (known := self._added.get((folder, item.key))) is not None:
            return known
        data = item.read(self._bounds)
        facts = self._check_and_process(data, item).reference
        stored = self._open_store(OWN_ROOT).put(
            data, suffix=mimetypes.guess_extension(facts.media_type) or "", folder=folder
        )
        self._added[folder, item.key] = reference = replace(facts, uri=stored.uri)
        if len(self._added) > MAX_REMEMBERED:
            self._added.popitem(last=False)
        return reference

    def preprocess(self, item: MediaItem) -> ProcessedMedia:
        """Check a piece of media and return it as the model is shown it; nothing is stored, and its
        address is its place in the data.

        Raises:
            MediaError: As for `admit`.
        """
        return self._check_and_process(item.read(self._bounds), item)

    def _check_and_process(self, data: bytes, item: MediaItem) -> ProcessedMedia:
        """Check and process; a file that is cut off fails here, before its row is issued."""
        self._require_layout()
        facts = self._decoder.inspect(data, item.modality, location=item.location)
        reference = MediaRef(
            item.location, sha256(data).digest(), num_bytes=len(data), **asdict(facts)
        )
        return self._process(reference, data)

    def load(self, reference: MediaRef) -> ProcessedMedia:
        """Return a piece of media as the model is shown it.

        Raises:
            MediaError: It has vanished, was altered, or is not what the reference says; the text
                names it.
            ObjectError: The store failed.
        """
        name = self._cache_key(reference)
        if (known := self._memory.get(name)) is not None:
            self._memory.move_to_end(name)
            return known
        self._memory[name] = processed = self._process(reference)
        total = sum(piece.nbytes for piece in self._memory.values())
        while total > MEMORY_BYTES and len(self._memory) > 1:
            total -= self._memory.popitem(last=False)[1].nbytes
        return processed

    def prefetch(self, references: Iterable[MediaRef]) -> None:
        """See to it that pieces of media are at hand on this machine; errors as for `processed`."""
        for reference in references:
            name = self._cache_key(reference)
            if name not in self._memory and not self._cache.contains(name):
                self._process(reference)

    def require_fit(
        self,
        tokens: NDArray[np.generic],
        given: Bool[np.ndarray, " tokens"],
        media: Sequence[MediaRef],
    ) -> None:
        """Refuse a token sequence that does not hold the placeholders of its media.

        Args:
            tokens: Prompt and completion.
            given: Which of them the policy did not choose.
            media: In the order of the sequence.
        Raises:
            PoisonSample: The placeholders are more, fewer, or of other kinds; or the model reads
                text alone.
        """
        if media:
            self._require_layout().find_media_tokens(tokens, given, media)

    def _require_layout(self) -> MediaLayout:
        if self._layout is None:
            raise MediaError(
                (
                    "the model reads text alone, and the prompt brings media; take a model of a "
                    "family that reads them"
                ),
                reason="text_model",
            )
        return self._layout

    def _preprocessor_for(self, reference: MediaRef) -> MediaPreprocessor:
        return self._require_layout().preprocessor_for(reference)

    def _cache_key(self, reference: MediaRef) -> str:
        """Tell apart what differs in content, in what the reference says of it, or in how it is
        shown.
        """
        said = (reference.width, reference.height, reference.num_frames, reference.rate_hertz)
        facts = "x".join(str(value) for value in said if value is not None)
        return f"{reference.digest.hex()}-{facts}-{self._preprocessor_for(reference).digest}"

    def _process(self, reference: MediaRef, data: bytes | None = None) -> ProcessedMedia:
        """Return what the model is shown, from the machine's cache or from the file, which is
        fetched if it is not at hand.
        """
        plan = self._preprocessor_for(reference).plan(reference)

        def make() -> bytes:
            file = self._fetch_and_check(reference) if data is None else data
            return self._decoder.decode(file, modality_of(reference), plan, location=reference.uri)

        return _split_arrays(reference, plan, self._cache.get(self._cache_key(reference), make))

    def fetch_file(self, reference: MediaRef) -> bytes:
        """Fetch a file as it came, and verify it; errors as for `processed`."""
        if reference.num_bytes > self._bounds.max_item_bytes:
            bound = f"model.media.max_item_bytes = {self._bounds.max_item_bytes}"
            raise MediaError(
                f"{reference.uri} must be at most {bound}, got {reference.num_bytes} bytes",
                reason="too_large",
            )
        root = next(
            (
                root
                for root in self._config.objects.allowed_roots
                if reference.uri.startswith(root.rstrip("/") + "/")
            ),
            OWN_ROOT,
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
        """Refuse a file that is another than its reference says, which its tokens were counted
        by.
        """
        facts = self._decoder.inspect(data, modality_of(reference), location=reference.uri)
        found = replace(reference, **asdict(facts)).extent
        if found != reference.extent:
            raise MediaError(
                f"{reference.uri} is {found}, and its reference says {reference.extent}",
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
    """Take the arrays out of what decoding has left; they may be written to, as torch wants it."""
    whole = bytearray(content)
    first = np.frombuffer(whole, plan.dtype, count=int(np.prod(plan.shape))).reshape(plan.shape)
    if modality_of(reference) is Modality.AUDIO:
        return ProcessedMedia(reference, samples=first)
    samples = np.frombuffer(whole, np.float32, offset=plan.num_bytes) if plan.num_samples else None
    return ProcessedMedia(reference, pixels=first, samples=samples)
