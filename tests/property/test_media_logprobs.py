"""Engine, scorers and trainer compute the same log-probabilities, however media and text are
packed, padded and spread; and so does transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import finish, fresh_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.config import EngineConfig, RunConfig, SamplingConfig
from relax_events.engines.protocol import GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import Modality
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import read_modality
from relax_events.models.families import read_family
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.batch.packing import pack
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.weights import Weights
from tests.folders import kept_folder
from tests.unit.image_model import build_image_model, prompt_of, ready
from tests.unit.video_and_audio import (
    KINDS,
    expert_model,
    hybrid_expert_model,
    hybrid_model,
    item_of,
    media_run,
    omni_model,
    plain_media_logprobs,
)

TOLERANCE = 1e-4
MODELS = {
    "vision": build_image_model,
    "vision with experts": expert_model,
    "vision by linear attention": hybrid_model,
    "vision by linear attention with experts": hybrid_expert_model,
}
SETUPS = [*MODELS, "omni", "audio in video"]
Piece = tuple[Modality, Any]
PIECES: list[Piece] = [(modality, size) for modality, sizes in KINDS.items() for size in sizes]
CHOICES = st.lists(st.lists(st.sampled_from(PIECES), max_size=3), min_size=1, max_size=4)


@dataclass(frozen=True)
class Setup:
    """A family and its roles, each of which took new weights after its start."""

    path: Path
    other: Path
    config: RunConfig

    @cached_property
    def library(self) -> MediaLibrary:
        return MediaLibrary(self.config)

    @cached_property
    def weights(self) -> Weights:
        loader = read_family(self.other, self.config.model.media).loader
        model = loader.from_pretrained(self.other, dtype=torch.float32)
        return Weights(
            1,
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            bytes(32),
        )

    @cached_property
    def engine(self) -> TransformersEngine:
        engine = TransformersEngine(
            self.path,
            config=EngineConfig(threads=1, max_running_samples=32, max_context_tokens=512),
            model=self.config.model,
        )
        engine.load_weights(self.weights)
        return engine

    @cached_property
    def policy(self) -> PolicyModel:
        model = PolicyModel(self.path, config=self.config.model, device=torch.device("cpu"))
        model.replace_weights(self.weights.tensors)
        return model

    @cached_property
    def scorer(self) -> LogprobScorer:
        scorer = LogprobScorer(
            self.path, model=self.config.model, threads=1, max_tokens=300, library=self.library
        )
        scorer.load_weights(self.weights)
        return scorer

    def load_media(self, pieces: Sequence[Piece]) -> tuple[ProcessedMedia, ...]:
        """Put files into the library, and load them as model inputs; audio is left out for
        families without it."""
        known = self.engine._model.layout.MODALITIES
        items = [
            item_of(modality, size, seed=index)
            for index, (modality, size) in enumerate(pieces)
            if modality in known
        ]
        return tuple(self.library.load(self.library.add(item)) for item in items)

    def rolled_out(self, groups: Sequence[Sequence[Piece]], seed: int) -> list[SampleReady]:
        """Generate three samples for each prompt about the chosen pieces."""
        requests = []
        for number, chosen in enumerate(groups):
            media = self.load_media(chosen)
            request = GenerationRequest(
                prompt_group_id=f"g{number}",
                prompt_tokens=prompt_of(media, path=self.path, bounds=self.config.model.media),
                samples=tuple(
                    fresh_sample(f"g{number}/{index}", seed + 100 * number + index)
                    for index in range(3)
                ),
                sampling=SamplingConfig(max_new_tokens=1 + (seed + number) % 7),
                stop_token_ids=(),
                media=media,
            )
            self.engine.submit(request)
            requests.append(request)
        ended = finish(self.engine)
        return [
            ready(request, ended[sample.sample_id], index)
            for request in requests
            for index, sample in enumerate(request.samples)
        ]

    def forward(self, samples: list[SampleReady], **layout: Any) -> torch.Tensor:
        batch = pack(samples, vocab_size=self.policy.vocab_size, **layout)
        return self.policy.token_logprobs(
            SampleMedia(self.policy.family, self.library).add_to(batch, samples)
        ).logprobs


@cache
def setup_of(name: str) -> Setup:
    make = MODELS.get(name, omni_model)
    path, other = make(), make(4)
    return Setup(
        path,
        other,
        media_run(kept_folder("media"), path, use_audio_in_video=name == "audio in video"),
    )


def sampled(samples: Sequence[SampleReady]) -> torch.Tensor:
    return torch.from_numpy(
        np.concatenate(
            [sample.rollout_logprobs[sample.loss_mask.astype(bool)] for sample in samples]
        )
    )


@pytest.mark.parametrize("name", SETUPS)
@settings(max_examples=6)
@given(groups=CHOICES, seed=st.integers(0, 10**6), order=st.randoms(use_true_random=False))
def test_rollout_and_trainer_agree_packed_padded_and_shared(
    name: str, groups: Any, seed: int, order: Any
) -> None:
    setup = setup_of(name)
    samples = setup.rolled_out(groups, seed)
    order.shuffle(samples)
    with torch.no_grad():
        for layout in (
            {"share_rows": setup.policy.shares_rows},
            {"share_rows": False, "row_multiple": 16},
        ):
            torch.testing.assert_close(
                setup.forward(samples, **layout), sampled(samples), rtol=0, atol=TOLERANCE
            )
        samples.sort(key=lambda sample: sample.sample_id)
        if (sharing := setup.policy.prefix_sharing) is not None:
            sharing = replace(sharing, min_tokens=1)
            torch.testing.assert_close(
                setup.forward(samples, sharing=sharing), sampled(samples), rtol=0, atol=TOLERANCE
            )
    for sample, scores in zip(samples, setup.scorer.score(samples), strict=True):
        np.testing.assert_allclose(scores, sample.rollout_logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["vision", "vision by linear attention", "omni"])
@settings(max_examples=4)
@given(groups=CHOICES, seed=st.integers(0, 10**6))
def test_score_of_a_sample_does_not_depend_on_other_samples_in_the_batch(
    name: str, groups: Any, seed: int
) -> None:
    setup = setup_of(name)
    samples = setup.rolled_out(groups, seed)
    together = setup.scorer.score(samples)
    for sample, scores in zip(samples, together, strict=True):
        np.testing.assert_allclose(setup.scorer.score([sample])[0], scores, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["vision", "vision by linear attention", "omni"])
@settings(max_examples=4)
@given(groups=CHOICES, seed=st.integers(0, 10**6))
def test_gradient_is_the_same_packed_padded_and_shared(name: str, groups: Any, seed: int) -> None:
    setup = setup_of(name)
    samples = setup.rolled_out(groups, seed)
    layouts: list[dict[str, Any]] = [
        {"share_rows": False},
        {"share_rows": False, "row_multiple": 16},
    ]
    if (sharing := setup.policy.prefix_sharing) is not None:
        layouts += [{"share_rows": True}, {"sharing": replace(sharing, min_tokens=1)}]
    gradients = []
    for layout in layouts:
        setup.policy.module.zero_grad()
        setup.forward(samples, **layout).sum().backward()
        named = setup.policy.module.named_parameters()
        gradients.append(
            {
                name: parameter.grad.clone()
                for name, parameter in named
                if parameter.grad is not None
            }
        )
    media = [read_modality(reference) for sample in samples for reference in sample.media]
    assert any("visual." in name for name in gradients[0]) == any(
        kind is not Modality.AUDIO for kind in media
    )
    assert any("audio_tower." in name for name in gradients[0]) == (Modality.AUDIO in media)
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(
                other[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()) + 1e-5
            )


@settings(max_examples=4)
@given(chosen=st.lists(st.sampled_from(PIECES), min_size=2, max_size=3), seed=st.integers(0, 10**6))
def test_branches_of_an_episode_with_media_are_those_of_paths_apart(
    chosen: list[Piece], seed: int
) -> None:
    setup = setup_of("omni")
    paths = setup.rolled_out([chosen, chosen[:1]], seed)
    arrays = ("tokens", "loss_mask", "rollout_logprobs", "advantages")
    episode = replace(
        paths[0],
        **{name: np.concatenate([getattr(path, name) for path in paths]) for name in arrays},
        path_lengths=[len(path.tokens) for path in paths],
        path_media=[list(path.media) for path in paths],
        media=[],
    )
    found = []
    for given_sharing in ({"sharing": setup.policy.prefix_sharing}, {}):
        setup.policy.module.zero_grad()
        logprobs = setup.forward([episode], **given_sharing)
        logprobs.sum().backward()
        towers = [
            parameter.grad.clone()
            for parameter in setup.policy.module.parameters()
            if parameter.grad is not None
        ]
        found.append((logprobs.detach(), towers))
    batch = pack([episode], vocab_size=setup.policy.vocab_size, sharing=setup.policy.prefix_sharing)
    assert batch.input_ids.size < batch.num_tokens - 2 * paths[0].num_prompt_tokens + 1
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=TOLERANCE)
    for mine, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(
            mine, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()) + 1e-5
        )


IMAGE, LARGER_IMAGE, VIDEO, LONGER_VIDEO, AUDIO, LONGER_AUDIO = (
    (kind, size) for kind, sizes in KINDS.items() for size in sizes
)
COMPARED: list[tuple[str, list[Piece]]] = [
    ("vision", [LARGER_IMAGE]),
    ("vision", [VIDEO]),
    ("vision", [LONGER_VIDEO, IMAGE]),
    ("vision with experts", [LONGER_VIDEO, IMAGE]),
    ("vision by linear attention", [LARGER_IMAGE, VIDEO]),
    ("vision by linear attention", [LONGER_VIDEO, IMAGE]),
    ("vision by linear attention with experts", [LONGER_VIDEO, IMAGE]),
    ("omni", [AUDIO]),
    ("omni", [LONGER_AUDIO]),
    ("omni", [LONGER_VIDEO, LONGER_AUDIO, LARGER_IMAGE]),
    ("audio in video", [IMAGE, LONGER_VIDEO]),
    ("audio in video", [VIDEO]),
]
"""Not two audio inputs of several lengths: transformers pads the one to the other's, and the
tower's convolutions read the padding."""


