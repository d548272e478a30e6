"""What a machine pays for a piece of media, in CPU time: decode the file, or fetch the array that
another one made of it. Prints a line for each.

python -m benchmarks.claimed_media
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from io import BytesIO
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from relax_events.config import MediaConfig
from relax_events.events.parts import MediaRef, Modality, ObjectRef
from relax_events.examples.synthetic_media import encode_video, encode_wav
from relax_events.media.decoder_child import INSPECTORS, decode
from relax_events.media.preprocessing import DecodePlan
from relax_events.media.token_layout import OmniLayout
from relax_events.objects.store import ObjectStore

NUM_ROUNDS = 5
SETTINGS = {
    **{f"{kind}_token_id": number for number, kind in enumerate(("image", "video", "audio"))},
    "audio_config": {"n_window": 50},
    "position_id_per_seconds": 13,
}
PROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
}
"""As the published models have them."""


def photo(width: int, height: int, *, seed: int = 0) -> Image.Image:
    """Draw something whose files are as large as photographs': coarse shapes, fine grain."""
    generator = np.random.default_rng(seed)
    shapes = Image.fromarray(
        generator.integers(0, 255, (height // 32, width // 32, 3)).astype(np.uint8)
    )
    coarse = shapes.resize((width, height), Image.Resampling.BICUBIC)
    grain = generator.normal(0, 6, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8))


def written(image: Image.Image, kind: str) -> bytes:
    """Return an image as a file."""
    file = BytesIO()
    image.save(file, kind, quality=90)
    return file.getvalue()


def pieces() -> Iterator[tuple[str, Modality, bytes]]:
    """Give pieces by name."""
    yield "image 512 x 512, JPEG", Modality.IMAGE, written(photo(512, 512), "JPEG")
    yield "image 1024 x 1024, JPEG", Modality.IMAGE, written(photo(1024, 1024), "JPEG")
    yield "image 1024 x 1024, PNG", Modality.IMAGE, written(photo(1024, 1024), "PNG")
    yield "image 4032 x 3024, JPEG", Modality.IMAGE, written(photo(4032, 3024), "JPEG")
    for seconds in (10, 30):
        still = np.asarray(photo(1280, 736))
        frames = [
            np.ascontiguousarray(still[:720, shift % 32 * 2 :][:, :1216])
            for shift in range(4 * seconds)
        ]
        yield f"video 1216 x 720, {seconds} s, MPEG-4", Modality.VIDEO, encode_video(frames)
    tone = np.sin(np.arange(30 * 16_000) / 7).astype(np.float32)
    yield "audio 30 s, WAV", Modality.AUDIO, encode_wav(tone)


def timed(action: Callable[[], object]) -> float:
    """Return the CPU seconds that an action takes, on all threads: a machine with other work does
    not change them."""
    started = time.process_time()
    action()
    return time.process_time() - started


def processed(
    store: ObjectStore, stored: ObjectRef, modality: Modality, plan: DecodePlan, limits: MediaConfig
) -> None:
    """Fetch a file, check it and decode it, as the decoding child does."""
    data = store.get(stored)
    INSPECTORS[modality](data, limits=limits, location="piece")
    decode(data, modality, plan=plan, limits=limits, location="piece")


def main() -> None:
    """Measure both ways in turns; the median round counts."""
    limits = MediaConfig()
    layout = OmniLayout.of(SETTINGS, PROCESSOR, limits)
    for name, modality, file in pieces():
        with TemporaryDirectory() as folder:
            store = ObjectStore.open(f"file://{folder}")
            reference = MediaRef(
                "piece",
                sha256(file).digest(),
                num_bytes=len(file),
                **asdict(INSPECTORS[modality](file, limits=limits, location=name)),
            )
            plan = layout.preprocessor_for(reference).plan(reference)
            array = np.concatenate(
                [
                    part.ravel().view(np.uint8)
                    for part in decode(file, modality, plan=plan, limits=limits, location=name)
                ]
            ).tobytes()
            stored_file, stored_array = store.put(file), store.put(array)

            processing = partial(processed, store, stored_file, modality, plan, limits)
            rounds = [
                (timed(processing), timed(partial(store.get, stored_array)))
                for _ in range(NUM_ROUNDS)
            ]
        decoding, fetching = (statistics.median(times) for times in zip(*rounds, strict=True))
        more = len(array) - len(file)
        found = {
            "piece": name,
            "file_bytes": len(file),
            "array_bytes": len(array),
            "decode_seconds": round(decoding, 4),
            "fetch_seconds": round(fetching, 4),
            "worth_above_bytes_per_second": round(more / (decoding - fetching))
            if decoding > fetching and more > 0
            else None,
        }
        print(
            (
                f"{name:32} {len(file):>12,} {len(array):>12,} B  decode {decoding * 1e3:8.1f} "
                f"ms  fetch {fetching * 1e3:8.1f} ms"
            ),
            file=sys.stderr,
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
