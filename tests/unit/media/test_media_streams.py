"""Audio and video files: valid in all their formats, and hostile."""

import struct

import numpy as np
import pytest

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import MediaRef
from relax_events.media.audio import decode_audio, inspect_audio
from relax_events.media.av_files import detect_format
from relax_events.media.facts import MediaFacts
from relax_events.media.preprocessing import DecodePlan
from relax_events.media.videos import decode_video, inspect_video
from tests.unit.video_and_audio import audio_file, frames_of, tone, video_file, written

LIMITS = MediaConfig(max_item_bytes=200_000, max_media_seconds=10, max_image_pixels=10_000)
ALL = 12
"""Frames of the videos below, with key frames among them."""


def refused(data: bytes, reason: str, *, video: bool) -> str:
    with pytest.raises(MediaError) as caught:
        (inspect_video if video else inspect_audio)(data, limits=LIMITS, location="rows:1")
    assert caught.value.reason == reason
    return str(caught.value)


def video_plan(*frames: int, width: int = 48, height: int = 32) -> DecodePlan:
    return DecodePlan((len(frames), height, width, 3), "uint8", frames=frames)


@pytest.mark.parametrize(
    ("codec", "container", "media_type"),
    [
        ("libx264", "mp4", "video/mp4"),
        ("mpeg4", "avi", "video/x-msvideo"),
        ("libvpx-vp9", "webm", "video/webm"),
        ("libx264", "matroska", "video/x-matroska"),
    ],
)
def test_video_frames_are_counted_and_selected_frames_decoded(
    codec: str, container: str, media_type: str
) -> None:
    sampled = frames_of(48, 32, ALL)
    data = written(codec, container, frames=sampled)
    assert inspect_video(data, limits=LIMITS, location="rows:1") == MediaFacts(
        media_type, 48, 32, num_frames=ALL, rate_hertz=4.0
    )
    every = decode_video(data, plan=video_plan(*range(ALL)), limits=LIMITS, location="rows:1")
    distances = np.array(
        [[np.abs(found.astype(int) - frame).mean() for frame in sampled] for found in every]
    )
    assert distances.argmin(axis=1).tolist() == list(range(ALL))
    some = decode_video(data, plan=video_plan(2, 2, 7, 11), limits=LIMITS, location="rows:1")
    assert np.array_equal(some, every[[2, 2, 7, 11]])


def test_video_with_many_key_frames_decodes_the_right_frame_by_seeking() -> None:
    sampled = frames_of(48, 32, 40, seed=2)
    data = written("libx264", "mp4", frames=sampled, key_every=5)
    (last,) = decode_video(data, plan=video_plan(38), limits=LIMITS, location="rows:1")
    assert np.abs(last.astype(int) - sampled[38]).mean() < 6


def test_video_is_rotated_by_its_orientation_metadata() -> None:
    frame = np.zeros((32, 48, 3), np.uint8)
    frame[:, :24] = 255
    data = written("mpeg4", "mp4", frames=[frame] * 4)
    one, full = 1 << 16, 1 << 30
    upright, turned = (
        struct.pack(">9i", *matrix)
        for matrix in ((one, 0, 0, 0, one, 0, 0, 0, full), (0, one, 0, -one, 0, 0, 0, 0, full))
    )
    at = data.index(upright, data.index(b"tkhd"))
    sideways = data[:at] + turned + data[at + len(upright) :]
    facts = inspect_video(sideways, limits=LIMITS, location="rows:1")
    assert (facts.width, facts.height) == (32, 48)
    (turned, _) = decode_video(
        sideways, plan=video_plan(0, 2, width=32, height=48), limits=LIMITS, location="rows:1"
    )
    assert turned[:20].min() > 200  # turned clockwise by a quarter: what was left is on top
    assert turned[28:].max() < 50


@pytest.mark.parametrize(
    ("codec", "container", "media_type", "hertz"),
    [
        ("pcm_s16le", "wav", "audio/x-wav", 16_000),
        ("pcm_s16le", "wav", "audio/x-wav", 44_100),
        ("flac", "flac", "audio/flac", 8_000),
        ("libmp3lame", "mp3", "audio/mpeg", 44_100),
        ("libopus", "ogg", "audio/ogg", 48_000),
        ("aac", "mp4", "audio/mp4", 22_050),
    ],
)
def test_audio_resampling_keeps_pitch_and_duration(
    codec: str, container: str, media_type: str, hertz: int
) -> None:
    data = written(codec, container, audio=tone(1000.0, 1.5, rate=hertz), hertz=hertz)
    facts = inspect_audio(data, limits=LIMITS, location="rows:1")
    assert (facts.media_type, facts.rate_hertz) == (media_type, hertz)
    assert facts.num_frames / hertz == pytest.approx(1.5, abs=0.11)
    samples = decode_audio(
        data,
        plan=DecodePlan((24_000,), "float32", rate_hertz=16_000),
        limits=LIMITS,
        location="rows:1",
    )
    middle = samples[4_000:20_000]
    assert np.abs(np.fft.rfft(middle)).argmax() == 1000  # a bin a hertz
    assert np.abs(middle).max() == pytest.approx(20_000 / 2**15, rel=0.05)


