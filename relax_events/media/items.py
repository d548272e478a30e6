"""The media files of rows and of messages: a path, a tar member, a URL, a data URI or bytes, read
on demand.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from relax_events.config.media import MediaConfig
from relax_events.errors import MediaError, PoisonSample
from relax_events.events.immutable import immutable
from relax_events.events.parts import ContentPart, Modality
from relax_events.media.archives import read_member
from relax_events.media.fetching import WebFetcher
from relax_events.regular_files import open_regular

DATA_URI = "data:"
FILE_URI = "file://"
WEB = ("http://", "https://")
FETCH_SECONDS = 30.0
"""Deadline for fetching a file from a web address, including redirects."""
URL_PARTS = {
    "image_url": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
}
"""Types of parts with an address, in the form of OpenAI's chat and of its extensions."""
AUDIO_PART = "input_audio"
FILE_PARTS = {one.value: one for one in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)}
"""Types of parts in the form of Qwen and transformers, with the file in a key of that name or in
one of `FILE_KEYS`."""
FILE_KEYS = ("url", "path", "bytes")
PART_SETTINGS = frozenset(
    {
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
        *("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"),
    }
)
"""Keys of a part by which Qwen's tools sample and resize its file."""
MediaKey = tuple[bytes, str, Modality, Path | None]


@dataclass(frozen=True, slots=True)
class MediaAccess:
    """The files and hosts that rows may refer to.

    Attributes:
        root: Base folder of paths, outside of which nothing is read; None if rows must not name
            files.
        hosts: Allowed hosts of URLs.
    """

    root: Path | None = None
    hosts: tuple[str, ...] = ()


NO_ACCESS = MediaAccess()


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A media file of a row.

    Attributes:
        modality: The expected modality.
        source: The bytes, a data URI, a URL, or a path.
        location: File, row and column, for errors.
        access: The files and hosts that `source` may refer to.
        member: Member of the tar file at the path; empty for the file itself.
    """

    modality: Modality
    source: str | bytes = field(repr=False)
    location: str
    access: MediaAccess = NO_ACCESS
    member: str = ""

    @property
    def key(self) -> MediaKey:
        """A short unique key of source and modality."""
        named = (
            self.source
            if isinstance(self.source, bytes)
            else self.source.encode(errors="surrogatepass")
        )
        return sha256(named).digest(), self.member, self.modality, self.access.root

    def read(self, limits: MediaConfig) -> bytes:
        """Return the content.

        Args:
            limits: Larger files are rejected before they are read, and slower downloads cancelled.
        Raises:
            MediaError: The file is missing or too large, the data URI is invalid, or the location
                is forbidden.
        """
        max_bytes = limits.max_item_bytes
        if isinstance(self.source, bytes):
            return self._require_size(self.source, max_bytes)
        if self.member:
            return self._read_path(self.source, max_bytes)
        if self.source.startswith(DATA_URI):
            return self._require_size(self._read_data_uri(self.source, max_bytes), max_bytes)
        if self.source.startswith(WEB):
            return WebFetcher(self.access.hosts, max_bytes, FETCH_SECONDS).fetch(
                self.source, location=self.location
            )
        return self._read_path(self.source, max_bytes)

    def _read_data_uri(self, uri: str, max_bytes: int) -> bytes:
        head, comma, text = uri.partition(",")
        if not comma:
            raise MediaError(
                (
                    f"{self.location} is a data URI without a comma, {uri:.40}; write "
                    "data:<type>;base64,<content>"
                ),
                reason="bad_data_uri",
            )
        if (
            len(text) > 3 * max_bytes
        ):  # percent-encoding takes three characters per byte, base64 fewer
            raise self._too_large(f"a data URI of {len(text)} characters", max_bytes)
        try:
            return (
                base64.b64decode(text, validate=True)
                if head.endswith(";base64")
                else unquote_to_bytes(text)
            )
        except binascii.Error as error:
            raise MediaError(
                f"{self.location} is not base64 after {head!r}: {error}", reason="bad_data_uri"
            ) from None

    def _read_path(self, path: str, max_bytes: int) -> bytes:
        if self.access.root is None:
            raise MediaError(
                (
                    f"{self.location} names the file {path!r}, but rows may not name files; set "
                    "media_root next to multimodal_keys"
                ),
                reason="no_root",
            )
        try:
            root, file = self.access.root.resolve(), (self.access.root / path).resolve()
            if not file.is_relative_to(root):
                raise MediaError(
                    f"{self.location} names {path!r}, which is outside of media_root = {root}",
                    reason="outside_root",
                )
            with open_regular(file) as opened:
                if self.member:
                    return read_member(
                        opened, self.member, path=file, max_bytes=max_bytes, location=self.location
                    )
                data = opened.read(max_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            what = getattr(error, "strerror", None) or error
            raise MediaError(
                f"{self.location} names {path!r} in {self.access.root}, which can't be read: "
                f"{what}",
                reason="missing",
            ) from None
        return self._require_size(data, max_bytes)

    def _require_size(self, data: bytes, max_bytes: int) -> bytes:
        if len(data) > max_bytes:
            raise self._too_large(
                "more" if len(data) == max_bytes + 1 else f"{len(data)} bytes", max_bytes
            )
        return data

    def _too_large(self, size: str, max_bytes: int) -> MediaError:
        return MediaError(
            f"{self.location} must be at most model.media.max_item_bytes = {max_bytes}, got {size}",
            reason="too_large",
        )


@immutable(frozen=True, slots=True)
class PendingPart(ContentPart):
    """A media file of a message that is not stored yet."""

    item: MediaItem = field(kw_only=True)


def read_part_item(
    part: Any, *, location: str = "a message", access: MediaAccess = NO_ACCESS
) -> MediaItem:
    """Return the media file of a part of a message.

    Args:
        part: In the form of OpenAI's chat, or of Qwen and transformers.
        location: Of the message, for errors.
        access: The files and hosts that it may refer to.
    Raises:
        PoisonSample: The part is no media file, or has a setting of its own; the text names it.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == AUDIO_PART:
        source, modality = _audio_source(part), Modality.AUDIO
    elif (url_modality := URL_PARTS.get(str(kind))) is not None:
        address, modality = part.get(kind), url_modality
        source = address.get("url") if isinstance(address, Mapping) else address
    elif (file_modality := FILE_PARTS.get(str(kind))) is not None:
        source, modality = _file_source(part, str(kind), location), file_modality
    elif kind == "text":
        raise PoisonSample(
            f"{location} has a part of type 'text' without text, or with a file; make the file a "
            "part of its own"
        )
    else:
        kinds = ", ".join(("text", *URL_PARTS, AUDIO_PART, *FILE_PARTS))
        raise PoisonSample(f"{location} has a part of type {kind!r}; a part is one of {kinds}")
    where = f"{location}: a part of type {kind!r}"
    _refuse_settings(part, where)
    try:
        content, member = _source(source, where), _member(source)
    except MediaError as error:
        raise PoisonSample(str(error)) from None
    if isinstance(content, str):
        content = content.removeprefix(FILE_URI)
    return MediaItem(modality, content, where, access, member)


