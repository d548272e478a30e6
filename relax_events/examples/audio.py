"""Synthetic audio: tasks on the pitch of a tone and on the order of tones."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from relax_events.config.base import Section
from relax_events.events.parts import Modality
from relax_events.examples.media_tasks import SyntheticItem, SyntheticKind
from relax_events.media.wav import RATE_HERTZ, Samples, encode_wav

NOTES = {"do": 262.0, "re": 392.0, "mi": 587.0, "fa": 880.0, "sol": 1319.0, "la": 1976.0}
"""Frequencies in hertz, a fifth apart."""
LOUDNESS, NOISE, DETUNING = 0.3, 0.02, 0.02


class ToneOptions(Section):
    """What `data.options` may hold."""

    seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.4
    """Duration of a tone."""


def _pitch(generator: np.random.Generator, options: ToneOptions) -> SyntheticItem:
    name = list(NOTES)[generator.integers(len(NOTES))]
    return SyntheticItem(name, encode_wav(_tone(generator, NOTES[name], options.seconds)))


def _order(generator: np.random.Generator, options: ToneOptions) -> SyntheticItem:
    """Generate two tones in sequence; the answer is the second."""
    first, last = generator.choice(list(NOTES), 2, replace=False)
    return SyntheticItem(
        str(last),
        encode_wav(
            np.concatenate(
                [_tone(generator, NOTES[name], options.seconds) for name in (first, last)]
            )
        ),
    )


def _tone(generator: np.random.Generator, hertz: float, seconds: float) -> Samples:
    """Generate a slightly detuned note with noise."""
    time = np.arange(round(seconds * RATE_HERTZ)) / RATE_HERTZ
    played = hertz * (1 + DETUNING * generator.standard_normal())
    begin = generator.random() * 2 * np.pi
    return LOUDNESS * np.sin(2 * np.pi * played * time + begin) + NOISE * generator.standard_normal(
        len(time)
    )


SYNTHETIC_AUDIO = SyntheticKind(
    Modality.AUDIO,
    ToneOptions,
    {"pitch": ("Which note is it?", _pitch), "order": ("Which note is the last?", _order)},
)
