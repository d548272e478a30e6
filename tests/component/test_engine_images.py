"""Engine `transformers` on prompts with images, compared with transformers' own forward."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_requests import continued, finish, fresh_sample, make_engine, make_request, step
from transformers import AutoModelForImageTextToText

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import PoisonSample
from relax_events.events.parts import Modality, VersionSegment
from relax_events.media.library import MediaLibrary
from relax_events.weights import Weights
from tests.unit.image_model import (
    SIZES,
    build_image_model,
    image_engine,
    image_file,
    image_run,
    load_images,
    plain_logprobs,
    request_about,
    request_for,
)


@pytest.fixture
def library(tmp_path: Path) -> MediaLibrary:
    return MediaLibrary(image_run(tmp_path))


def expected_logprobs(
    request: GenerationRequest, completion: np.ndarray, *, path: Path | None = None
) -> np.ndarray:
    number = int(request.prompt_group_id[1:])
    files = [
        image_file(*size, seed=10 * number + index) for index, size in enumerate(SIZES[number])
    ]
    return plain_logprobs(np.concatenate([request.prompt_tokens, completion]), files, path=path)[
        len(request.prompt_tokens) - 1 :
    ]


def check(
    engine: TransformersEngine, requests: list[GenerationRequest], *, path: Path | None = None
) -> None:
    found = finish(engine)
    for request in requests:
        for sample in request.samples:
            got = found[sample.sample_id]
            np.testing.assert_allclose(
                got.logprobs, expected_logprobs(request, got.tokens, path=path), rtol=0, atol=1e-4
            )


def test_logprobs_match_transformers_for_mixed_image_and_text_prompts(
    library: MediaLibrary,
) -> None:
    engine = image_engine()
    requests = [request_for(number, library) for number in SIZES]
    for request in requests:
        engine.submit(request)
    check(engine, requests)


def test_engine_distinguishes_equal_prompts_with_different_images(library: MediaLibrary) -> None:
    engine = image_engine()
    one, other = (
        request_about(number, load_images(library, (32, 32), seed=10 * number)) for number in (0, 3)
    )
    assert np.array_equal(one.prompt_tokens, other.prompt_tokens)
    other = request_about(0, other.media)
    engine.submit(one)
    first = finish(engine)
    engine.submit(other)
    second = finish(engine)
    engine.submit(one)
    engine.submit(GenerationRequest(**{name: getattr(other, name) for name in ("prompt_tokens", "sampling", "stop_token_ids", "media")},
                                    prompt_group_id="g9", samples=(fresh_sample("g9/0", 0), fresh_sample("g9/1", 1))))  # fmt: skip
    alongside = finish(engine)
    assert np.abs(first["g0/0"].logprobs[:1] - second["g0/0"].logprobs[:1]) > 1e-3
    for name, expected in (
        ("g0/0", first),
        ("g9/0", second),
    ):  # the first token's: later tokens may follow a different sampled token
        assert alongside[name].logprobs[:1] == pytest.approx(
            expected["g0/0"].logprobs[:1], abs=1e-5
        )


def test_logprobs_of_samples_joining_a_running_batch_match_transformers(
    library: MediaLibrary,
) -> None:
    engine = image_engine()
    for number in (4, 1, 0):
        engine.submit(request_for(number, library))
    step(engine)
    for number in (2, 3):
        engine.submit(request_for(number, library))
    check(engine, [request_for(number, library) for number in SIZES])


def test_aborted_sample_with_images_resumes_from_its_prefix(library: MediaLibrary) -> None:
    engine = image_engine()
    request = request_for(1, library)
    engine.submit(request)
    whole = finish(engine)
    engine.submit(request)
    step(engine)
    partial = engine.abort()
    assert {len(sample.tokens) for sample in partial} == {2}
    again = continued(request, partial)
    engine.submit(
        GenerationRequest(
            **{name: getattr(again, name) for name in again.__slots__ if name != "media"},
            media=request.media,
        )
    )
    resumed = finish(engine)
    for name, sample in whole.items():
        assert resumed[name].tokens.tolist() == sample.tokens.tolist()
        np.testing.assert_allclose(resumed[name].logprobs, sample.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_running", ["restart", "swap"])
def test_logprobs_follow_new_weights(library: MediaLibrary, on_running: str) -> None:
    engine, other = image_engine(), build_image_model(seed=4)
    model = AutoModelForImageTextToText.from_pretrained(other)
    weights = Weights(
        1,
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        bytes(32),
    )
    running = request_for(1, library)
    engine.submit(running)
    step(engine)
    engine.load_weights(weights, on_running=on_running)  # type: ignore[arg-type]
    ended = finish(engine)
    if on_running == "restart":
        for sample in ended.values():
            np.testing.assert_allclose(
                sample.logprobs[2:],
                expected_logprobs(running, sample.tokens, path=other)[2:],
                rtol=0,
                atol=1e-4,
            )
    requests = [request_for(number, library) for number in (0, 3)]
    for request in requests:
        engine.submit(request)
    check(engine, requests, path=other)


def test_engine_rejects_images_that_do_not_match_the_prompt_placeholders(
    library: MediaLibrary,
) -> None:
    engine, request = image_engine(), request_for(1, library)
    fewer = GenerationRequest(
        **{name: getattr(request, name) for name in request.__slots__ if name != "media"},
        media=request.media[:1],
    )
    with pytest.raises(
        PoisonSample,
        match="1 media files have 12 tokens, and the sequence has 24 placeholders",
    ):
        engine.submit(fewer)
    assert engine.num_running == 0


def test_engine_with_a_text_model_rejects_images(library: MediaLibrary) -> None:
    text = make_request(1)
    media = load_images(library, (32, 32))
    with pytest.raises(
        PoisonSample,
        match="prompt group g1 has 1 media files, and the engine passes text only to its model",
    ):
        make_engine().submit(
            GenerationRequest(
                **{name: getattr(text, name) for name in text.__slots__ if name != "media"},
                media=media,
            )
        )


def test_placeholder_sampled_by_the_policy_is_an_ordinary_token(
    library: MediaLibrary,
) -> None:
    engine, request = image_engine(), request_for(0, library)
    layout = engine._model.family.layout
    assert layout is not None
    placeholder = layout.placeholders[Modality.IMAGE]
    engine._model._head.weight.data[placeholder] = 0
    engine._model._head.weight.data[:] *= (
        1e-3  # every token is about as likely, so this one is sampled among many
    )
    many = GenerationRequest(
        **{
            name: getattr(request, name)
            for name in request.__slots__
            if name not in ("samples", "sampling")
        },
        samples=tuple(fresh_sample(f"g0/{index}", index) for index in range(16)),
        sampling=SamplingConfig(max_new_tokens=48),
    )
    engine.submit(many)
    sampled = finish(engine)
    wrote = [sample for sample in sampled.values() if placeholder in sample.tokens[:-1]]
    assert wrote
    again = continued(
        many,
        [
            replace(
                wrote[0],
                tokens=wrote[0].tokens[:-1],
                logprobs=wrote[0].logprobs[:-1],
                segments=shorter(wrote[0]),
            )
        ],
    )
    engine.submit(
        GenerationRequest(
            **{name: getattr(again, name) for name in again.__slots__ if name != "media"},
            media=request.media,
        )
    )
    (resumed,) = finish(
        engine
    ).values()  # its prefill reads the placeholder that was written as the decoding steps did
    assert resumed.tokens.tolist() == wrote[0].tokens.tolist()
    np.testing.assert_allclose(resumed.logprobs, wrote[0].logprobs, rtol=0, atol=1e-5)


def shorter(sample: GeneratedSample) -> tuple[VersionSegment, ...]:
    (segment,) = sample.segments
    return (replace(segment, num_tokens=segment.num_tokens - 1),)
