"""Synthetic images: reproducible by seed, with answers that match; and runs whose model can't read
them.
"""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from relax_events.config import DataConfig, RunConfig
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.file_checks import check_model
from relax_events.packages.examples.zoom import zoom
from tests.unit.image_model import BOUNDS, image_run
from tests.unit.trainer_samples import tiny_model

NAMED = {
    "red": "100",
    "green": "010",
    "blue": "001",
    "yellow": "110",
    "white": "111",
    "pink": "101",
}
BRIGHT = 150
"""Above all of the background's noise, below at least one channel of every square."""


def synthetic_images(task: str, *, seed: int = 0, **settings: Any) -> PromptSource:
    return open_source(
        DataConfig.model_validate(
            {"source": f"synthetic_images:{task}", "num_problems": 60, **settings}
        ),
        seed=seed,
    )


def pixels_of(row: PromptRow) -> np.ndarray:
    (item,) = row.media
    return np.asarray(Image.open(BytesIO(item.read(BOUNDS)))).astype(int)


def test_image_is_determined_by_seed_and_row_index() -> None:
    one, again, other = (synthetic_images("colour", seed=seed).row(5) for seed in (1, 1, 2))
    assert one == again
    assert not np.array_equal(pixels_of(one), pixels_of(other))
    assert not np.array_equal(pixels_of(one), pixels_of(synthetic_images("colour", seed=1).row(6)))


def test_colour_task_answer_is_the_colour_of_the_bright_square() -> None:
    answers = set()
    for row in map(synthetic_images("colour").row, range(60)):
        square = pixels_of(row)[(pixels_of(row) > BRIGHT).any(axis=2)]
        assert "".join(str(int(mean > 130)) for mean in square.mean(axis=0)) == NAMED[row.answer]
        answers.add(row.answer)
    assert answers == set(NAMED)


def test_count_task_answer_is_the_number_of_bright_squares() -> None:
    for row in map(synthetic_images("count").row, range(30)):
        centres = pixels_of(row)[4::8, 4::8]
        assert ("one", "two", "three", "four")[
            (centres > BRIGHT).all(axis=2).sum() - 1
        ] == row.answer


def test_where_task_answer_is_the_corner_of_the_bright_square() -> None:
    for row in map(synthetic_images("where").row, range(30)):
        y, x = np.argwhere((pixels_of(row) > BRIGHT).any(axis=2)).mean(axis=0)
        assert f"{'top' if y < 16 else 'bottom'} {'left' if x < 16 else 'right'}" == row.answer


def test_images_have_the_configured_size() -> None:
    assert pixels_of(synthetic_images("where", options={"pixels": 48}).row(0)).shape == (48, 48, 3)


@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        (
            "pitch",
            {},
            (
                "synthetic_images has no task 'pitch'; set data.source = "
                "'synthetic_images:<task>' to one of "
                "colour, count, where"
            ),
        ),
        ("colour", {"pixels": 8}, "Input should be greater than or equal to 16"),
        ("colour", {"size": 8}, "Extra inputs are not permitted"),
    ],
)
def test_synthetic_images_reject_unknown_tasks_and_options(
    task: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        synthetic_images(task, options=options)


def run_of(folder: Path, family: str, **algorithm: Any) -> RunConfig:
    tiny = {"path": folder / "none", "tiny": {"family": family}}
    return image_run(folder, model=tiny, algorithm=algorithm)


def test_run_with_images_needs_a_model_that_reads_images(tmp_path: Path) -> None:
    assert check_model(CheckedRun(run_of(tmp_path, "qwen3_vl"))).endswith("will be made by the run")
    with pytest.raises(
        ConfigError,
        match=r"kind image and model.tiny.family = 'qwen3' reads text only; .* qwen3_vl, qwen3_vl_moe, qwen3_5, q",
    ):
        check_model(CheckedRun(run_of(tmp_path, "qwen3")))


def test_run_with_images_needs_an_engine_that_supports_them(tmp_path: Path) -> None:
    def run(family: str) -> RunConfig:
        model = {"path": tmp_path / "none", "tiny": {"family": family}}
        return image_run(tmp_path, model=model, engine={"name": "sglang"})

    text = r"engine 'sglang' supports media for models of the families qwen3_vl, .* alone, and .*none is of qwen3_5_moe, whose linear .*; set engine.name"
    with pytest.raises(ConfigError, match=text):
        check_model(CheckedRun(run("qwen3_5_moe")))
    for family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"):
        assert check_model(CheckedRun(run(family))).endswith("will be made by the run")
    assert check_model(CheckedRun(image_run(tmp_path, engine={"name": "sglang"}))).endswith(
        "is complete"
    )


def test_run_with_audio_needs_a_model_that_reads_audio(tmp_path: Path) -> None:
    def run(family: str) -> RunConfig:
        return image_run(
            tmp_path,
            model={"path": tmp_path / "none", "tiny": {"family": family}},
            data={"source": "synthetic_audio:pitch"},
        )

    assert check_model(CheckedRun(run("qwen3_omni_moe_thinker"))).endswith(
        "will be made by the run"
    )
    with pytest.raises(
        ConfigError,
        match=r"kind audio and model.tiny.family = 'qwen3_vl' reads image and video; .* qwen3_omni_moe_thinker",
    ):
        check_model(CheckedRun(run("qwen3_vl")))


def test_run_with_images_needs_a_critic_that_reads_images(tmp_path: Path) -> None:
    run = run_of(tmp_path, "qwen3_vl", name="ppo")
    assert check_model(CheckedRun(run)).endswith("will be made by the run")
    blind = run.model_copy(
        update={"critic": run.critic.model_copy(update={"model_path": tiny_model()})}
    )
    with pytest.raises(
        ConfigError, match=r"kind image, and critic.model_path .* does not read such; leave it out"
    ):
        check_model(CheckedRun(blind))


def test_zoom_task_shows_position_in_the_small_image_and_colour_in_the_zoom() -> None:
    for row in map(synthetic_images("zoom").row, range(12)):
        metadata = json.loads(row.metadata)
        small = pixels_of(row)
        assert (small == small[..., :1]).all()  # grey
        y, x = np.argwhere((small > BRIGHT).any(axis=2)).mean(axis=0)
        corner = f"{'top' if y < 16 else 'bottom'} {'left' if x < 16 else 'right'}"
        reply = zoom(f"{corner}.", messages=[], answer="", metadata=metadata, files=[])
        assert metadata["answers"] == [corner, row.answer]
        assert reply is not None
        assert reply.text == "<image>What colour is the square?"
        (quarter,) = reply.media["image"]
        assert isinstance(quarter, bytes)
        pixels = np.asarray(Image.open(BytesIO(quarter))).astype(int)
        assert pixels.shape == (32, 32, 3)
        square = pixels[(pixels > BRIGHT).any(axis=2)].mean(axis=0)
        assert "".join(str(int(mean > 130)) for mean in square) == NAMED[row.answer]
        assert zoom("red", messages=[], answer="", metadata=metadata, files=[]) is None
        assert zoom(corner, messages=[], answer="", metadata={}, files=[]) is None


def test_image_max_token_num_must_not_be_below_the_minimum(tmp_path: Path) -> None:
    with pytest.raises(
        ValidationError, match="image_max_token_num must be at least image_min_token_num = 9, got 8"
    ):
        image_run(tmp_path, model={"media": {"image_min_token_num": 9, "image_max_token_num": 8}})
