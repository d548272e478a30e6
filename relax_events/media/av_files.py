"""Open audio and video files strictly by the format of their first bytes.

The library supports over a hundred formats, including playlists that name files and URLs. Only a
few formats are accepted here, and names within a file are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from relax_events.config.media import MediaConfig
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.facts import broken_file, require_bytes, require_seconds

if TYPE_CHECKING:
    from av.container import InputContainer

WEBM = b"webm"
HEAD_BYTES = 4096
MICROSECONDS = 1_000_000
FIRST_LENIENT_VERSION = 19  # of PyAV
MIN_CLAIMED_RATIO, CLAIMED_TOLERANCE_SECONDS = 0.95, 0.25
"""The minimum share of the duration in the header, and a tolerance: headers round, and codecs begin
with silence.
"""
NAMES = {
    "mov": "mp4",
    "matroska": "x-matroska",
    "avi": "x-msvideo",
    "wav": "x-wav",
    "mp3": "mpeg",
    "flac": "flac",
    "ogg": "ogg",
}
KINDS = {
    Modality.AUDIO: "WAV, FLAC, MP3, Ogg, MP4, Matroska, WebM",
    Modality.VIDEO: "MP4, WebM, Matroska, AVI, Ogg",
}


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """The first audio or video stream of a file.

    Attributes:
        container: The file.
        stream: The stream of the requested modality.
        media_type: Media type of the file, for that modality.
        claimed_seconds: Duration in the file's header; 0 if it has no reliable one.
    """

    container: InputContainer
    stream: Any
    media_type: str
    claimed_seconds: float


def detect_format(head: bytes) -> str | None:
    """Return a file's format by its first bytes, in the library's terms; None if it is not
    supported.
    """
    if head[:4] == b"RIFF":
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "mov"
    signatures = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "matroska", b"ID3": "mp3"}
    if (
        file_format := next(
            (name for begin, name in signatures.items() if head.startswith(begin)), None
        )
    ) is not None:
        return file_format
    return (
        "mp3"
        if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 in (0xE2, 0xE4, 0xE6)
        else None
    )


@contextmanager
def open_stream(
    data: bytes, modality: Modality, *, limits: MediaConfig, location: str
) -> Iterator[OpenedStream]:
    """Open a file and find its audio or video stream; library errors while it is open are reported
    as a truncated or damaged file.

    Args:
        data: The file.
        modality: The requested stream.
        limits: Limits of bytes and seconds.
        location: For errors.
    Raises:
        MediaError: It is too large or too long, of no supported format, has no stream of the
            modality, or is damaged.
    """
    require_bytes(data, limits, location)
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(
            f"audio and video need the package av ({error}); install relax-events[media]"
        ) from None
    kind = detect_format(data[:HEAD_BYTES])
    if kind is None:
        raise MediaError(
            (
                f"{location} begins with {data[:8]!r}, which is not {modality.value} of the "
                f"formats {KINDS[modality]}"
            ),
            reason="wrong_type",
        )
    if (
        kind == "wav"
        and (missing := int.from_bytes(data[4:8], "little") + 8 - len(data)) > 1
        and data[4:8] != b"\xff\xff\xff\xff"
    ):
        raise broken_file(location, f"its header claims {missing} more bytes")
    try:
        with av.open(BytesIO(data), "r", format=kind, **_open_options(av.__version__)) as container:
            yield _find_stream(container, modality, data, location=location, limits=limits)
    except MemoryError:  # the library's MemoryError is also an FFmpegError
        raise
    except (av.FFmpegError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise broken_file(location, error) from None


def _open_options(version: str) -> dict[str, Any]:
    """Return the options with which PyAV opens a file whose tags are not UTF-8; none from version
    19 on.
    """
    return (
        {"metadata_errors": "ignore"}
        if int(version.partition(".")[0]) < FIRST_LENIENT_VERSION
        else {}
    )


def _find_stream(
    container: InputContainer,
    modality: Modality,
    data: bytes,
    *,
    location: str,
    limits: MediaConfig,
) -> OpenedStream:
    kind = container.format.name.partition(",")[0]
    streams: Any = (
        container.streams.audio if modality is Modality.AUDIO else container.streams.video
    )
    if not len(container.streams):
        raise broken_file(location, "it has no streams")
    if not streams:
        raise MediaError(
            f"{location} is a file of format {kind} without {modality.value}", reason="wrong_type"
        )
    if streams[0].codec_context is None:
        raise MediaError(
            f"{location} holds {modality.value} in a codec that the library does not know",
            reason="wrong_type",
        )
    claimed = (container.duration or 0) / MICROSECONDS
    require_seconds(claimed, limits, location)
    is_reliable = kind != "mp3" or any(mark in data[:HEAD_BYTES] for mark in (b"Xing", b"Info"))
    name = "webm" if WEBM in data[:64] else NAMES[kind]
    return OpenedStream(
        container, streams[0], f"{modality.value}/{name}", claimed if is_reliable else 0.0
    )


def require_whole(opened: OpenedStream, seconds: float, *, location: str) -> None:
    """Reject a file that is shorter than its header claims.

    Raises:
        MediaError: It is truncated.
    """
    if seconds < opened.claimed_seconds * MIN_CLAIMED_RATIO - CLAIMED_TOLERANCE_SECONDS:
        raise broken_file(
            location, f"its header claims {opened.claimed_seconds:g} s, but it has {seconds:g} s"
        )
