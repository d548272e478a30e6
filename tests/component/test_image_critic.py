"""A critic that reads images: a value depends on the tokens and images before it, however samples
are packed.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import finish

from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.batch.packing import pack
from tests.unit.image_model import (
    build_image_model,
    image_engine,
    image_item,
    image_run,
    plain_model,
    plain_pixels,
    ready,
    request_for,
)


def rolled_out(folder: Path) -> list[SampleReady]:
    """Return four samples of two prompts, one about two images and one about none; their values are
    0, their returns 1."""
    engine, library = image_engine(), MediaLibrary(image_run(folder))
    requests = [request_for(number, library) for number in (1, 2)]
    for request in requests:
        engine.submit(request)
    ended = finish(engine)
    samples = [
        ready(request, ended[sample.sample_id], index)
        for request in requests
        for index, sample in enumerate(request.samples)
    ]
    return [replace(sample, values=np.zeros(len(sample.tokens), np.float32)) for sample in samples]


def critic(folder: Path, *, dtype: torch.dtype = torch.float32) -> TorchCritic:
    config = image_run(folder, algorithm={"name": "ppo"}, critic={"learning_rate": 3e-3})
    made = TorchCritic(config, dtype=dtype)
    torch.nn.init.normal_(made._model.module.weight, generator=torch.Generator().manual_seed(0))
    made._parameters.load(
        TrainerState(
            policy_version=0,
            tensors={name: tensor.clone() for name, tensor in made._parameters.tensors().items()},
        )
    )
    return made


def test_critic_values_are_equal_for_packed_padded_and_single_samples(tmp_path: Path) -> None:
    samples, mine = rolled_out(tmp_path), critic(tmp_path)
    scores = mine.score(samples)
    for sample, score in zip(samples, scores, strict=True):
        np.testing.assert_allclose(mine.score([sample])[0], score, rtol=0, atol=1e-5)
    expected = np.concatenate(
        [
            score[np.asarray(sample.loss_mask).astype(bool)]
            for sample, score in zip(samples, scores, strict=True)
        ]
    )
    for shares in (True, False):
        batch = mine._media.add_to(
            pack(samples, vocab_size=mine._model.vocab_size, share_rows=shares), samples
        )
        with torch.no_grad():
            np.testing.assert_allclose(
                mine._model.token_values(batch).numpy(), expected, rtol=0, atol=1e-4
            )


def test_critic_values_match_transformers_states_and_depend_on_images(tmp_path: Path) -> None:
    (sample, *_), mine = rolled_out(tmp_path), critic(tmp_path, dtype=torch.float64)
    files = [
        image_item(*size, seed=10 + index).source for index, size in enumerate(((64, 48), (32, 96)))
    ]
    values = mine.score([sample])[0]
    ids, model = (
        torch.from_numpy(np.array(sample.tokens, np.int64))[None],
        plain_model(build_image_model()),
    )
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        states = model.model(
            input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **plain_pixels(files)
        ).last_hidden_state[0]  # type: ignore[arg-type]
        expected = mine._model.module.head(states)[:-1]
    mask = np.asarray(sample.loss_mask).astype(bool)
    np.testing.assert_allclose(values[mask], expected.numpy()[mask[1:]], rtol=0, atol=1e-5)
    other = MediaLibrary(image_run(tmp_path)).add(image_item(64, 48, seed=99))
    assert (
        np.abs(mine.score([replace(sample, media=[other, sample.media[1]])])[0] - values).max()
        > 1e-3
    )


def test_critic_learns_returns_of_samples_with_and_without_images(tmp_path: Path) -> None:
    samples, mine = rolled_out(tmp_path), critic(tmp_path)
    losses = []
    for _ in range(15):
        mine.accumulate(samples)
        losses.append(mine.step().value_loss)
    assert losses[-1] < 0.2 * losses[0]
    assert any("visual" in name for name in mine.state().tensors)


@pytest.mark.parametrize("name", ["lm_head", "output"])
def test_critic_keeps_no_output_head(tmp_path: Path, name: str) -> None:
    assert not any(
        name in parameter for parameter, _ in critic(tmp_path)._model.module.named_parameters()
    )
