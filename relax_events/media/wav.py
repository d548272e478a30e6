"""Write audio as WAV."""

from __future__ import annotations

import wave
from io import BytesIO

import numpy as np
from jaxtyping import Float64

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
