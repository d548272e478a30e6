"""Synthetic videos and audio: reproducible by seed, with answers that match."""

import numpy as np
import pytest

from relax_events.config import DataConfig, MediaConfig
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.media.audio import decode_audio, inspect_audio
from relax_events.media.preprocessing import DecodePlan
from relax_events.media.videos import decode_video, inspect_video

LIMITS = MediaConfig()
BRIGHT = 130


def made(source: str, **options: float) -> PromptSource:
    return open_source(DataConfig(source=source, num_problems=40, options=options), seed=1)


def frames_of(row: PromptRow) -> np.ndarray:
    data = row.media[0].read(LIMITS)
    facts = inspect_video(data, limits=LIMITS, location="row")
    plan = DecodePlan(
        (facts.num_frames or 0, facts.height or 0, facts.width or 0, 3),
        "uint8",
        frames=tuple(range(facts.num_frames or 0)),
    )
    return decode_video(data, plan=plan, limits=LIMITS, location="row").astype(int)


def samples_of(row: PromptRow) -> np.ndarray:
    data = row.media[0].read(LIMITS)
    facts = inspect_audio(data, limits=LIMITS, location="row")
    return decode_audio(
        data,
        plan=DecodePlan((facts.num_frames or 0,), "float32", rate_hertz=16_000),
        limits=LIMITS,
        location="row",
    )


@pytest.mark.parametrize(
    "source",
    [
        "synthetic_videos:direction",
        "synthetic_videos:order",
        "synthetic_audio:pitch",
        "synthetic_audio:order",
    ],
)
def test_row_is_determined_by_seed_and_index(source: str) -> None:
    assert made(source).row(7) == made(source).row(7)
    assert made(source).row(7).media[0].source != made(source).row(8).media[0].source


def test_direction_task_square_moves_in_the_direction_of_the_answer() -> None:
    answers = set()
    for row in map(made("synthetic_videos:direction").row, range(30)):
        centers = [
            np.argwhere((frame > BRIGHT).any(axis=2)).mean(axis=0) for frame in frames_of(row)
        ]
        down, right = centers[-1] - centers[0]
        across = abs(right) > abs(down)
        assert row.answer == (
            ("left", "right")[int(right > 0)] if across else ("up", "down")[int(down > 0)]
        )
        answers.add(row.answer)
    assert answers == {"left", "right", "up", "down"}


def test_order_task_answer_is_the_colour_of_the_last_square() -> None:
    named = {
        "red": "100",
        "green": "010",
        "blue": "001",
        "yellow": "110",
        "white": "111",
        "pink": "101",
    }
    for row in map(made("synthetic_videos:order", frames=6).row, range(20)):
        colours = []
        for frame in frames_of(row):
            square = frame[(frame > BRIGHT).any(axis=2)]
            colours.append("".join(str(int(mean > 120)) for mean in square.mean(axis=0)))
        assert colours[-1] == named[row.answer]
        assert [colour == colours[-1] for colour in colours] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("source", "seconds"), [("synthetic_audio:pitch", 0.4), ("synthetic_audio:order", 0.8)]
)
def test_audio_task_answer_is_the_loudest_note_at_the_end(source: str, seconds: float) -> None:
    hertz = {"do": 262, "re": 392, "mi": 587, "fa": 880, "sol": 1319, "la": 1976}
    for row in map(made(source).row, range(20)):
        samples = samples_of(row)
        assert len(samples) == round(seconds * 16_000)
        loudest = np.abs(np.fft.rfft(samples[-6_400:])).argmax() * 2.5
        assert min(hertz, key=lambda name: abs(np.log(hertz[name] / loudest))) == row.answer


def test_options_set_video_size_and_audio_length() -> None:
    assert frames_of(made("synthetic_videos:direction", pixels=48, frames=8).row(0)).shape == (
        8,
        48,
        48,
        3,
    )
    assert len(samples_of(made("synthetic_audio:pitch", seconds=1).row(0))) == 16_000
    with pytest.raises(
        ConfigError,
        match=r"synthetic_audio has no task 'chord'; set data.source = 'synthetic_audio:<task>' to one of pitch, order",
    ):
        made("synthetic_audio:chord")
    with pytest.raises(ConfigError, match=r"synthetic_videos:order rejects data.options"):
        made("synthetic_videos:order", frames=5)
