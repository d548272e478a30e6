"""Facts of a media file, and checks of its limits."""

from __future__ import annotations

from dataclasses import dataclass

from relax_events.config.media import MediaConfig
from relax_events.errors import MediaError


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Facts of a file, as in its reference.

    Width and height are those of the upright image. `num_frames` and `rate_hertz` are of a video's
    frames, or of audio samples.
    """

    media_type: str
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    rate_hertz: float | None = None


def broken_file(location: str, error: object) -> MediaError:
    """Build the error of a truncated or damaged file."""
    return MediaError(f"{location} is truncated or damaged: {error}", reason="truncated")


def require_bytes(data: bytes, limits: MediaConfig, location: str) -> None:
    """Reject a file that is too large.

    Raises:
        MediaError: It exceeds the limit.
    """
    if len(data) > limits.max_item_bytes:
        raise MediaError(
            (
                f"{location} must be at most model.media.max_item_bytes = {limits.max_item_bytes}, "
                f"got {len(data)} bytes"
            ),
            reason="too_large",
        )


def require_pixels(width: int, height: int, limits: MediaConfig, location: str) -> None:
    """Reject an image or frame with too many pixels.

    Raises:
        MediaError: It exceeds the limit.
    """
    if (pixels := width * height) > limits.max_image_pixels:
        raise MediaError(
            f"{location} must have at most model.media.max_image_pixels = "
            f"{limits.max_image_pixels}, got {width} x {height} = {pixels}",
            reason="too_many_pixels",
        )


def require_seconds(seconds: float, limits: MediaConfig, location: str) -> None:
    """Reject audio or video that is too long.

    Raises:
        MediaError: It exceeds the limit.
    """
    if seconds > limits.max_media_seconds:
        raise MediaError(
            f"{location} must take at most model.media.max_media_seconds = "
            f"{limits.max_media_seconds:g}, got {seconds:g}",
            reason="too_long",
        )
