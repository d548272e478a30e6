"""Check video files, counting frames without decoding, and decode the requested frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from relax_events.config.media import MediaConfig
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.av_files import OpenedStream, open_stream, require_whole
from relax_events.media.facts import MediaFacts, broken_file, require_pixels, require_seconds
from relax_events.media.images import Pixels, resize
from relax_events.media.preprocessing import DecodePlan

if TYPE_CHECKING:
    from PIL.Image import Image

REVERSE_ROTATIONS = {0: None, 90: "ROTATE_90", 180: "ROTATE_180", 270: "ROTATE_270"}
"""Pillow's name of the reverse rotation, by the rotation of the camera in degrees, both
counterclockwise.
"""
MAX_RATE_HERTZ = 1_000
MAX_VIDEO_FRAMES = 100_000
"""Of one video, before sampling."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """A video's frames in presentation order.

    Attributes:
        times: Time of each frame, in the stream's unit.
        keys: Times of key frames, ascending.
    """

    times: list[int]
    keys: list[int]


def inspect_video(data: bytes, *, limits: MediaConfig, location: str) -> MediaFacts:
    """Check a video, count its frames, and decode the first one for its orientation.

    Raises:
        MediaError: As for `av_files.open_stream`, or the file has too many frames or pixels, is too
            long, truncated or damaged.
    """
    with open_stream(data, Modality.VIDEO, limits=limits, location=location) as opened:
        _require_size(opened, limits, location)
        table = _read_frame_table(opened, limits, location)
        rate = _read_rate(opened, location)
        require_seconds(len(table.times) / rate, limits, location)
        require_whole(opened, len(table.times) / rate, location=location)
        ((_, first),) = _decode_frames(opened, table, [0], location)
        return MediaFacts(
            opened.media_type,
            *rotate_upright(first).size,
            num_frames=len(table.times),
            rate_hertz=rate,
        )


def decode_video(
    data: bytes, *, plan: DecodePlan, limits: MediaConfig, location: str
) -> UInt8[np.ndarray, "frames height width 3"]:
    """Decode the frames of a plan, upright and at its size; skip frames that they don't depend on.

    Raises:
        MediaError: As for `inspect_video`, or a frame is damaged.
    """
    pixels: dict[int, Pixels] = {}
    with open_stream(data, Modality.VIDEO, limits=limits, location=location) as opened:
        _require_size(opened, limits, location)
        table = _read_frame_table(opened, limits, location)
        indices = sorted(set(plan.frames))
        if indices[-1] >= len(table.times):
            raise MediaError(
                f"{location} has {len(table.times)} frames, but its reference has more",
                reason="wrong_size",
            )
        for index, frame in _decode_frames(opened, table, indices, location):
            pixels[index] = resize(rotate_upright(frame), (plan.shape[1], plan.shape[2]))
    return np.stack([pixels[index] for index in plan.frames])


def _read_frame_table(opened: OpenedStream, limits: MediaConfig, location: str) -> FrameTable:
    times, keys = [], []
    for packet in opened.container.demux(opened.stream):
        if packet.size and packet.pts is not None and not packet.is_discard:
            times.append(packet.pts)
            keys += [packet.pts] if packet.is_keyframe else []
        if len(times) > MAX_VIDEO_FRAMES:
            raise MediaError(
                f"{location} must have at most {MAX_VIDEO_FRAMES} frames, got more",
                reason="too_many_frames",
            )
    if not times or (opened.stream.frames and len(times) < opened.stream.frames):
        raise broken_file(
            location,
            f"its header claims {opened.stream.frames or 'some'} frames, but it has {len(times)}",
        )
    return FrameTable(sorted(times), sorted(keys))


def _read_rate(opened: OpenedStream, location: str) -> float:
    rate = float(opened.stream.average_rate or 0)
    if not 0 < rate <= MAX_RATE_HERTZ:
        raise MediaError(
            f"{location}: a video must have at most {MAX_RATE_HERTZ} frames per second, got "
            f"{rate:g}",
            reason="bad_shape",
        )
    return rate


def _decode_frames(
    opened: OpenedStream, table: FrameTable, indices: list[int], location: str
) -> Iterator[tuple[int, Any]]:
    """Decode frames by ascending index: seek to the last key frame before each, unless the decoder
    is already past it.
    """
    frames: Iterator[Any] | None = None
    reached = 0
    for index in indices:
        time = table.times[index]
        key = max((key for key in table.keys if key <= time), default=table.times[0])
        if frames is None or key > reached:
            opened.container.seek(key, stream=opened.stream, backward=True)
            frames = opened.container.decode(opened.stream)
        frame = next(
            (frame for frame in frames if frame.pts is not None and frame.pts >= time), None
        )
        if frame is None or frame.is_corrupt:
            raise broken_file(location, f"frame {index} can't be decoded")
        reached = frame.pts
        yield index, frame


def rotate_upright(frame: Any) -> Image:
    """Return a frame in upright orientation."""
    try:
        from PIL.Image import Transpose
    except ImportError as error:
        raise EnvironmentProblem(
            f"video needs the package pillow ({error}); install relax-events[media]"
        ) from None
    image: Image = frame.to_image()
    rotation = REVERSE_ROTATIONS.get(int(frame.rotation) % 360)
    return image if rotation is None else image.transpose(Transpose[rotation])


def _require_size(opened: OpenedStream, limits: MediaConfig, location: str) -> None:
    context = opened.stream.codec_context
    if min(context.width, context.height) < 1:
        raise broken_file(location, f"its frames are {context.width} x {context.height}")
    require_pixels(context.width, context.height, limits, location)