def _refuse_settings(part: Mapping[str, Any], where: str) -> None:
    """Refuse a part that says how its media are sampled or resized."""
    places = (part, *(value for value in part.values() if isinstance(value, Mapping)))
    if setting := next((key for one in places for key in one if key in PART_SETTINGS), None):
        raise PoisonSample(f"{where} has {setting!r}; settings of media are those of model.media")


def _audio_source(part: Mapping[str, Any]) -> str | None:
    audio = part.get(AUDIO_PART)
    if not isinstance(audio, Mapping) or not isinstance(audio.get("data"), str):
        return None
    return f"data:audio/{audio.get('format', 'wav')};base64,{audio['data']}"


def _file_source(part: Mapping[str, Any], kind: str, location: str) -> Any:
    fields = {key: value for key, value in part.items() if value is not None and key != "type"}
    keys = (kind, *FILE_KEYS)
    if setting := next((key for key in fields if key not in keys), None):
        raise PoisonSample(
            f"{location} has a part of type {kind!r} with {setting!r}; its file is under "
            f"{' or '.join(keys)}, and settings of media are those of model.media"
        )
    if len(fields) > 1:
        raise PoisonSample(
            f"{location} has a part of type {kind!r} with {' and '.join(fields)}; keep one of them"
        )
    if not fields:
        raise PoisonSample(
            f"{location} has a part of type {kind!r} without a file; name the column of its files "
            "in data.multimodal_keys"
        )
    return next(fields[key] for key in keys if key in fields)


def read_items(
    value: Any, *, modality: Modality, location: str, access: MediaAccess = NO_ACCESS
) -> list[MediaItem]:
    """Read a column's value: one media file, a list of them, or null for none.

    Raises:
        MediaError: The value is none of these; the text names it.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [
        MediaItem(
            modality,
            _source(one, f"{location}[{index}]"),
            f"{location}[{index}]",
            access,
            _member(one),
        )
        for index, one in enumerate(values)
    ]


def _member(value: Any) -> str:
    return (
        str(value.get("member") or "") if isinstance(value, dict) and not value.get("bytes") else ""
    )


def _source(value: Any, location: str) -> str | bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | bytes) and value:
        return value
    raise MediaError(
        f"{location} is a {type(value).__name__}; media are paths, URLs, data URIs, bytes, or "
        "objects with one of the keys bytes and path, and optionally member",
        reason="wrong_type",
    )
