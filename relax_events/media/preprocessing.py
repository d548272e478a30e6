"""Compute how media are preprocessed for a model, from the reference of a file only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from relax_events.config.media import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import MediaRef
from relax_events.media.geometry import ImageGeometry

MIN_FRAMES = 4
"""Of a video that has as many."""
AUDIO_CHUNK_TOKENS = 13
"""Tokens that Qwen3-Omni's audio tower outputs for a full window."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The arrays to decode from a file.

    Attributes:
        shape: Height, width and 3 colours of an image; for a video the number of frames before
            them; for audio the number of samples.
        dtype: uint8 for colours, or float32 for audio samples from -1 to 1.
        frames: Indices of a video's frames, in presentation order.
        num_samples: Samples of a video's audio, as a second array; 0 if it is not used.
        rate_hertz: Sampling rate of audio.
    """

    shape: tuple[int, ...]
    dtype: str
    frames: tuple[int, ...] = ()
    num_samples: int = 0
    rate_hertz: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the first array."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class MediaPreprocessor(Protocol):
    """Preprocessing of one modality."""

    @property
    def digest(self) -> str:
        """Identifies these settings in cache names, in hexadecimal."""
        ...

    def plan(self, media: MediaRef) -> DecodePlan:
        """Return what to decode from a file.

        Raises:
            MediaError: The model can't read it; the text names it.
        """
        ...

    def grid(self, media: MediaRef) -> tuple[int, int, int]:
        """Return a file's number of tokens in time, rows and columns; errors as for `plan`."""
        ...


@dataclass(frozen=True, slots=True)
class ImagePreprocessor:
    """Resizes images to a multiple of the patch size."""

    geometry: ImageGeometry

    @property
    def digest(self) -> str:
        """See `MediaPreprocessor`."""
        return _digest(self)

    def plan(self, media: MediaRef) -> DecodePlan:
        """See `MediaPreprocessor`."""
        return DecodePlan((*self._size(media), 3), "uint8")

    def grid(self, media: MediaRef) -> tuple[int, int, int]:
        """See `MediaPreprocessor`."""
        height, width = self._size(media)
        return 1, height // self.geometry.token_side, width // self.geometry.token_side

    def _size(self, media: MediaRef) -> tuple[int, int]:
        if media.width is None or media.height is None or min(media.width, media.height) < 1:
            raise MediaError(
                f"{media.uri} has no width and height, which determine its tokens",
                reason="no_size",
            )
        try:
            return self.geometry.target_size(media.width, media.height)
        except ValueError as error:
            raise MediaError(
                f"{media.uri} can't be read by the model: {error}", reason="bad_shape"
            ) from None


