"""Rows with images."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from relax_events.config import DataConfig
from relax_events.data.conversations import insert_media
from relax_events.data.prompt_filter import build_filters
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow, PromptSource, build_storing_reader
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import Modality
from relax_events.media.library import MediaLibrary
from relax_events.packages.examples.tiny_models import make_tiny
from tests.unit.image_model import BOUNDS, build_image_model, image_file, image_run, question

KEYS = {"multimodal_keys": {"image": "images"}}
IMAGE, TEXT = Modality.IMAGE, Modality.TEXT


def rows_of(folder: Path, *rows: Any, **keys: Any) -> PromptSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return open_source(
        DataConfig.model_validate({"source": f"jsonl:{path}", **KEYS, **keys}), seed=0
    )


def parts(row: PromptRow) -> list[tuple[Modality, str | None]]:
    return [(part.kind, part.text) for message in row.messages for part in message.parts]


def test_placeholders_in_text_become_image_parts_in_order(tmp_path: Path) -> None:
    row = rows_of(
        tmp_path,
        {"prompt": "see <image> and <image>?", "images": ["a.png", "b.png"]},
        media_root=tmp_path,
    ).row(0)
    assert parts(row) == [
        (TEXT, "see "),
        (IMAGE, None),
        (TEXT, " and "),
        (IMAGE, None),
        (TEXT, "?"),
    ]
    assert [(item.source, item.location) for item in row.media] == [
        ("a.png", f"{tmp_path}/rows.jsonl:row 0: images[0]"),
        ("b.png", f"{tmp_path}/rows.jsonl:row 0: images[1]"),
    ]
    assert row.metadata == "{}"


def test_image_parts_of_a_chat_message_mark_image_positions(tmp_path: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    row = rows_of(
        tmp_path,
        {"prompt": [{"role": "user", "content": content}], "images": "a.png"},
        system_prompt="be brief",
    ).row(0)
    assert parts(row) == [(TEXT, "be brief"), (IMAGE, None), (TEXT, "what?")]


@pytest.mark.parametrize("images", [None, []])
def test_row_without_images_is_accepted_in_an_image_dataset(
    tmp_path: Path, images: list[str] | None
) -> None:
    with_image = {"prompt": "<image>?", "images": ["a.png"]}
    row = rows_of(tmp_path, {"prompt": "just text", "images": images}, with_image).row(0)
    assert (parts(row), row.media) == ([(TEXT, "just text")], [])


def test_image_marker_is_plain_text_without_an_image_column(tmp_path: Path) -> None:
    row = rows_of(tmp_path, {"prompt": "an <image> tag"}, multimodal_keys={}).row(0)
    assert parts(row) == [(TEXT, "an <image> tag")]


@pytest.mark.parametrize(
    ("prompt", "images", "text"),
    [
        (
            "see <image>",
            [],
            (
                "the prompt has 1 <image> and the row has 0 of modality image; there must "
                "be one placeholder for each"
            ),
        ),
        ("see", ["a.png"], "the prompt has 0 <image> and the row has 1 of modality image"),
        ("<image><image>", ["a.png"], "the prompt has 2 <image> and the row has 1"),
        ("<image>", [5], r"images\[0\] is a int; media are paths"),
    ],
)
def test_row_with_unequal_numbers_of_images_and_placeholders_is_rejected(
    tmp_path: Path, prompt: str, images: list[Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: .*{text}|rows.jsonl:1: {text}"):
        rows_of(tmp_path, {"prompt": prompt, "images": images})
    good = {"prompt": "<image>", "images": ["a.png"]}
    assert (
        rows_of(tmp_path, {"prompt": prompt, "images": images}, good, max_invalid_rows=1).num_rows
        == 1
    )


def test_error_names_missing_column(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no key 'images', only .*; set data.multimodal_keys"
    ):
        rows_of(tmp_path, {"prompt": "<image>", "photos": ["a.png"]})


def test_parquet_brings_images_as_hugging_face_writes_them(tmp_path: Path) -> None:
    content = image_file(48, 32)
    table = pa.table(
        {"prompt": ["<image>?"], "answer": ["x"], "images": [[{"bytes": content, "path": "a.png"}]]}
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    source = open_source(
        DataConfig.model_validate({"source": f"parquet:{tmp_path}/rows.parquet", **KEYS}), seed=0
    )
    (item,) = source.row(0).media
    assert item.read(BOUNDS) == content


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"multimodal_keys": {"smell": "odours"}}, "Input should be 'image', 'audio' or 'video'"),
        (
            {"multimodal_keys": {"image": "images"}, "chat_template": False},
            "multimodal_keys need a chat template",
        ),
    ],
)
def test_inconsistent_media_settings_are_rejected(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        DataConfig.model_validate({"source": "jsonl:x", **settings})


def test_rows_with_hostile_images_are_skipped_and_reported_and_others_issued(
    tmp_path: Path,
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.png").write_bytes(image_file(32, 32))
    whole = base64.b64encode(image_file(96, 96)).decode()
    images = [
        "../secret.png",
        "gone.png",
        f"data:image/png;base64,{whole[:400]}",
        "data:,hello",
        f"data:image/png;base64,{whole}",
    ]
    source = rows_of(
        tmp_path,
        *({"prompt": "<image>?", "images": [image]} for image in images),
        media_root=tmp_path / "images",
    )
    read_messages = build_storing_reader(MediaLibrary(image_run(tmp_path)))
    config = DataConfig.model_validate({"source": "jsonl:x", **KEYS})
    (prompt_filter,) = build_filters(config, renderer=None, read_messages=read_messages)
    results = [
        prompt_filter(source.row(index), mean_rewards=(), train_step=0) for index in range(5)
    ]
    assert results == [
        "media_outside_root",
        "media_missing",
        "media_truncated",
        "media_wrong_type",
        0.0,
    ]
    (message,) = read_messages(source.row(4))
    assert message.parts[0].media is not None
    assert (message.parts[0].media.width, message.parts[0].media.height) == (96, 96)


def test_prompt_length_filter_counts_image_tokens(tmp_path: Path) -> None:
    source = open_source(DataConfig(source="synthetic_images:colour"), seed=0)
    bounded = DataConfig(source="synthetic_images:colour", max_prompt_tokens=36)  # 34 of text
    renderer = PromptRenderer.from_folder(build_image_model(), bounded, media=BOUNDS)
    filters = build_filters(
        bounded,
        renderer=renderer,
        read_messages=build_storing_reader(MediaLibrary(image_run(tmp_path))),
    )
    num_tokens = len(
        renderer.prompt_tokens(
            build_storing_reader(MediaLibrary(image_run(tmp_path)))(source.row(0))
        )
    )
    assert num_tokens == 34 + 4
    assert [
        prompt_filter(source.row(0), mean_rewards=(), train_step=0) for prompt_filter in filters
    ] == [
        0.0,
        "too_long",
    ]


def test_image_placeholder_is_enclosed_by_vision_tokens_in_the_prompt(tmp_path: Path) -> None:
    renderer = PromptRenderer.from_folder(
        build_image_model(), DataConfig(source="synthetic_images:colour"), media=BOUNDS
    )
    reference = (
        MediaLibrary(image_run(tmp_path))
        .preprocess(
            open_source(DataConfig(source="synthetic_images:colour"), seed=0).row(0).media[0]
        )
        .reference
    )
    messages = question(reference)
    assert renderer.apply_template(messages) == (
        "<|im_start|>user\nso <|vision_start|><|image_pad|><|vision_end|>What is "
        "it?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_with_a_literal_placeholder_token_in_its_text_is_text(tmp_path: Path) -> None:
    renderer = PromptRenderer.from_folder(
        build_image_model(), DataConfig(source="synthetic_images:colour"), media=BOUNDS
    )
    source = rows_of(tmp_path, {"prompt": "<image> or <|image_pad|>?", "images": ["data:,"]})
    reference = (
        MediaLibrary(image_run(tmp_path))
        .preprocess(
            open_source(DataConfig(source="synthetic_images:colour"), seed=0).row(0).media[0]
        )
        .reference
    )
    messages = source.row(0).messages
    tokens = renderer.prompt_tokens(insert_media(messages, [reference]))
    plain = rows_of(tmp_path, {"prompt": "<image> or that?", "images": ["data:,"]})
    without = renderer.prompt_tokens(insert_media(plain.row(0).messages, [reference]))
    assert renderer.completion_text(tokens) == renderer.completion_text(without).replace(
        "that", "<|image_pad|>"
    )
    special = {
        token_id
        for token_id, token in renderer._tokenizer.added_tokens_decoder.items()
        if token.special
    }
    assert [token for token in tokens.tolist() if token in special] == [
        token for token in without.tolist() if token in special
    ]


def test_text_model_rejects_a_prompt_with_images(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "text", corpus=["x"], hidden_size=32)
    renderer = PromptRenderer.from_folder(
        path, DataConfig(source="synthetic_images:colour"), media=BOUNDS
    )
    reference = (
        MediaLibrary(image_run(tmp_path))
        .preprocess(
            open_source(DataConfig(source="synthetic_images:colour"), seed=0).row(0).media[0]
        )
        .reference
    )
    with pytest.raises(PoisonSample, match="has 1 media items, and the model reads text only"):
        renderer.prompt_tokens(question(reference))
