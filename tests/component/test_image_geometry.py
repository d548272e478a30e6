"""Sizes, patches and positions of images, compared with transformers' own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.parts import MediaRef, Modality
from relax_events.media.geometry import ImageGeometry
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import MediaLayout
from relax_events.media.towers import cut_patches
from relax_events.packages.examples.tiny_models import PREPROCESSOR
from tests.unit.image_model import (
    BOUNDS,
    build_image_model,
    image_file,
    image_run,
    load_images,
    plain_model,
    plain_pixels,
    prompt_of,
)

GEOMETRY = ImageGeometry.from_settings(
    PREPROCESSOR, MediaConfig(image_min_token_num=4, image_max_token_num=64)
)


def layout() -> MediaLayout:
    found = MediaLayout.from_folder(build_image_model(), BOUNDS)
    assert found is not None
    return found


def reference(width: int, height: int) -> MediaRef:
    return MediaRef("file:///image", bytes(32), "image/png", 10, width=width, height=height)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_target_image_size_matches_transformers(width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="one side must be at most 200 times the other"):
            GEOMETRY.target_size(width, height)
        return
    expected = smart_resize(height, width, factor=16, min_pixels=4 * 256, max_pixels=64 * 256)
    assert GEOMETRY.target_size(width, height) == expected
    rows, columns = GEOMETRY.grid(width, height)
    assert (16 * rows, 16 * columns) == expected


def test_resize_factor_rounds_sides_to_multiples_of_several_tokens() -> None:
    wide = ImageGeometry.from_settings(PREPROCESSOR, MediaConfig(image_resize_scale_factor=2))
    assert wide.target_size(100, 60) == (64, 96)
    assert wide.grid(100, 60) == (4, 6)


def test_resize_factor_of_zero_keeps_image_sizes_and_rejects_unaligned_ones() -> None:
    untouched = ImageGeometry.from_settings(PREPROCESSOR, MediaConfig(image_resize_scale_factor=0))
    assert untouched.target_size(16, 48) == (48, 16)
    with pytest.raises(ValueError, match="sides must be multiples of 16, got 17 x 48"):
        untouched.target_size(17, 48)


def test_different_image_bounds_have_different_cache_digests() -> None:
    assert GEOMETRY.digest != ImageGeometry.from_settings(PREPROCESSOR, BOUNDS).digest


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (100, 70), (9, 40)])
def test_pixels_and_patches_match_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    (piece,) = load_images(MediaLibrary(image_run(tmp_path)), size)
    expected = plain_pixels([image_file(*size)])
    patches = cut_patches(torch.from_numpy(piece.pixels)[None], layout().images.geometry)
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-6)
    rows, columns = layout().images.grid(piece.reference)[1:]
    assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]


@pytest.mark.parametrize(
    "sizes", [[(32, 32)], [(64, 32), (32, 96)], [(48, 80), (16, 16), (64, 64)]]
)
def test_rotary_positions_match_transformers(tmp_path: Path, sizes: list[tuple[int, int]]) -> None:
    media = load_images(MediaLibrary(image_run(tmp_path)), *sizes)
    tokens = np.append(prompt_of(media), np.arange(5, dtype=np.int32))
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    kinds = (ids == layout().placeholders[Modality.IMAGE]).int()
    grids = torch.tensor(
        [
            [1, 2 * rows, 2 * columns]
            for rows, columns in (layout().images.grid(piece.reference)[1:] for piece in media)
        ]
    )
    expected, _ = plain_model(build_image_model()).model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=grids
    )
    references = [piece.reference for piece in media]
    cells = layout().find_media_tokens(tokens, np.ones(len(tokens), bool), references)
    assert np.array_equal(
        layout().rotary_positions(len(tokens), cells, references), expected[:, 0].numpy()
    )


def test_rotary_positions_match_the_documented_example() -> None:
    pad = layout().placeholders[Modality.IMAGE]
    tokens = np.array([1, 2, *[pad] * 6, 3, 4], np.int32)
    media = [reference(48, 32)]
    found = layout().rotary_positions(
        10, layout().find_media_tokens(tokens, np.ones(10, bool), media), media
    )
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_placeholders_sampled_by_the_policy_are_not_media_tokens() -> None:
    pad = layout().placeholders[Modality.IMAGE]
    tokens = np.array([1, *[pad] * 4, 2, pad, pad], np.int32)
    given_tokens = np.arange(8) < 6
    assert layout().find_media_tokens(tokens, given_tokens, [reference(32, 32)]).tolist() == [
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(
        PoisonSample, match="1 media files have 4 tokens, and the sequence has 6 placeholders"
    ):
        layout().find_media_tokens(tokens, np.ones(8, bool), [reference(32, 32)])


def test_prompt_expands_image_placeholders_and_rejects_an_extra_one() -> None:
    pad = layout().placeholders[Modality.IMAGE]
    media = [reference(32, 32), reference(16, 80)]
    assert layout().expand_placeholders(
        np.array([7, pad, 8, pad, 9], np.int32), media
    ).tolist() == [
        7,
        *[pad] * 4,
        8,
        *[pad] * 5,
        9,
    ]
    with pytest.raises(
        PoisonSample, match="renders to 2 media placeholders, but its 1 files need 1"
    ):
        layout().expand_placeholders(np.array([7, pad, 8, pad], np.int32), media[:1])


def test_error_names_media_reference_without_size_or_of_impossible_shape() -> None:
    with pytest.raises(MediaError, match="file:///image has no width and height"):
        layout().images.grid(MediaRef("file:///image", bytes(32), "image/png", 10))
    with pytest.raises(
        MediaError, match="one side must be at most 200 times the other, got 4000 x 2"
    ):
        layout().images.grid(reference(4000, 2))


def test_text_model_has_no_media_layout_and_error_names_a_broken_folder(tmp_path: Path) -> None:
    assert MediaLayout.from_folder(tmp_path, BOUNDS) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert MediaLayout.from_folder(tmp_path, BOUNDS) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ConfigError, match=r"preprocessor_config.json can't be read"):
        MediaLayout.from_folder(tmp_path, BOUNDS)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    with pytest.raises(
        ConfigError, match=r"the settings for media .* can't be used: KeyError.'image_token_id'"
    ):
        MediaLayout.from_folder(tmp_path, BOUNDS)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(PREPROCESSOR | {"image_processor_type": "PixtralImageProcessor"})
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 3}')
    with pytest.raises(
        ConfigError, match="the model's image processor is a PixtralImageProcessor; supported are"
    ):
        MediaLayout.from_folder(tmp_path, BOUNDS)
