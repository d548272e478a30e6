"""The section `model.media`: which pictures are taken, and how the model is shown them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section


class MediaConfig(Section):
    """Engine, scorers and trainer process by the same settings, so that all of them see the same pixels."""

    image_min_token_num: Positive = 4
    """Tokens of a picture at least: a smaller one is enlarged."""
    image_max_token_num: Positive = 16_384
    """Tokens of a picture at most: a larger one is reduced."""
    image_resize_scale_factor: Annotated[int, Field(ge=0)] = 1
    """Sides are brought to multiples of so many tokens' width. 0 resizes nothing: pictures must then have such sides already."""
    max_item_bytes: Positive = 20 * 1024**2
    """Of one file; larger ones are refused unread."""
    fetch_seconds: Seconds = 30.0
    """For one file by web address, redirects and all."""
    max_image_pixels: Positive = 64 * 1024**2
    """Of one picture as it comes; one that claims more is refused before it is decoded."""
    cache_bytes: Positive = 4 * 1024**3
    """Of processed media that the workers of a machine share on disk, below the run's directory; the longest unused go first."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> MediaConfig:
        if self.image_max_token_num < self.image_min_token_num:
            rule = f"image_max_token_num must be at least image_min_token_num = {self.image_min_token_num}"
            raise ValueError(f"{rule}, got {self.image_max_token_num}; set model.media.image_max_token_num")
        return self
