"""Child process that decodes untrusted files. Started only by `Decoder`.

A request names the operation and is followed by the file; a response is followed by the bytes of
decoded arrays. The first line has the limits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.config.media import MediaConfig
from relax_events.confinement.frames import Frame
from relax_events.confinement.served import Answer, Served
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.audio import decode_audio, decode_samples, inspect_audio
from relax_events.media.facts import MediaFacts
from relax_events.media.images import decode_image, inspect_image
from relax_events.media.preprocessing import DecodePlan
from relax_events.media.videos import decode_video, inspect_video

INSPECTORS: dict[Modality, Callable[..., MediaFacts]] = {
    Modality.IMAGE: inspect_image,
    Modality.AUDIO: inspect_audio,
    Modality.VIDEO: inspect_video,
}


def main() -> int:
    """Serve requests until stdin ends."""
    served = Served()
    setup = dict(served.setup)
    memory_bytes = setup.pop("memory_bytes")
    limits = MediaConfig.model_validate(setup)
    served.report_ready({})
    served.serve(lambda request: _decode_request(request, limits, memory_bytes))
    return 0


def _decode_request(request: Frame, limits: MediaConfig, memory_bytes: int) -> Answer:
    question, (data,) = request.head, request.contents
    modality, location = Modality(question["modality"]), question["location"]
    arrays: list[NDArray[Any]] = []
    try:
        if question["plan"] is None:
            response = {
                "facts": asdict(INSPECTORS[modality](data, limits=limits, location=location))
            }
        else:
            arrays = decode(
                data,
                modality,
                plan=DecodePlan(**question["plan"]),
                limits=limits,
                location=location,
            )
            response = {}
    except MediaError as error:
        response = {"error": {"text": str(error), "reason": error.reason}}
    except EnvironmentProblem as error:
        response = {"problem": {"text": str(error)}}
    except MemoryError:
        text = f"{location} needs more than {memory_bytes} bytes to decode"
        response = {"error": {"text": text, "reason": "too_much_memory"}}
    return response, [np.ascontiguousarray(one).reshape(-1).view(np.uint8).data for one in arrays]


def decode(
    data: bytes, modality: Modality, *, plan: DecodePlan, limits: MediaConfig, location: str
) -> list[NDArray[Any]]:
    """Decode a file by its plan.

    Raises:
        MediaError: The file doesn't match the plan, or is truncated or damaged.
    """
    if modality is Modality.IMAGE:
        return [
            decode_image(
                data, size=(plan.shape[0], plan.shape[1]), limits=limits, location=location
            )
        ]
    if modality is Modality.AUDIO:
        return [decode_audio(data, plan=plan, limits=limits, location=location)]
    pixels = decode_video(data, plan=plan, limits=limits, location=location)
    if not plan.num_samples:
        return [pixels]
    return [
        pixels,
        decode_samples(
            data,
            num_samples=plan.num_samples,
            rate_hertz=plan.rate_hertz,
            limits=limits,
            location=location,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
