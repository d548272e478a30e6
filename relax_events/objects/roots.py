"""Restricts media references on the log to the run's object store and to further roots that the run
file allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from relax_events.errors import ObjectError
from relax_events.events.parts import ChatMessage, MediaRef
from relax_events.objects.store import KEY_PATTERN


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
                rule = (
                    f"media must lie under {' or '.join(self.roots)}, without '..' or other detours"
                )
                raise ObjectError(
                    f"{rule}, got {media.uri!r}; add its root to objects.allowed_roots if "
                    "the run may read there"
                )

    def _contains(self, uri: str) -> bool:
        # The rest of the URI must match our object keys, which excludes '..' and encoded forms of
        # it.
        return any(
            uri.startswith(root) and KEY_PATTERN.fullmatch(uri.removeprefix(root))
            for root in self.roots
        )


def list_media(event: Any) -> list[MediaRef]:
    """Return all media references of an event, in order."""
    said = (*getattr(event, "messages", ()), *getattr(event, "turns", ()))
    return [*getattr(event, "media", ()), *list_message_media(said)]


def list_message_media(messages: Iterable[ChatMessage]) -> list[MediaRef]:
    """Return the media references of a conversation, in order."""
    return [part.media for message in messages for part in message.parts if part.media is not None]
