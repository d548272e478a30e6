"""Media in requests to an SGLang server, and how its patched code reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from relax_events.config import MediaConfig
from relax_events.engines.protocol import GenerationRequest
from relax_events.engines.requests import SampleState, build_samples
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.inflight import InflightRequest
from relax_events.engines.sglang.media_features import PREFIX, build_image_data, parse_image_data
from relax_events.errors import PoisonSample
from relax_events.events.parts import Modality
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import MediaLayout
from tests.unit.image_model import build_image_model, prompt_of, request_about
from tests.unit.video_and_audio import (
    BOUNDS,
    SMALL,
    hybrid_model,
    item_of,
    media_run,
    omni_model,
)

IMAGE, VIDEO, AUDIO = (
    (Modality.IMAGE, (64, 48)),
    (Modality.VIDEO, (48, 32, 9)),
    (Modality.AUDIO, 1.13),
)


@pytest.fixture
def request_of_both(tmp_path: Path) -> GenerationRequest:
    library = MediaLibrary(media_run(tmp_path, build_image_model()))
    media = tuple(library.load(library.add(item_of(*kind))) for kind in (IMAGE, VIDEO))
    return replace(
        request_about(1, (), num_samples=3),
        prompt_tokens=prompt_of(media, bounds=BOUNDS),
        media=media,
    )


def samples_of(
    request: GenerationRequest, path: Path | None = None, bounds: MediaConfig = BOUNDS
) -> tuple[list[SampleState], ModelFolder, MediaLayout]:
    model = ModelFolder.read(path or build_image_model(), media=bounds)
    assert model.layout is not None
    return (
        build_samples(request, first_order=0, running_ids=(), model=model, max_context_tokens=512),
        model,
        model.layout,
    )


def test_media_arrays_are_sent_once_per_prompt_group_and_arrive_unchanged(
    request_of_both: GenerationRequest,
) -> None:
    samples, model, layout = samples_of(request_of_both)
    samples[1].tokens = np.array(
        [65, layout.placeholders[Modality.IMAGE]], np.int32
    )  # it has begun, and drew a placeholder
    sent = build_image_data(samples, model, weights="v1")
    assert ["arrays" in json.loads(text.removeprefix(PREFIX)) for text in sent] == [
        True,
        False,
        False,
    ]
    prompts = parse_image_data(sent)
    assert len({id(arrays) for arrays, _ in prompts}) == 1
    arrays = prompts[0][0]
    assert [array.modality for array in arrays] == [Modality.IMAGE, Modality.VIDEO]
    for array, piece in zip(arrays, request_of_both.media, strict=True):
        assert piece.pixels is not None
        np.testing.assert_array_equal(array.values, piece.pixels)
    num_tokens = len(request_of_both.prompt_tokens)
    assert [placing.positions.shape for _, placing in prompts] == [
        (3, num_tokens),
        (3, num_tokens + 2),
        (3, num_tokens),
    ]


def test_placeholder_runs_match_the_positions_in_the_prompt(
    request_of_both: GenerationRequest,
) -> None:
    samples, model, layout = samples_of(request_of_both)
    (_, placing), *_ = parse_image_data(build_image_data(samples, model, weights="v1"))
    tokens = request_of_both.prompt_tokens.tolist()
    for modality, runs in zip((Modality.IMAGE, Modality.VIDEO), placing.runs, strict=True):
        positions = [position for first, last in runs for position in range(first, last + 1)]
        assert positions == [
            position
            for position, token in enumerate(tokens)
            if token == layout.placeholders[modality]
        ]
        assert all(
            tokens[first - 1] != layout.placeholders[modality] != tokens[last + 1]
            for first, last in runs
        )
    assert [len(runs) for runs in placing.runs] == [
        1,
        4,
    ]  # of the video one for each of its moments
    assert placing.shift == placing.positions.max() + 1 - len(tokens)


def test_audio_and_video_soundtracks_are_sent_as_spectrograms(
    tmp_path: Path,
) -> None:
    library = MediaLibrary(media_run(tmp_path, omni_model(), use_audio_in_video=True))
    media, bounds = (
        tuple(library.load(library.add(item_of(*kind))) for kind in (AUDIO, VIDEO)),
        MediaConfig(**SMALL, use_audio_in_video=True),
    )
    prompt = prompt_of(media, path=omni_model(), bounds=bounds)
    request = replace(request_about(1, (), num_samples=1), prompt_tokens=prompt, media=media)
    samples, model, layout = samples_of(request, omni_model(), bounds)
    ((arrays, placing),) = parse_image_data(build_image_data(samples, model, weights="v1"))
    assert [array.modality for array in arrays] == [Modality.AUDIO, Modality.VIDEO, Modality.AUDIO]
    assert [array.values.shape for array in arrays] == [(128, 113), (8, 32, 48, 3), (128, 450)]
    assert [array.geometry is None for array in arrays] == [True, False, True]
    extractor = WhisperFeatureExtractor.from_pretrained(omni_model())
    plain = extractor(
        media[0].samples,
        sampling_rate=16_000,
        padding="longest",
        truncation=False,
        return_tensors="np",
    )
    np.testing.assert_array_equal(arrays[0].values, plain["input_features"][0][:, :113])
    positions = [
        [position for first, last in runs for position in range(first, last + 1)]
        for runs in placing.runs
    ]
    tokens = prompt.tolist()
    assert [len(some) for some in positions] == [15, 24, 59]
    assert all(
        tokens[position] == layout.placeholders[array.modality]
        for array, some in zip(arrays, positions, strict=True)
        for position in some
    )
    assert min(positions[2]) < max(positions[1]) < max(positions[2])  # in the order of time


def test_media_identity_distinguishes_shapes_and_policy_versions(
    request_of_both: GenerationRequest,
) -> None:
    image = request_of_both.media[0]
    assert image.pixels is not None
    turned = replace(image, pixels=np.ascontiguousarray(np.zeros_like(image.pixels).swapaxes(0, 1)))
    plain = replace(image, pixels=np.zeros_like(image.pixels))

    def identity(media: tuple[object, ...], weights: str) -> bytes:
        samples, model, _ = samples_of(request_of_both)
        for sample in samples:
            sample.media = (*media, request_of_both.media[1])  # type: ignore[assignment]
        return parse_image_data(build_image_data(samples, model, weights=weights))[0][0][0].identity

    assert identity((plain,), "v1") == identity((plain,), "v1")
    assert (
        len(
            {
                identity((image,), "v1"),
                identity((image,), "v2"),
                identity((plain,), "v1"),
                identity((turned,), "v1"),
            }
        )
        == 4
    )


def test_tokens_are_rejected_when_server_reports_another_prompt_length(
    request_of_both: GenerationRequest,
) -> None:
    samples, _, _ = samples_of(request_of_both)
    request = InflightRequest(samples[0], "rid", 1)
    num_sent = len(request_of_both.prompt_tokens)
    meta = {
        "prompt_tokens": num_sent - 5,
        "cached_tokens": 0,
        "finish_reason": None,
        "output_token_logprobs": [[-1.0, 65, None]],
    }
    request.add_event({"meta_info": meta, "output_ids": [65]})
    request.add_event(
        {"meta_info": meta | {"finish_reason": {"type": "length"}}, "output_ids": [65]}
    )
    assert request.has_finished
    assert request.tokens == []
    assert (
        f"the server read {num_sent - 5} tokens, but the prompt has {num_sent}" in request.rejection
    )


def test_media_are_rejected_for_a_model_that_sglang_serves_text_only(
    request_of_both: GenerationRequest,
) -> None:
    model = ModelFolder.read(hybrid_model(), media=BOUNDS)
    with pytest.raises(
        PoisonSample, match="the engine passes text only to its model; use engine 'transformers'"
    ):
        build_samples(
            request_of_both, first_order=0, running_ids=(), model=model, max_context_tokens=512
        )
