"""Media of samples are reduced to what a page shows."""

from io import BytesIO

import numpy as np
from PIL import Image

from relax_events.events.parts import MediaRef
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.packages.dashboard.details import MAX_FRAMES, MAX_SIDE, encode_png, select_frames

REFERENCE = MediaRef("file:///media", bytes(32), "video/mp4", 3)


def test_long_video_is_shown_by_evenly_spaced_frames() -> None:
    numbers = np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1)
    video = ProcessedMedia(REFERENCE, np.broadcast_to(numbers, (40, 2, 2, 3)).copy())
    frames = select_frames(video)
    assert len(frames) == MAX_FRAMES
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 6, 11, 17, 22, 28, 33, 39]
    assert select_frames(ProcessedMedia(REFERENCE, samples=np.zeros(4, np.float32))) == []


def test_large_image_is_reduced_with_its_proportions() -> None:
    file = BytesIO()
    encode_png(np.zeros((480, 960, 3), np.uint8), file)
    assert Image.open(file).size == (MAX_SIDE, MAX_SIDE // 2)
