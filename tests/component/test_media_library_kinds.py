"""Audio and videos in a run's media library: the same promises as for images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from tests.component.test_media_library import cached_files, object_files
from tests.unit.video_and_audio import (
    audio_file,
    item_of,
    media_run,
    omni_model,
    video_file,
    video_with_audio_file,
)

VIDEO, AUDIO = (Modality.VIDEO, (48, 32, 8)), (Modality.AUDIO, 0.5)


def opened(folder: Path, **media: Any) -> MediaLibrary:
    return MediaLibrary(media_run(folder, omni_model(), **media))


def refused(library: MediaLibrary, item: MediaItem) -> str:
    with pytest.raises(MediaError) as caught:
        library.add(item)
    return caught.value.reason


def test_video_and_audio_are_stored_once_and_processed_once_on_a_machine(tmp_path: Path) -> None:
    library = opened(tmp_path)
    video, audio = library.add(item_of(*VIDEO)), library.add(item_of(*AUDIO))
    assert library.add(replace(item_of(*VIDEO), location="another row")) == video
    assert (video.media_type, video.width, video.height, video.num_frames, video.rate_hertz) == (
        "video/mp4",
        48,
        32,
        8,
        2.0,
    )
    assert (audio.media_type, audio.num_frames, audio.rate_hertz) == (
        "audio/x-wav",
        8_000,
        16_000.0,
    )
    first = [library.load(reference) for reference in (video, audio)]
    for file in object_files(tmp_path):
        file.unlink()
    again_video, again_audio = (opened(tmp_path).load(reference) for reference in (video, audio))
    assert np.array_equal(again_video.pixels, first[0].pixels)
    assert np.array_equal(again_audio.samples, first[1].samples)
    assert (
        again_video.pixels.shape,
        again_video.samples,
        again_audio.samples.shape,
        again_audio.pixels,
    ) == (
        (8, 32, 48, 3),
        None,
        (8_000,),
        None,
    )
    assert len(cached_files(tmp_path)) == 2


def test_file_may_be_stored_as_video_and_as_audio(tmp_path: Path) -> None:
    library, data = opened(tmp_path), video_with_audio_file(32, 32, 4)
    video, audio = (
        library.add(MediaItem(modality, data, "row"))
        for modality in (Modality.VIDEO, Modality.AUDIO)
    )
    assert video.digest == audio.digest
    assert (video.media_type, audio.media_type) == ("video/mp4", "audio/mp4")
    assert library.load(video).pixels.shape == (4, 32, 32, 3)
    assert len(library.load(audio).samples) == library._preprocessor_for(audio).plan(audio).shape[0]


def test_video_is_stored_with_its_audio(tmp_path: Path) -> None:
    library = opened(tmp_path, use_audio_in_video=True)
    video = library.load(library.add(item_of(*VIDEO)))
    assert (video.pixels.shape, video.samples.shape) == ((8, 32, 48, 3), (64_000,))
    tone = np.abs(np.fft.rfft(video.samples[16_000:48_000])).argmax() / 2
    assert tone == pytest.approx(300, abs=1)


def test_media_reference_with_a_wrong_length_is_rejected(tmp_path: Path) -> None:
    library = opened(tmp_path)
    audio = library.add(item_of(*AUDIO))
    with pytest.raises(
        MediaError,
        match=r"is 8000 frames at 16000 Hz, but its reference has 9000 frames at 16000 Hz",
    ) as caught:
        library.load(replace(audio, num_frames=9_000))
    assert caught.value.reason == "wrong_size"


@pytest.mark.parametrize(
    ("modality", "data", "reason"),
    [
        (Modality.VIDEO, audio_file(), "wrong_type"),
        (Modality.AUDIO, audio_file(2.0)[:9_000], "truncated"),
        (Modality.AUDIO, audio_file(0.02), "bad_shape"),
        (Modality.AUDIO, audio_file(4.0), "too_long"),
    ],
)
def test_hostile_file_is_refused_before_it_is_stored(
    tmp_path: Path, modality: Modality, data: bytes, reason: str
) -> None:
    assert (
        refused(opened(tmp_path, max_media_seconds=3), MediaItem(modality, data, "rows:5"))
        == reason
    )
    assert object_files(tmp_path) == []


def test_video_without_audio_is_refused_if_its_audio_is_to_be_read(tmp_path: Path) -> None:
    assert (
        refused(
            opened(tmp_path, use_audio_in_video=True),
            MediaItem(Modality.VIDEO, video_file(), "rows:5"),
        )
        == "wrong_type"
    )