def test_audio_of_the_right_rate_is_left_as_it_is() -> None:
    sampled = np.random.default_rng(0).uniform(-1, 1, 5_000)
    data = written("pcm_s16le", "wav", audio=sampled)
    samples = decode_audio(
        data,
        plan=DecodePlan((5_000,), "float32", rate_hertz=16_000),
        limits=LIMITS,
        location="rows:1",
    )
    assert np.array_equal(samples, (sampled * 20_000).astype(np.int16).astype(np.float32) / 2**15)


def test_audio_channels_are_mixed_to_mono() -> None:
    mono = audio_file(0.5)
    body = np.frombuffer(mono[44:], "<i2")
    stereo = (
        mono[:22]
        + struct.pack("<HIIHH", 2, 16_000, 64_000, 4, 16)
        + b"data"
        + struct.pack("<I", 4 * len(body))
    )
    stereo = stereo + np.stack([body, -body], 1).astype("<i2").tobytes()
    stereo = stereo[:4] + struct.pack("<I", len(stereo) - 8) + stereo[8:]
    samples = decode_audio(
        stereo,
        plan=DecodePlan((8_000,), "float32", rate_hertz=16_000),
        limits=LIMITS,
        location="rows:1",
    )
    assert np.abs(samples).max() < 1e-4


VIDEO, LONG_VIDEO = video_file(48, 32, 40), video_file(16, 16, 60)
AUDIO = written("flac", "flac", audio=tone(440.0, 2.0))
PLAYLIST = b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n"
CONCAT = b"ffconcat version 1.0\nfile '/etc/passwd'\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "wrong_type"),
        (b"hello", "wrong_type"),
        (PLAYLIST, "wrong_type"),
        (CONCAT, "wrong_type"),
        (AUDIO, "wrong_type"),
        (VIDEO[: len(VIDEO) * 2 // 3], "truncated"),
        (written("libvpx-vp9", "webm", frames=frames_of(32, 32, 40))[:-600], "truncated"),
        (LONG_VIDEO, "too_long"),
        (written("mpeg4", "avi", frames=frames_of(16, 16, 51), rate=25), "too_many_frames"),
        (video_file(128, 128), "too_many_pixels"),
        (bytes(200_001), "too_large"),
    ],
)
def test_hostile_video_is_refused(
    data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_events.media.videos.MAX_VIDEO_FRAMES", 50)
    assert refused(data, reason, video=True).startswith("rows:1")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "wrong_type"),
        (b"RIFF\x00\x00\x00\x00WAVE", "truncated"),
        (PLAYLIST, "wrong_type"),
        (VIDEO, "wrong_type"),
        (AUDIO[: len(AUDIO) // 2], "truncated"),
        (audio_file(2.0)[:20_000], "truncated"),
        (written("libmp3lame", "mp3", audio=tone(440.0, 4.0))[:6_000], "truncated"),
        (written("flac", "flac", audio=np.zeros(11 * 16_000)), "too_long"),
        (bytes(200_001), "too_large"),
    ],
)
def test_hostile_audio_is_refused(data: bytes, reason: str) -> None:
    assert refused(data, reason, video=False).startswith("rows:1")


def test_audio_header_with_an_invalid_sample_rate_is_rejected() -> None:
    slow = bytearray(audio_file(0.1))
    struct.pack_into("<I", slow, 24, 400)
    assert "a rate of 1000 to 768000 Hz" in refused(bytes(slow), "bad_shape", video=False)


def test_audio_title_in_an_invalid_encoding_is_ignored() -> None:
    titled = (
        audio_file(0.4)
        + b"LIST"
        + struct.pack("<I", 16)
        + b"INFOINAM"
        + struct.pack("<I", 4)
        + b"\xff\xfe\xe9\x00"
    )
    whole = titled[:4] + struct.pack("<I", len(titled) - 8) + titled[8:]
    assert inspect_audio(whole, limits=LIMITS, location="rows:1").num_frames == 6_400


def test_media_format_is_detected_from_the_first_bytes() -> None:
    kinds = {
        "mov": VIDEO,
        "flac": AUDIO,
        "wav": audio_file(),
        "mp3": written("libmp3lame", "mp3", audio=tone(440.0, 1.0)),
    }
    assert {name: detect_format(data) for name, data in kinds.items()} == {
        name: name for name in kinds
    }
    assert detect_format(b"\xff\xfb\x90\x00") == "mp3"
    assert detect_format(b"%PDF-1.7") is None


def test_media_reference_describes_its_size_and_duration() -> None:
    assert (
        MediaRef(
            "x", bytes(32), "video/mp4", 1, width=48, height=32, num_frames=12, rate_hertz=4.0
        ).extent
        == "48 x 32, 12 frames at 4 Hz"
    )
