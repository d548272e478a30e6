"""The section `model.media`: which media are taken, and how the model is shown them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section

BOUNDS = (
    ("image_min_token_num", "image_max_token_num"),
    ("video_min_token_num", "video_max_token_num"),
    ("video_fps_min_frames", "video_fps_max_frames"),
    ("frame_factor", "video_fps_max_frames"),
)


class MediaConfig(Section):
    """Engine, scorers and trainer process by the same settings, so that all of them see and hear
    the same.
    """

    image_min_token_num: Positive = 4
    """Tokens of a picture at least: a smaller one is enlarged."""
    image_max_token_num: Positive = 16_384
    """Tokens of a picture at most: a larger one is reduced."""
    image_resize_scale_factor: Annotated[int, Field(ge=0)] = 1
    """Sides are brought to multiples of so many tokens' width. 0 resizes nothing: pictures and
    frames must then have such sides already."""
    video_fps: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Frames that the model is shown of each second of a clip, evenly spread over the whole of
    it."""
    video_fps_min_frames: Positive = 4
    """Of a clip at least, unless it has fewer."""
    video_fps_max_frames: Positive = 768
    """Of a clip at most."""
    frame_factor: Positive = 2
    """The number of frames is brought down to a multiple of this."""
    video_min_token_num: Positive = 128
    """Tokens of a frame at least: a smaller one is enlarged. A model that looks at several frames
    at a time makes so many of all of them."""
    video_max_token_num: Positive = 768
    """Tokens of a frame at most: a larger one is reduced."""
    use_audio_in_video: bool = False
    """Let the model hear a clip as well, where its family can; every clip must then have sound."""
    audio_sample_rate: Positive = 16_000
    """What sounds are brought to, in hertz and on one channel; the model must have been made for
    it."""
    max_item_bytes: Positive = 20 * 1024**2
    """Of one file; larger ones are refused unread."""
    fetch_seconds: Seconds = 30.0
    """For one file by web address, redirects and all."""
    max_image_pixels: Positive = 64 * 1024**2
    """Of one picture or frame as it comes; one that claims more is refused before it is decoded."""
    max_media_seconds: Seconds = 600.0
    """Length of one sound or clip; a longer one is refused."""
    max_video_frames: Positive = 100_000
    """Of one clip as it comes."""
    decode_seconds: Seconds = 60.0
    """For decoding one file, in a process of its own that is ended when it takes longer."""
    decode_bytes: Annotated[int, Field(ge=512 * 1024**2)] = 4 * 1024**3
    """Memory that this process may take."""
    cache_bytes: Positive = 4 * 1024**3
    """Of processed media that the workers of a machine share on disk, below the run's directory;
    the longest unused go first."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> MediaConfig:
        for low, high in BOUNDS:
            if getattr(self, high) < getattr(self, low):
                rule = f"{high} must be at least {low} = {getattr(self, low)}"
                raise ValueError(f"{rule}, got {getattr(self, high)}; set model.media.{high}")
        return self
