"""Audio and videos in a run's library: the same promises as for images."""

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
    clip_file,
    item_of,
    media_run,
    omni_model,
    sound_file,
    talking_clip_file,
)

CLIP, SOUND = (Modality.VIDEO, (48, 32, 8)), (Modality.AUDIO, 0.5)


def opened(folder: Path, **media: Any) -> MediaLibrary:
    return MediaLibrary(media_run(folder, omni_model(), **media))


def refused(library: MediaLibrary, item: MediaItem) -> str:
    with pytest.raises(MediaError) as caught:
        library.add(item)
    return caught.value.reason


def test_clip_and_sound_are_stored_once_and_processed_once_on_a_machine(tmp_path: Path) -> None:
    library = opened(tmp_path)
    clip, sound = library.add(item_of(*CLIP)), library.add(item_of(*SOUND))
    assert library.add(replace(item_of(*CLIP), location="another row")) == clip
    assert (clip.media_type, clip.width, clip.height, clip.num_frames, clip.rate_hertz) == (
        "video/mp4",
        48,
        32,
        8,
        2.0,
    )
    assert (sound.media_type, sound.num_frames, sound.rate_hertz) == (
        "audio/x-wav",
        8_000,
        16_000.0,
    )
    first = [library.load(reference) for reference in (clip, sound)]
    for file in object_files(tmp_path):
        file.unlink()
    seen, heard = (opened(tmp_path).load(reference) for reference in (clip, sound))
    assert np.array_equal(seen.pixels, first[0].pixels)
    assert np.array_equal(heard.samples, first[1].samples)
    assert (seen.pixels.shape, seen.samples, heard.samples.shape, heard.pixels) == (
        (8, 32, 48, 3),
        None,
        (8_000,),
        None,
    )
    assert len(cached_files(tmp_path)) == 2


def test_file_may_be_there_as_a_clip_and_as_a_sound(tmp_path: Path) -> None:
    library, data = opened(tmp_path), talking_clip_file(32, 32, 4)
    clip, sound = (
        library.add(MediaItem(modality, data, "row"))
        for modality in (Modality.VIDEO, Modality.AUDIO)
    )
    assert clip.digest == sound.digest
    assert (clip.media_type, sound.media_type) == ("video/mp4", "audio/mp4")
    assert library.load(clip).pixels.shape == (4, 32, 32, 3)
    assert len(library.load(sound).samples) == library._preprocessor_for(sound).plan(sound).shape[0]


def test_clip_is_kept_with_what_is_heard_of_it(tmp_path: Path) -> None:
    library = opened(tmp_path, use_audio_in_video=True)
    clip = library.load(library.add(item_of(*CLIP)))
    assert (clip.pixels.shape, clip.samples.shape) == ((8, 32, 48, 3), (64_000,))
    tone = np.abs(np.fft.rfft(clip.samples[16_000:48_000])).argmax() / 2
    assert tone == pytest.approx(300, abs=1)


def test_reference_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    library = opened(tmp_path)
    sound = library.add(item_of(*SOUND))
    with pytest.raises(
        MediaError,
        match=r"is 8000 frames at 16000 Hz, and its reference has 9000 frames at 16000 Hz",
    ) as caught:
        library.load(replace(sound, num_frames=9_000))
    assert caught.value.reason == "wrong_size"


@pytest.mark.parametrize(
    ("modality", "data", "reason"),
    [
        (Modality.VIDEO, sound_file(), "wrong_type"),
        (Modality.AUDIO, sound_file(2.0)[:9_000], "truncated"),
        (Modality.AUDIO, sound_file(0.02), "bad_shape"),
        (Modality.AUDIO, sound_file(4.0), "too_long"),
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


def test_clip_without_sound_is_refused_where_it_is_to_be_heard(tmp_path: Path) -> None:
    assert (
        refused(
            opened(tmp_path, use_audio_in_video=True),
            MediaItem(Modality.VIDEO, clip_file(), "rows:5"),
        )
        == "wrong_type"
    )