@dataclass(frozen=True, slots=True)
class AudioPreprocessor:
    """Resamples audio to one rate and one channel; the model reads its log-mel spectrogram.

    Attributes:
        rate_hertz: Sampling rate.
        hop: Samples from one frame of the spectrogram to the next.
        window: Samples of a frame.
        chunk: Frames that the tower processes together.
    """

    rate_hertz: int
    hop: int
    window: int
    chunk: int

    @classmethod
    def from_settings(cls, extractor: Mapping[str, Any], tower: Mapping[str, Any]) -> Self:
        """Read rate and spectrogram settings from a model's `preprocessor_config.json`, and the
        tower's window from its `config.json`.
        """
        rate = int(extractor.get("sampling_rate", 16_000))
        return cls(
            rate, int(extractor["hop_length"]), int(extractor["n_fft"]), 2 * int(tower["n_window"])
        )

    @property
    def digest(self) -> str:
        """See `MediaPreprocessor`."""
        return hashlib.sha256(f"sound/{self.rate_hertz}".encode()).hexdigest()[:16]

    def plan(self, media: MediaRef) -> DecodePlan:
        """See `MediaPreprocessor`."""
        return DecodePlan((self.num_samples(media),), "float32", rate_hertz=self.rate_hertz)

    def grid(self, media: MediaRef) -> tuple[int, int, int]:
        """See `MediaPreprocessor`."""
        return self.num_tokens(self.num_samples(media)), 1, 1

    def num_samples(self, media: MediaRef) -> int:
        """Return the number of samples of an audio file, or of a video's audio, at the model's
        rate. Errors as for `plan`.
        """
        total, rate = _frames_and_rate(media)
        num_samples = -int(-total * self.rate_hertz // rate)
        if num_samples < self.window:
            raise MediaError(
                f"{media.uri} can't be read by the model: audio must have at least "
                f"{self.window / self.rate_hertz:g} s, got {total / rate:g} s",
                reason="bad_shape",
            )
        return num_samples

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of features of the audio tower. Source:
        `_get_feat_extract_output_lengths` of Qwen3-Omni.
        """
        whole, rest = divmod(num_samples // self.hop, self.chunk)
        for _ in range(3):
            rest = (rest + 1) // 2
        return whole * AUDIO_CHUNK_TOKENS + rest


@dataclass(frozen=True, slots=True)
class VideoPreprocessor:
    """Samples frames evenly over a video; several frames make the tokens of one temporal patch. If
    `audio` is set, it preprocesses the video's audio.
    """

    frame: ImagePreprocessor
    fps: float
    min_frames: int
    max_frames: int
    factor: int
    audio: AudioPreprocessor | None = None

    @classmethod
    def from_settings(
        cls,
        image: ImagePreprocessor,
        config: MediaConfig,
        *,
        audio: AudioPreprocessor | None = None,
    ) -> Self:
        """Preprocess frames like images, within the run file's limits for video.

        Args:
            image: Preprocessing of images.
            config: The limits.
            audio: Preprocessing of a video's audio; None to ignore it.
        """
        frames_per_patch, token_pixels = (
            image.geometry.temporal_patch_size,
            image.geometry.token_side**2,
        )
        min_pixels, max_pixels = (
            config.video_min_token_num * token_pixels,
            config.video_max_token_num * token_pixels,
        )
        frame = ImagePreprocessor(
            replace(image.geometry, min_pixels=min_pixels, max_pixels=max_pixels)
        )
        return cls(
            frame,
            config.video_fps,
            MIN_FRAMES,
            config.video_fps_max_frames,
            frames_per_patch,
            audio,
        )

    @property
    def digest(self) -> str:
        """See `MediaPreprocessor`."""
        return _digest(self)

    def plan(self, media: MediaRef) -> DecodePlan:
        """See `MediaPreprocessor`."""
        frames = self._frames(media)
        shape = (len(frames), *self.frame.plan(media).shape)
        if self.audio is None:
            return DecodePlan(shape, "uint8", frames=frames)
        return DecodePlan(
            shape,
            "uint8",
            frames=frames,
            num_samples=self.audio.num_samples(media),
            rate_hertz=self.audio.rate_hertz,
        )

    def grid(self, media: MediaRef) -> tuple[int, int, int]:
        """See `MediaPreprocessor`."""
        _, rows, columns = self.frame.grid(media)
        return len(self._frames(media)) // self.frame.geometry.temporal_patch_size, rows, columns

    def num_audio_tokens(self, media: MediaRef) -> int:
        """Return the number of tokens of a video's audio; 0 if it is not used."""
        return 0 if self.audio is None else self.audio.num_tokens(self.audio.num_samples(media))

    @property
    def temporal_patch_seconds(self) -> float:
        """Seconds between two temporal patches in the model's time, independent of the video's
        number of frames.
        """
        return self.frame.geometry.temporal_patch_size / self.fps

    def timestamps(self, media: MediaRef) -> list[float]:
        """Return the time of each temporal patch from the start of the video: half way between its
        first and last frame.
        """
        frames_per_patch, (_, rate) = (
            self.frame.geometry.temporal_patch_size,
            _frames_and_rate(media),
        )
        frames = self._frames(media)
        return [
            (frames[first] / rate + frames[first + frames_per_patch - 1] / rate) / 2
            for first in range(0, len(frames), frames_per_patch)
        ]

    def _frames(self, media: MediaRef) -> tuple[int, ...]:
        """Choose frames; a video with too few repeats them. Source: `smart_nframes` of
        qwen-vl-utils.
        """
        total, rate = _frames_and_rate(media)
        target = min(max(total / rate * self.fps, self.min_frames), self.max_frames, total)
        count = max(self.factor, int(target // self.factor) * self.factor)
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())


def _frames_and_rate(media: MediaRef) -> tuple[int, float]:
    """Return the number of frames or samples of a file, and its rate."""
    if not media.num_frames or not media.rate_hertz or min(media.num_frames, media.rate_hertz) <= 0:
        raise MediaError(
            f"{media.uri} has no number and rate of frames, which determine its tokens",
            reason="no_size",
        )
    return media.num_frames, media.rate_hertz


def _digest(preprocessor: Any) -> str:
    return hashlib.sha256(repr(astuple(preprocessor)).encode()).hexdigest()[:16]
