"""Media of samples on their way into the trainer: a sample with missing or mismatching media is
rejected by its id.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import finish

from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.ranks import SingleRank
from tests.unit.image_model import image_engine, image_run, ready, request_for
from tests.unit.trainer_samples import make_samples, run_config


@pytest.fixture
def samples(tmp_path: Path) -> list[SampleReady]:
    """Two samples of a prompt about two images."""
    engine, request = image_engine(), request_for(1, MediaLibrary(image_run(tmp_path)))
    engine.submit(request)
    return [ready(request, sample, index) for index, sample in enumerate(finish(engine).values())]


def test_samples_are_trained_with_their_images(samples: list[SampleReady], tmp_path: Path) -> None:
    backend = TorchBackend(image_run(tmp_path), ranks=SingleRank())
    backend.accumulate(samples)
    metrics = backend.step()
    assert metrics.mismatch_max_abs < 1e-4
    assert metrics.num_tokens == sum(len(sample.tokens) for sample in samples)


def test_error_names_sample_with_a_missing_image_and_it_adds_no_gradient(
    samples: list[SampleReady], tmp_path: Path
) -> None:
    backend = TorchBackend(image_run(tmp_path), ranks=SingleRank())
    (gone, *others) = samples[0].media
    lost = replace(
        samples[0],
        media=[
            replace(
                gone, digest=bytes(32), uri=gone.uri.replace(gone.digest.hex(), bytes(32).hex())
            ),
            *others,
        ],
    )
    with pytest.raises(
        PoisonSample,
        match=rf"sample {lost.sample_id}: can't read file://.*: there is no such object",
    ):
        backend.accumulate([lost, samples[1]])
    backend.accumulate(samples[1:])
    assert backend.step().num_samples == 1


@pytest.mark.parametrize("num_left", [1, 3])
def test_error_names_sample_whose_images_do_not_match_its_placeholders(
    samples: list[SampleReady], tmp_path: Path, num_left: int
) -> None:
    wrong = replace(samples[0], media=[*samples[0].media, *samples[0].media][:num_left])
    with pytest.raises(
        PoisonSample,
        match=rf"sample {wrong.sample_id}: {num_left} media files have \d+ tokens, and the sequence has 24",
    ):
        TorchBackend(image_run(tmp_path), ranks=SingleRank()).accumulate([wrong])


def test_placeholder_sampled_by_the_policy_is_trained_as_a_token(
    samples: list[SampleReady], tmp_path: Path
) -> None:
    backend = TorchBackend(image_run(tmp_path), ranks=SingleRank())
    (placeholder,) = {
        int(token) for token in samples[0].tokens if (samples[0].tokens == token).sum() >= 24
    }
    tokens = np.where(samples[0].loss_mask.astype(bool), placeholder, samples[0].tokens).astype(
        np.int32
    )
    backend.accumulate([replace(samples[0], tokens=tokens)])
    assert np.isfinite(backend.step().loss)


def test_text_model_error_names_the_sample_with_images(samples: list[SampleReady]) -> None:
    backend = TorchBackend(run_config(), ranks=SingleRank())
    text = replace(make_samples(1)[0], media=samples[0].media)
    with pytest.raises(PoisonSample, match="sample s0: the model reads text only"):
        backend.accumulate([text])


def test_lost_sample_with_images_has_no_part_in_a_train_step(tmp_path: Path) -> None:
    """It is its prompt alone, whose placeholders must fit the prompt's images; the step is the one
    without it.
    """
    config, engine = image_run(tmp_path), image_engine()
    library = MediaLibrary(config)
    request = request_for(1, library, num_samples=3)
    engine.submit(request)
    first, second, third = (
        ready(request, sample, index) for index, sample in enumerate(finish(engine).values())
    )
    num_prompt = third.num_prompt_tokens
    assert num_prompt
    lost = replace(
        third,
        tokens=third.tokens[:num_prompt],
        loss_mask=np.zeros(num_prompt, np.uint8),
        rollout_logprobs=np.zeros(num_prompt, np.float32),
        advantages=np.zeros(num_prompt, np.float32),
        reward=None,
        finish_reason=FinishReason.LOST,
    )
    assert lost.media
    trained = []
    for samples in ([first, second], [first, lost, second]):
        backend = TorchBackend(config, ranks=SingleRank())
        backend.accumulate(samples)
        backend.step()
        trained.append(collect_weights(backend))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=1e-6)
