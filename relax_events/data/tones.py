"""Sounds that are made on demand: how high a tone is, and what comes after what."""

from __future__ import annotations

import wave
from io import BytesIO
from typing import Annotated

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from relax_events.config.base import Section
from relax_events.data.drawn import Drawn, DrawnKind
from relax_events.events.parts import Modality

NOTES = {"do": 262.0, "re": 392.0, "mi": 587.0, "fa": 880.0, "sol": 1319.0, "la": 1976.0}
"""In hertz, a fifth apart."""
RATE_HERTZ = 16_000
LOUDNESS, NOISE, DETUNING = 0.3, 0.02, 0.02
FULL_SCALE = 2**15 - 1
Samples = Float64[np.ndarray, " samples"]


class ToneOptions(Section):
    """What `data.options` may hold."""

    seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.4
    """Of a tone."""


def _pitch(generator: np.random.Generator, options: ToneOptions) -> Drawn:
    name = list(NOTES)[generator.integers(len(NOTES))]
    return Drawn(name, encoded(_tone(generator, NOTES[name], options.seconds)))


def _order(generator: np.random.Generator, options: ToneOptions) -> Drawn:
    """Play one tone, and then another; the answer is the latter."""
    first, last = generator.choice(list(NOTES), 2, replace=False)
    return Drawn(str(last), encoded(np.concatenate([_tone(generator, NOTES[name], options.seconds) for name in (first, last)])))


def _tone(generator: np.random.Generator, hertz: float, seconds: float) -> Samples:
    """Play a note a little out of tune, among noise."""
    time = np.arange(round(seconds * RATE_HERTZ)) / RATE_HERTZ
    played = hertz * (1 + DETUNING * generator.standard_normal())
    begin = generator.random() * 2 * np.pi
    return LOUDNESS * np.sin(2 * np.pi * played * time + begin) + NOISE * generator.standard_normal(len(time))


def encoded(samples: Samples, *, rate_hertz: int = RATE_HERTZ) -> bytes:
    """Write a sound as a WAV file."""
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate_hertz)
        sound.writeframes((samples.clip(-1, 1) * FULL_SCALE).round().astype("<i2").tobytes())
    return file.getvalue()


TONES = DrawnKind(
    Modality.AUDIO, ToneOptions, {"pitch": ("Which note is it?", _pitch), "order": ("Which note is the last?", _order)}
)
