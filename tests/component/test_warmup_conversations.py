"""Conversations of an SFT warm-up: the row's answers as assistant turns, the environment's
observations between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_settings import small_run
from transformers import AutoModelForImageTextToText

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.models.families import read_family
from relax_events.packages.examples.sft_warmup import (
    IGNORED,
    SupervisedExample,
    count_correct,
    pad_left,
)
from relax_events.packages.examples.warmup_conversations import WarmupConversations
from tests.unit.image_model import build_image_model, image_run

ENVIRONMENTS = Path(__file__).parents[1] / "environment_functions.py"


@contextmanager
def played(
    folder: Path, function: str = "zoom", *, assistant_turns_key: str = "answers"
) -> Iterator[tuple[WarmupConversations, RunConfig]]:
    tree = image_run(folder, data={"source": "synthetic_images:zoom"}).model_dump(
        mode="json", exclude_unset=True
    )
    environment = {"function": function}
    config = small_run(
        tree
        | {"environment": environment, "sft_warmup": {"assistant_turns_key": assistant_turns_key}}
    )
    with closing(WarmupConversations(config, model_path=build_image_model())) as opened:
        yield opened, config


def rows_of(config: RunConfig, count: int) -> Sequence[PromptRow]:
    source = open_source(config.data, seed=0)
    return [source.row(number) for number in range(count)]


def test_warmup_responses_and_zoomed_image_are_placed_by_the_chat_template(tmp_path: Path) -> None:
    with played(tmp_path) as (demonstrations, config):
        renderer = PromptRenderer.from_folder(
            build_image_model(), config.data, media=config.model.media
        )
        for row in rows_of(config, 4):
            example = demonstrations.build_example(row)
            small, quarter = (piece.reference for piece in example.media)
            assert small.digest != quarter.digest
            where, colour = [
                renderer.completion_text(part)
                for part in runs(example.answer_tokens, example.loss_mask)
            ]
            assert colour == row.answer
            question = row.messages[0].text
            before = [
                asked(question, small),
                ChatMessage.of_text("assistant", where),
                asked(question, quarter),
            ]
            length = len(example.answer_tokens) - len(renderer.answer_tokens(colour))
            read = np.append(example.prompt_tokens, example.answer_tokens[:length])
            assert read.tolist() == renderer.prompt_tokens(before).tolist()
            assert (
                example.answer_tokens[length:].tolist() == renderer.answer_tokens(colour).tolist()
            )
            assert f'"answers":["{where}","{colour}"]' in row.metadata
    assert not (config.run_directory / "objects").exists()


def asked(question: str, image: MediaRef) -> ChatMessage:
    return ChatMessage(
        "user", [ContentPart(Modality.IMAGE, media=image), ContentPart(Modality.TEXT, question)]
    )


def runs(tokens: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.flatnonzero(np.diff(chosen)) + 1)[::2]


def test_reference_answer_is_the_only_turn_without_assistant_turns_key(tmp_path: Path) -> None:
    with played(tmp_path, assistant_turns_key="") as (demonstrations, config):
        (row,) = rows_of(config, 1)
        example = demonstrations.build_example(row)
    assert len(example.media) == 1
    assert example.loss_mask.all()


@pytest.mark.parametrize(
    ("function", "assistant_turns_key", "text"),
    [
        (
            f"{ENVIRONMENTS}:silent",
            "answers",
            r"ends the sample at answer 1 of 2: \['.*', '.*'\]; see sft_warmup.assistant_turns_key",
        ),
        (
            "zoom",
            "original",
            (
                "metadata has original = 'data:image/png.*'; it must be a list of answers: set "
                "sft_warmup.assistant_turns_key"
            ),
        ),
        ("zoom", "none", "metadata has none = 'None'; it must be a list of answers"),
    ],
)
def test_warmup_row_that_cannot_be_demonstrated_is_rejected(
    tmp_path: Path, function: str, assistant_turns_key: str, text: str
) -> None:
    with (
        played(tmp_path, function, assistant_turns_key=assistant_turns_key) as (
            demonstrations,
            config,
        ),
        pytest.raises(ConfigError, match=text),
    ):
        demonstrations.build_example(rows_of(config, 1)[0])


def test_warmup_trains_only_tokens_of_the_policy(tmp_path: Path) -> None:
    with played(tmp_path) as (demonstrations, config):
        examples = [demonstrations.build_example(row) for row in rows_of(config, 3)]
        family = read_family(build_image_model(), config.model.media)
    labels = pad_left(examples, device=torch.device("cpu"), family=family).labels.numpy()
    for row, example in zip(labels, examples, strict=True):
        assert row[row != IGNORED].tolist() == example.answer_tokens[example.loss_mask].tolist()


def test_warmup_example_is_correct_if_each_trained_token_is_the_likeliest() -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        build_image_model(), dtype=torch.float32
    )
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens alike: the first of the vocabulary is taken
    prompt = np.array([5, 6], np.int32)
    answers = [
        ([0, 0], [True, True]),
        ([0, 7, 0], [True, False, True]),
        ([0, 7], [True, True]),
        ([7, 0], [True, True]),
    ]
    examples = [
        SupervisedExample(prompt, np.array(tokens, np.int32), np.array(chosen))
        for tokens, chosen in answers
    ]
    assert [count_correct(model, [example]) for example in examples] == [1, 1, 0, 0]
    assert count_correct(model, examples) == 2