@pytest.mark.parametrize(
    ("name", "pieces"),
    COMPARED,
    ids=[f"{name}: {', '.join(kind for kind, _ in pieces)}" for name, pieces in COMPARED],
)
def test_token_logprobs_equal_those_of_transformers(name: str, pieces: list[Piece]) -> None:
    setup, audio_in_video = setup_of(name), name == "audio in video"
    media = setup.load_media(pieces)
    tokens = np.append(
        prompt_of(media, path=setup.path, bounds=setup.config.model.media),
        np.arange(5, dtype=np.int32),
    )
    sample = replace(
        setup.rolled_out([[]], 0)[0], tokens=tokens, media=[piece.reference for piece in media]
    )
    mask = (np.arange(len(tokens)) >= len(tokens) - 5).astype(np.uint8)
    fresh = PolicyModel(setup.path, config=setup.config.model, device=torch.device("cpu"))
    sample = replace(sample, loss_mask=mask)
    batch = pack([sample], vocab_size=fresh.vocab_size)
    with torch.no_grad():
        found = fresh.token_logprobs(
            SampleMedia(fresh.family, setup.library).add_to(batch, [sample])
        ).logprobs
    expected = plain_media_logprobs(setup.path, tokens, media, audio_in_video=audio_in_video)[-5:]
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=TOLERANCE)
