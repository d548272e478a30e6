"""Prefetches media, so that the engine generates other prompt groups while a video is decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from relax_events.events.parts import MediaRef
from relax_events.media.library import MediaLibrary


class MediaPrefetcher:
    """Fetches, checks and decodes media in a thread, in the order of the calls, into the
    machine's cache.
    """

    def __init__(self, library: MediaLibrary, *, on_arrival: Callable[[], None]) -> None:
        """Start without any fetch.

        Args:
            library: Used by the thread only.
            on_arrival: Called from that thread when media are fetched or failed.
        """
        self._library, self._on_arrival = library, on_arrival
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media")

    def prefetch(self, references: Sequence[MediaRef]) -> Future[None] | None:
        """Start to fetch media; None without references. The result raises as
        `MediaLibrary.processed`.
        """
        if not references:
            return None
        coming = self._thread.submit(self._library.prefetch, references)
        coming.add_done_callback(lambda _: self._on_arrival())
        return coming

    def close(self) -> None:
        """Drop fetches that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
