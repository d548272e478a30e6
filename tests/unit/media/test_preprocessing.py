"""Frames, temporal patches and spectra of videos and audio, and their placeholders in a prompt,
compared with transformers' own.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.parts import MediaRef, Modality
from relax_events.media.preprocessing import AudioPreprocessor, VideoPreprocessor
from relax_events.media.token_layout import MediaLayout, OmniLayout
from tests.unit.image_model import build_image_model
from tests.unit.video_and_audio import BOUNDS, SMALL, omni_model


def layout(config: MediaConfig = BOUNDS, *, reads_audio: bool = False) -> MediaLayout:
    found = MediaLayout.from_folder(omni_model() if reads_audio else build_image_model(), config)
    assert found is not None
    return found


def audio_preprocessor() -> AudioPreprocessor:
    found = layout(reads_audio=True)
    assert isinstance(found, OmniLayout)
    return found.audio


def video_ref(num_frames: int, rate: float, *, width: int = 32, height: int = 32) -> MediaRef:
    return MediaRef(
        "file:///video",
        bytes(32),
        "video/mp4",
        10,
        width=width,
        height=height,
        num_frames=num_frames,
        rate_hertz=rate,
    )


def audio_ref(num_samples: int, rate: float = 16_000.0) -> MediaRef:
    return MediaRef(
        "file:///audio", bytes(32), "audio/flac", 10, num_frames=num_samples, rate_hertz=rate
    )


@given(st.integers(2, 3000), st.sampled_from([1.0, 2.0, 12.5, 24.0, 29.97, 60.0]))
def test_sampled_frames_match_transformers_padded_to_whole_temporal_patches(
    num_frames: int, rate: float
) -> None:
    frames = layout().videos.plan(video_ref(num_frames, rate)).frames
    count = min(max(int(num_frames / rate * 2.0), 4), 768, num_frames) // 2 * 2
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate)
    assert (
        list(frames)
        == Qwen3VLVideoProcessor.sample_frames(
            SimpleNamespace(fps=None), metadata, num_frames=count
        ).tolist()
    )
    expected = Qwen3VLProcessor._calculate_timestamps(None, list(frames), rate, 2)
    assert layout().videos.timestamps(video_ref(num_frames, rate)) == pytest.approx(expected)


def test_single_frame_video_repeats_its_frame() -> None:
    assert layout().videos.plan(video_ref(1, 25.0)).frames == (0, 0)


def test_video_prompt_has_a_timestamp_before_each_temporal_patch() -> None:
    text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?"
    patch = "<{} seconds><|vision_start|><|video_pad|><|vision_end|>"
    assert (
        layout().expand_videos(text, [video_ref(8, 4.0)])
        == f"<|im_start|>user\n{patch.format('0.2')}{patch.format('1.5')}What?"
    )
    assert layout(reads_audio=True).expand_videos(text, [video_ref(8, 4.0)]) == text
    found = layout(MediaConfig(**SMALL, use_audio_in_video=True), reads_audio=True).expand_videos(
        text, [video_ref(8, 4.0)]
    )
    assert (
        found
        == "<|im_start|>user\n<|vision_start|><|audio_start|><|video_pad|><|audio_end|><|vision_end|>What?"
    )


@given(st.integers(400, 10**6))
def test_audio_token_count_matches_transformers(num_samples: int) -> None:
    expected = int(_get_feat_extract_output_lengths(np.int64(num_samples // 160)))
    assert audio_preprocessor().grid(audio_ref(num_samples)) == (expected, 1, 1)


def test_number_of_audio_samples_is_computed_from_the_media_reference() -> None:
    assert audio_preprocessor().plan(audio_ref(44_100, 44_100.0)).shape == (16_000,)
    assert audio_preprocessor().plan(audio_ref(44_101, 44_100.0)).shape == (16_001,)


def test_audio_and_video_position_ids_follow_time() -> None:
    omni = layout(reads_audio=True)
    (audio_block,) = omni.blocks(audio_ref(16_000))
    assert audio_block.offsets.tolist() == [list(range(13))] * 3
    (video_block,) = omni.blocks(video_ref(8, 4.0))
    assert video_block.offsets.tolist() == [
        [0, 0, 0, 0, 13, 13, 13, 13],
        [0, 0, 1, 1] * 2,
        [0, 1, 0, 1] * 2,
    ]
    assert video_block.extent == 14


def test_video_and_its_audio_tokens_are_interleaved_in_time_order() -> None:
    omni = layout(MediaConfig(**SMALL, use_audio_in_video=True), reads_audio=True)
    (block,) = omni.blocks(video_ref(8, 4.0))
    video, audio = (omni.placeholders[modality] for modality in (Modality.VIDEO, Modality.AUDIO))
    assert block.ids.tolist() == [video] * 4 + [audio] * 13 + [video] * 4 + [audio] * 13
    assert block.features.tolist() == [*range(4), *range(8, 21), *range(4, 8), *range(21, 34)]
    assert block.extent == 26


@pytest.mark.parametrize(
    ("media", "text"),
    [
        (
            audio_ref(399),
            "file:///audio can't be read by the model: audio must have at least 0.025 s",
        ),
        (audio_ref(0), "file:///audio has no number and rate of frames"),
        (video_ref(4, 2.0, width=0), "file:///video has no width and height"),
        (video_ref(4, 0.0), "file:///video has no number and rate of frames"),
        (
            MediaRef("file:///text", bytes(32), "text/plain", 10),
            "file:///text is of type 'text/plain'",
        ),
    ],
)
def test_error_names_a_media_reference_the_model_does_not_support(
    media: MediaRef, text: str
) -> None:
    with pytest.raises(MediaError, match=text):
        layout(reads_audio=True).blocks(media)


def test_audio_is_refused_for_a_vision_model() -> None:
    with pytest.raises(
        MediaError, match="file:///audio is of modality audio, and the model reads image, video"
    ) as caught:
        layout().blocks(audio_ref(16_000))
    assert caught.value.reason == "not_for_this_model"


def test_placeholders_of_a_different_modality_than_the_media_are_rejected() -> None:
    omni = layout(reads_audio=True)
    image, audio = (omni.placeholders[modality] for modality in (Modality.IMAGE, Modality.AUDIO))
    with pytest.raises(PoisonSample, match="placeholders are of other modalities than its media"):
        omni.expand_placeholders(np.array([7, image], np.int32), [audio_ref(16_000)])
    with pytest.raises(
        PoisonSample, match="of other modalities than its media, or in another order"
    ):
        omni.find_media_tokens(np.array([image] * 13), np.ones(13, bool), [audio_ref(16_000)])
    assert omni.expand_placeholders(
        np.array([7, audio, 8], np.int32), [audio_ref(16_000)]
    ).tolist() == [
        7,
        *[audio] * 13,
        8,
    ]


@pytest.mark.parametrize(
    ("settings", "reads_audio", "text"),
    [
        ({"use_audio_in_video": True}, False, "use_audio_in_video needs a model that reads audio"),
        (
            {"video_fps": 3},
            True,
            (
                "model.media.video_fps = 3.0 would place the temporal patches of a video 8.66667 "
                "positions apart"
            ),
        ),
    ],
)
def test_media_settings_unsupported_by_the_model_are_rejected(
    settings: dict[str, Any], reads_audio: bool, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        layout(MediaConfig(**settings), reads_audio=reads_audio)


def test_video_frames_use_the_video_token_bounds() -> None:
    videos = layout(MediaConfig(video_min_token_num=16, video_max_token_num=16)).videos
    assert isinstance(videos, VideoPreprocessor)
    assert videos.plan(video_ref(4, 2.0, width=640, height=640)).shape == (4, 64, 64, 3)
    assert videos.grid(video_ref(4, 2.0, width=16, height=16)) == (2, 4, 4)
