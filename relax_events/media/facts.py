"""What a file says of itself, and what is raised when it says something else than it holds."""

from __future__ import annotations

from dataclasses import dataclass

from relax_events.config import MediaConfig
from relax_events.errors import MediaError


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """What a reference tells of a file; width and height as it is to be looked at, frames of a clip
    or sample frames of a sound.
    """

    media_type: str
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    rate_hertz: float | None = None


def broken_file(location: str, error: object) -> MediaError:
    """Make the error of a file that ends early, or whose content is damaged."""
    return MediaError(f"{location} is cut off or broken: {error}", reason="truncated")


def require_bytes(data: bytes, limits: MediaConfig, location: str) -> None:
    """Refuse a large file.

    Raises:
        MediaError: It is larger than the limits let it be.
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
    """Refuse a large picture or frame by what it claims.

    Raises:
        MediaError: It has more pixels than the limits let it have.
    """
    if (pixels := width * height) > limits.max_image_pixels:
        rule = f"model.media.max_image_pixels = {limits.max_image_pixels}"
        raise MediaError(
            f"{location} must have at most {rule}, got {width} x {height} = {pixels}",
            reason="too_many_pixels",
        )


def require_seconds(seconds: float, limits: MediaConfig, location: str) -> None:
    """Refuse a long sound or clip.

    Raises:
        MediaError: It takes longer than the limits let it take.
    """
    if seconds > limits.max_media_seconds:
        rule = f"model.media.max_media_seconds = {limits.max_media_seconds:g}"
        raise MediaError(f"{location} must take at most {rule}, got {seconds:g}", reason="too_long")
