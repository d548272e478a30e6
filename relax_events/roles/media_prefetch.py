"""Brings media to this machine before an engine is asked about them: a long clip takes seconds to
decode, in which others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from relax_events.events.parts import MediaRef
from relax_events.media.library import MediaLibrary


class MediaPrefetcher:
    """Fetches, checks and decodes in a thread of its own, in the order of asking, into the
    machine's cache.
    """

    def __init__(self, library: MediaLibrary, *, on_arrival: Callable[[], None]) -> None:
        """Begin with nothing to do.

        Args:
            library: This thread's alone.
            on_arrival: Is called from that thread when what was asked for is there, or can't be
                had.
        """
        self._library, self._on_arrival = library, on_arrival
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media")

    def prefetch(self, references: Sequence[MediaRef]) -> Future[None] | None:
        """Begin to bring media; None where there are none. The result raises as
        `MediaLibrary.processed`.
        """
        if not references:
            return None
        coming = self._thread.submit(self._library.prefetch, references)
        coming.add_done_callback(lambda _: self._on_arrival())
        return coming

    def close(self) -> None:
        """Leave what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
