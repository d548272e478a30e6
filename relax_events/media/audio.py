"""Check and decode audio files: count samples, resample and mix to one channel. Write WAV files."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from relax_events.config.media import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media.av_files import OpenedStream, open_stream, require_whole
from relax_events.media.facts import MediaFacts, broken_file, require_seconds
from relax_events.media.preprocessing import DecodePlan

RATES = range(1_000, 768_001)
MAX_CHANNELS = 64


def inspect_audio(data: bytes, *, limits: MediaConfig, location: str) -> MediaFacts:
    """Check an audio file and count its samples, which compressed formats don't store.

    Raises:
        MediaError: As for `av_files.open_stream`, or the file is too long, truncated, damaged, or
            of an unsupported rate.
    """
    with open_stream(data, Modality.AUDIO, limits=limits, location=location) as opened:
        rate, total = _read_rate(opened, location), 0
        for frame in opened.container.decode(opened.stream):
            total += frame.samples
            require_seconds(total / rate, limits, location)
        if not total:
            raise broken_file(location, "it holds no audio")
        require_whole(opened, total / rate, location=location)
        return MediaFacts(opened.media_type, num_frames=total, rate_hertz=float(rate))


def decode_audio(
    data: bytes, *, plan: DecodePlan, limits: MediaConfig, location: str
) -> Float32[np.ndarray, " samples"]:
    """Decode an audio file, mixed to one channel, at the plan's rate; the end is truncated or
    padded with silence.

    Raises:
        MediaError: As for `inspect_audio`.
    """
    return decode_samples(
        data,
        num_samples=plan.shape[0],
        rate_hertz=plan.rate_hertz,
        limits=limits,
        location=location,
    )


def decode_samples(
    data: bytes, *, num_samples: int, rate_hertz: int, limits: MediaConfig, location: str
) -> Float32[np.ndarray, " samples"]:
    """Decode the first `num_samples` samples of an audio file or of a video's audio.

    Raises:
        MediaError: As for `inspect_audio`.
    """
    samples, count = np.zeros(num_samples, np.float32), 0
    with open_stream(data, Modality.AUDIO, limits=limits, location=location) as opened:
        _read_rate(opened, location)
        for piece in _resample(opened, rate_hertz):
            kept = piece[: num_samples - count]
            samples[count : count + len(kept)] = kept
            if (count := count + len(kept)) == num_samples:
                break
    return samples


def _resample(opened: OpenedStream, rate_hertz: int) -> Iterator[Float32[np.ndarray, " samples"]]:
    import av

    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate_hertz)
    for frame in _frames(opened):
        for piece in resampler.resample(frame):
            yield piece.to_ndarray().reshape(-1)


def _frames(opened: OpenedStream) -> Iterator[Any]:
    """Yield the decoded frames, then None to flush the resampler."""
    yield from opened.container.decode(opened.stream)
    yield None


def _read_rate(opened: OpenedStream, location: str) -> int:
    rate, channels = int(opened.stream.rate or 0), int(opened.stream.codec_context.channels or 0)
    if rate not in RATES or not 0 < channels <= MAX_CHANNELS:
        raise MediaError(
            f"{location}: audio must have a rate of {RATES.start} to {RATES.stop - 1} Hz and at "
            f"most {MAX_CHANNELS} channels, got {rate} Hz and {channels}",
            reason="bad_shape",
        )
    return rate


RATE_HERTZ = 16_000
FULL_SCALE = 2**15 - 1
Samples = Float64[np.ndarray, " samples"]


def encode_wav(samples: Samples, *, rate_hertz: int = RATE_HERTZ) -> bytes:
    """Encode samples as a WAV file."""
    file = BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(rate_hertz)
        audio.writeframes((samples.clip(-1, 1) * FULL_SCALE).round().astype("<i2").tobytes())
    return file.getvalue()
