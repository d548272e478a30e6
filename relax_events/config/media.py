"""The section `model.media`: which media are taken, and how the model is shown them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section

BOUNDS = (
    ("image_min_token_num", "image_max_token_num"),
    ("video_min_token_num", "video_max_token_num"),
)


class MediaConfig(Section):
    """Media preprocessing. Engine, scorers and trainer use the same settings, so all of them get
    the same inputs.
    """

    image_min_token_num: Positive = 4
    """Minimum tokens of an image; a smaller image is enlarged."""
    image_max_token_num: Positive = 16_384
    """Maximum tokens of an image; a larger image is reduced."""
    image_resize_scale_factor: Annotated[int, Field(ge=0)] = 1
    """Image sides are resized to multiples of this many tokens' width. 0 disables resizing: images
    and frames must then have such sides already."""
    video_fps: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Frames sampled per second of a video, evenly spread over its whole length."""
    video_fps_max_frames: Annotated[int, Field(ge=4)] = 768
    """Maximum frames of a video; at least 4 are taken, unless it has fewer."""
    video_min_token_num: Positive = 128
    """Minimum tokens of a video frame; a smaller frame is enlarged. Models with temporal patches
    make this many tokens of each patch."""
    video_max_token_num: Positive = 768
    """Maximum tokens of a video frame; a larger frame is reduced."""
    use_audio_in_video: bool = False
    """Feed the audio track of videos to the model, where its family supports it; every video must
    then have one."""
    max_item_bytes: Positive = 20 * 1024**2
    """Maximum size of one file; a larger file is rejected before it is read."""
    max_image_pixels: Positive = 64 * 1024**2
    """Maximum pixels of one image or frame before resizing; a larger one is rejected before it is
    decoded."""
    max_media_seconds: Seconds = 600.0
    """Maximum length of one audio file or video."""
    decode_seconds: Seconds = 60.0
    """Deadline for decoding one file, in a separate process that is killed after it."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> MediaConfig:
        for low, high in BOUNDS:
            if getattr(self, high) < getattr(self, low):
                raise ValueError(
                    f"{high} must be at least {low} = {getattr(self, low)}, got "
                    f"{getattr(self, high)}; set model.media.{high}"
                )
        return self
