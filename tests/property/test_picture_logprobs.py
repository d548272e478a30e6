"""Engine, scorers and trainer say the same of every token, however pictures and text were packed, padded and spread."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from engine_requests import finish, fresh_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GenerationRequest
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.training.packing import pack
from relax_events.training.policy_model import PolicyModel
from relax_events.training.sample_media import SampleMedia
from relax_events.training.scoring import LogprobScorer
from relax_events.weights import Weights
from tests.unit.pictures import picture_engine, picture_model, picture_run, prompt_of, ready, scratch_folder, shown

SIZES = [(32, 32), (64, 48), (32, 96), (48, 80), (100, 70)]
CHOICES = st.lists(st.lists(st.sampled_from(range(len(SIZES))), max_size=3), min_size=1, max_size=5)
TOLERANCE = 1e-4


@cache
def library() -> MediaLibrary:
    return MediaLibrary(picture_run(scratch_folder()))


@cache
def new_weights() -> Weights:
    model = AutoModelForImageTextToText.from_pretrained(picture_model(seed=4))
    return Weights(1, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, bytes(32))


@cache
def engine() -> Any:
    """An engine that took new weights after its start."""
    opened = picture_engine(max_running_samples=32)
    opened.load_weights(new_weights())
    return opened


@cache
def policy() -> PolicyModel:
    model = PolicyModel(picture_model(), config=picture_run(scratch_folder()).model, device=torch.device("cpu"))
    model.replace_weights(new_weights().tensors)
    return model


@cache
def scorer() -> LogprobScorer:
    opened = LogprobScorer(picture_model(), model=picture_run(scratch_folder()).model, threads=1, max_tokens=300, library=library())
    opened.load_weights(new_weights())
    return opened


def rolled_out(groups: list[list[int]], seed: int) -> list[SampleReady]:
    """Generate three samples for each prompt about the chosen pictures."""
    samples = []
    for number, chosen in enumerate(groups):
        media = tuple(shown(library(), SIZES[index], seed=index)[0] for index in chosen)
        request = GenerationRequest(
            prompt_group_id=f"g{number}",
            prompt_tokens=prompt_of(media),
            samples=tuple(fresh_sample(f"g{number}/{index}", seed + 100 * number + index) for index in range(3)),
            sampling=SamplingConfig(max_new_tokens=1 + (seed + number) % 7),
            stop_token_ids=(),
            media=media,
        )
        engine().submit(request)
        samples.append(request)
    ended = finish(engine())
    return [ready(request, ended[sample.sample_id], index) for request in samples for index, sample in enumerate(request.samples)]


def forward(samples: list[SampleReady], **layout: Any) -> torch.Tensor:
    batch = pack(samples, vocab_size=policy().vocab_size, **layout)
    return policy().token_logprobs(SampleMedia(policy().family, library()).added(batch, samples)).logprobs


@settings(max_examples=12)
@given(CHOICES, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_rollout_and_trainer_agree_packed_padded_and_shared(groups: list[list[int]], seed: int, order: Any) -> None:
    samples = rolled_out(groups, seed)
    order.shuffle(samples)
    drawn = torch.from_numpy(np.concatenate([sample.rollout_logprobs[sample.loss_mask.astype(bool)] for sample in samples]))
    with torch.no_grad():
        for layout in ({"share_rows": True}, {"share_rows": False, "row_multiple": 16}):
            torch.testing.assert_close(forward(samples, **layout), drawn, rtol=0, atol=TOLERANCE)
        samples.sort(key=lambda sample: sample.sample_id)
        drawn = torch.from_numpy(np.concatenate([sample.rollout_logprobs[sample.loss_mask.astype(bool)] for sample in samples]))
        sharing = replace(policy().prompt_sharing, cell_cost=0.0)
        torch.testing.assert_close(forward(samples, sharing=sharing), drawn, rtol=0, atol=TOLERANCE)
    for sample, scores in zip(samples, scorer().score(samples), strict=True):
        np.testing.assert_allclose(scores, sample.rollout_logprobs, rtol=0, atol=TOLERANCE)


@settings(max_examples=6)
@given(CHOICES, st.integers(0, 10**6))
def test_score_of_a_sample_is_the_same_bits_whatever_is_scored_beside_it(groups: list[list[int]], seed: int) -> None:
    samples = rolled_out(groups, seed)
    together = scorer().score(samples)
    for sample, scores in zip(samples, together, strict=True):
        assert scorer().score([sample])[0].tobytes() == scores.tobytes()


@settings(max_examples=6)
@given(CHOICES, st.integers(0, 10**6))
def test_gradient_is_the_same_packed_padded_and_shared(groups: list[list[int]], seed: int) -> None:
    samples = rolled_out(groups, seed)
    sharing = replace(policy().prompt_sharing, cell_cost=0.0)
    layouts: list[dict[str, Any]] = [{"share_rows": False}, {"share_rows": True}, {"sharing": sharing}]
    gradients = []
    for layout in layouts:
        policy().module.zero_grad()
        forward(samples, **layout).sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in policy().module.named_parameters() if parameter.grad is not None})
    brings_media = any(groups)
    assert any(name.startswith("model.visual.") for name in gradients[0]) == brings_media
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()) + 1e-5)
