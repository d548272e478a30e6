"""Images, videos and audio through a real SGLang server: its log-probabilities equal the trainer's
on the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_gate import Gate
from engine_requests import MakeEngine, continued, finish
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CollectorRegistry
from routed_samples import check_choice, routed
from safetensors.torch import load_file
from sglang_servers import BOUNDS as SERVER_BOUNDS
from sglang_servers import engines_at, started_server

from relax_events.config import MediaConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
)
from relax_events.engines.sglang import generation
from relax_events.engines.sglang import media_features as media_wire
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.inflight import InflightRequest
from relax_events.engines.sglang.media_features import PREFIX
from relax_events.environments.pool import EnvironmentPool
from relax_events.episodes.engine import EpisodeEngine
from relax_events.episodes.environment_drivers import FunctionDriver
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, Modality, VersionSegment
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import MediaSequence, ProcessedMedia
from relax_events.media.token_layout import MediaLayout, OmniLayout
from relax_events.model_folder import has_experts
from relax_events.models.families import read_family
from relax_events.objects.store import list_message_media
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.telemetry.component_metrics import EpisodeMetrics
from relax_events.weights import Weights
from relax_events.weights.artifact_writer import weights_digest
from tests.folders import kept_folder
from tests.unit.image_model import (
    build_image_model,
    plain_model,
    prompt_of,
    question,
    request_about,
)
from tests.unit.video_and_audio import (
    BOUNDS,
    OMNI,
    SMALL,
    expert_model,
    item_of,
    media_run,
    plain_omni,
    whole_omni_model,
)

pytestmark = pytest.mark.timeout(720)  # the first test waits for the server
ENVIRONMENTS = Path(__file__).parents[1] / "environment_functions.py"
LONG = 200
IMAGE, VIDEO, WIDE = (
    (Modality.IMAGE, (64, 48)),
    (Modality.VIDEO, (48, 32, 9)),
    (Modality.IMAGE, (96, 32)),
)
AUDIO, LONGER, LONGEST = ((Modality.AUDIO, seconds) for seconds in (0.4, 1.13, 9.2))
"""Within one of the tower's windows, in two, and above what it attends to at once."""
VISION_KINDS = [[IMAGE], [VIDEO], [], [WIDE, VIDEO, IMAGE], [VIDEO, VIDEO]]
AUDIO_KINDS = [[AUDIO], [LONGEST], [LONGER, VIDEO, AUDIO, IMAGE], [AUDIO, AUDIO]]
TOLERANCE = 1e-5
EXPERTS = "--enable-return-routed-experts"
Model = Callable[..., Path]


@cache
def deep_omni_model(seed: int = 3) -> Path:
    """Write a tiny model that reads images, video and audio, with one layer more than its vision
    tower feeds."""
    sizes = {"hidden_size": 32, "num_layers": 3}
    return make_tiny(
        kept_folder("media") / "model",
        corpus=["red", "do", "What is it?"],
        family=OMNI,
        seed=seed,
        **sizes,
    )


AUDIO_MODELS = [deep_omni_model, pytest.param(whole_omni_model, marks=pytest.mark.long)]
MIXED = [*AUDIO_MODELS, pytest.param(expert_model, marks=pytest.mark.long)]
MEDIA_MODELS = [*MIXED, pytest.param(build_image_model, marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=MEDIA_MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """Return what makes tiny models of a family, one for each seed."""
    made: Model = request.param
    return made


@pytest.fixture(scope="module")
def url(
    model: Model, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield the address of a server on the tiny model; it reads prompts in pieces, which end within
    images."""
    arguments = ("--chunked-prefill-size", "48", *((EXPERTS,) if has_experts(model()) else ()))
    with started_server(
        model(), tmp_path_factory.mktemp("server"), python=sglang_python, arguments=arguments
    ) as url:
        yield url


@pytest.fixture
def make(url: str, model: Model) -> Iterator[MakeEngine]:
    """Return a maker of engines on the server: one at a time."""
    with engines_at(url, path=model(), media=BOUNDS) as make:
        yield make


@pytest.fixture
def library(tmp_path: Path, model: Model) -> MediaLibrary:
    """Return a library that shows frames of the tests' size."""
    return MediaLibrary(media_run(tmp_path, model()))


@pytest.fixture
def layout(model: Model) -> MediaLayout:
    """Return the model's layout of media."""
    found = ModelFolder.read(model(), media=BOUNDS).layout
    assert found is not None
    return found


def begin(engine: Engine, request: GenerationRequest, gate: Gate) -> None:
    """Let a server sample some tokens of each sample, and then slow it down."""
    gate.shut(8)
    engine.submit(request)
    while engine.num_tokens < 8 * len(request.samples):
        assert engine.poll(timeout_seconds=0.02) == []


def pieces_of(
    library: MediaLibrary, kinds: Sequence[tuple[Modality, Any]], *, seed: int = 0
) -> tuple[ProcessedMedia, ...]:
    """Put pieces into a library, and load them as the inputs of the model."""
    return tuple(
        library.load(library.add(item_of(*kind, seed=seed + index)))
        for index, kind in enumerate(kinds)
    )


def asked(
    path: Path,
    number: int,
    media: tuple[ProcessedMedia, ...],
    *,
    bounds: MediaConfig = BOUNDS,
    num_samples: int = 2,
    max_new_tokens: int = 8,
) -> GenerationRequest:
    """Ask about pieces."""
    request = request_about(number, (), num_samples=num_samples, max_new_tokens=max_new_tokens)
    return replace(request, prompt_tokens=prompt_of(media, path=path, bounds=bounds), media=media)


def groups(path: Path, library: MediaLibrary) -> list[GenerationRequest]:
    """Ask about groups of all kinds of pieces that a model reads, others in each."""
    kinds = VISION_KINDS + (AUDIO_KINDS if reads_audio(path) else [])
    return [
        asked(path, number, pieces_of(library, some, seed=10 * number), num_samples=3)
        for number, some in enumerate(kinds)
    ]


def reads_audio(path: Path) -> bool:
    return isinstance(ModelFolder.read(path).layout, OmniLayout)


def plain(path: Path) -> Any:
    """Load a model in float64."""
    return plain_omni(path) if reads_audio(path) else plain_model(path)


def expected(
    request: GenerationRequest,
    tokens: NDArray[np.int32],
    *,
    path: Path,
    bounds: MediaConfig = BOUNDS,
    start: int | None = None,
) -> NDArray[np.float64]:
    """Compute log-probabilities of a completion, or of all from a token on, from one whole forward
    as the trainer makes it, in float64."""
    family, model = read_family(path, bounds), plain(path)
    whole = np.concatenate([request.prompt_tokens, tokens])
    given, positions = (
        np.append(request.is_input, np.zeros(len(tokens), bool)),
        np.arange(len(whole)),
    )
    media = family.build_inputs(
        [MediaSequence("expected", whole, given, request.media, positions)],
        position_ids=positions[None],
    )
    ids = torch.from_numpy(whole.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.lm_head(
            family.hidden_states(
                model, ids, torch.from_numpy(positions)[None], media, use_cache=False
            )
        )[0]
    picked: NDArray[np.float64] = (
        logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    )
    return picked[(len(request.prompt_tokens) if start is None else start) - 1 :]


def check(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    path: Path,
    bounds: MediaConfig = BOUNDS,
) -> dict[str, GeneratedSample]:
    """Generate, and compare."""
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    assert len(samples) == sum(len(request.samples) for request in requests)
    for request in requests:
        for sample in request.samples:
            generated = samples[sample.sample_id]
            assert generated.error == ""
            np.testing.assert_allclose(
                generated.logprobs,
                expected(request, generated.tokens, path=path, bounds=bounds),
                rtol=0,
                atol=TOLERANCE,
            )
    return samples


def check_media_experts(
    experts: NDArray[np.integer],
    path: Path,
    request: GenerationRequest,
    tokens: NDArray[np.int32],
) -> None:
    """Check that the model chooses these experts for all tokens but the last, the mixtures by hand,
    the rest by transformers."""
    layers = read_family(path, BOUNDS).language_model(plain(path)).get_submodule("layers")
    mixtures = [layer.get_submodule("mlp") for layer in layers.children()]
    with routed(mixtures, experts) as routing:
        expected(request, tokens, path=path)
    assert len(experts) == len(request.prompt_tokens) + len(tokens) - 1
    check_choice(routing)


def weights_of(path: Path, policy_version: int) -> Weights:
    """Return the weights of another tiny model of the same shape, as a trainer publishes them."""
    tensors = {
        name.removeprefix("thinker."): tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    tensors.pop("code2wav.weight", None)
    return Weights(policy_version, tensors, weights_digest(tensors))


def test_logprobs_agree_with_one_whole_forward_under_each_version(
    make: MakeEngine, model: Model, library: MediaLibrary
) -> None:
    engine, requests, other = make(), groups(model(), library), model(seed=4)
    check(engine, requests, path=model())
    engine.load_weights(weights_of(other, 1))
    samples = check(engine, requests, path=other)
    assert {sample.segments for sample in samples.values()} == {(VersionSegment(1, 8),)}


def test_restart_encodes_media_again_with_the_new_weights(
    make: MakeEngine, gate: Gate, model: Model, library: MediaLibrary
) -> None:
    engine, other = make(), model(seed=4)
    kinds = [IMAGE, VIDEO, LONGER] if reads_audio(model()) else [IMAGE, VIDEO]
    request = asked(model(), 1, pieces_of(library, kinds), max_new_tokens=LONG)
    begin(engine, request, gate)
    engine.load_weights(weights_of(other, 1), on_running="restart")
    gate.open()
    for sample in finish(engine).values():
        first, second = sample.segments
        assert (first.policy_version, second.policy_version) == (0, 1)
        old, new = (
            expected(request, sample.tokens, path=model()),
            expected(request, sample.tokens, path=other),
        )
        count = first.num_tokens
        np.testing.assert_allclose(sample.logprobs[:count], old[:count], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(sample.logprobs[count:], new[count:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", AUDIO_MODELS, indirect=True)
def test_audio_of_a_video_is_interleaved_with_its_frames(
    url: str, model: Model, tmp_path: Path
) -> None:
    bounds = MediaConfig(**SMALL, use_audio_in_video=True)
    library = MediaLibrary(media_run(tmp_path, model(), use_audio_in_video=True))
    requests = [
        asked(model(), number, pieces_of(library, some), bounds=bounds)
        for number, some in enumerate([[VIDEO], [AUDIO, VIDEO, IMAGE, VIDEO]])
    ]
    assert all(
        piece.samples is not None and piece.pixels is not None for piece in requests[0].media
    )
    with engines_at(url, path=model(), media=bounds) as make:
        check(make(), requests, path=model(), bounds=bounds)


@pytest.mark.parametrize("model", MIXED, indirect=True)
def test_routed_experts_equal_the_trainers_for_text_and_media_tokens(
    url: str, model: Model, library: MediaLibrary
) -> None:
    with engines_at(url, path=model(), media=BOUNDS, routing_replay="rollout") as make:
        requests = groups(model(), library)
        samples = check(make(), requests, path=model())
    for request in requests:
        for sample in (samples[one.sample_id] for one in request.samples):
            assert sample.routed_experts is not None
            check_media_experts(sample.routed_experts, model(), request, sample.tokens)


def test_swap_keeps_cache_of_running_samples_and_recomputes_all_others(
    make: MakeEngine, gate: Gate, model: Model, library: MediaLibrary
) -> None:
    """Some that wait, or are read in part, have the images of samples that run: nothing of them
    that the server keeps may be used."""
    engine, other = make(), model(seed=4)
    pieces = [pieces_of(library, [IMAGE, VIDEO, WIDE], seed=10 * number) for number in range(5)]
    running = asked(model(), 1, pieces[0], num_samples=3, max_new_tokens=2 * LONG)
    requests = [
        running,
        *(asked(model(), 2 + number, media) for number, media in enumerate(pieces)),
    ]
    begin(engine, running, gate)
    for request in requests[1:]:
        engine.submit(request)
    engine.load_weights(weights_of(other, 1), on_running="swap")
    gate.open()
    samples = finish(engine)
    differences: dict[VersionSegment, list[float]] = {}
    for request in requests:
        for name in (sample.sample_id for sample in request.samples):
            sample, first = samples[name], 0
            by_version = [
                expected(request, sample.tokens, path=model()),
                expected(request, sample.tokens, path=other),
            ]
            for segment in sample.segments:
                span = slice(first, first := first + segment.num_tokens)
                largest = np.abs(sample.logprobs - by_version[segment.policy_version])[span].max()
                differences.setdefault(replace(segment, num_tokens=1), []).append(float(largest))
    assert max(differences[VersionSegment(0, 1)]) < TOLERANCE
    assert max(differences[VersionSegment(1, 1)]) < TOLERANCE
    assert min(differences[VersionSegment(1, 1, kept_cache=True)]) > 1e-3
    check(engine, [asked(model(), 0, pieces[0])], path=other)


def test_aborted_samples_with_media_continue_from_their_last_token(
    make: MakeEngine, gate: Gate, model: Model, library: MediaLibrary
) -> None:
    engine, request = make(), asked(model(), 1, pieces_of(library, [VIDEO]), max_new_tokens=LONG)
    begin(engine, request, gate)
    partial = engine.abort()
    gate.open()
    assert all(0 < len(sample.tokens) < LONG for sample in partial)
    check(engine, [replace(continued(request, partial), media=request.media)], path=model())


def test_images_of_the_same_patches_and_another_shape_share_no_cache(
    make: MakeEngine, model: Model, library: MediaLibrary
) -> None:
    """A single colour has the same patches in any shape; only the positions differ."""
    engine, requests = make(), []
    for number, size in enumerate([(96, 32), (32, 96), (96, 32)]):
        file = BytesIO()
        Image.new("RGB", size, (200, 30, 30)).save(file, "PNG")
        item = MediaItem(Modality.IMAGE, file.getvalue(), f"rows:{size}")
        requests.append(asked(model(), number, (library.load(library.add(item)),)))
    assert len({request.prompt_tokens.tobytes() for request in requests}) == 1
    for request in requests:
        check(engine, [request], path=model())


def test_logprobs_after_images_of_the_environment_equal_the_trainers(
    make: MakeEngine, model: Model, library: MediaLibrary, tmp_path: Path
) -> None:
    sections = {
        "environment": {"function": f"{ENVIRONMENTS}:show_images"},
        "engine": SERVER_BOUNDS,
    }
    config = media_run(tmp_path, model(), sections=sections)
    renderer = PromptRenderer.from_folder(model(), config.data, media=BOUNDS)
    inner, pool, request = (
        make(),
        EnvironmentPool(config),
        asked(model(), 1, pieces_of(library, [WIDE]), num_samples=4, max_new_tokens=40),
    )
    stops = (*renderer.stop_token_ids, *range(0, 256, 3))  # so that answers end soon
    with closing(pool):
        metrics = EpisodeMetrics("rollout", CollectorRegistry())
        driver = FunctionDriver(pool)
        engine = EpisodeEngine(inner, driver, config=config, renderer=renderer, metrics=metrics)
        engine.submit(
            replace(
                request,
                stop_token_ids=stops,
                environment_context=EnvironmentContext(
                    messages=question(*(piece.reference for piece in request.media))
                ),
            )
        )
        samples = list(finish(engine).values())
    prompt = request.prompt_tokens
    assert max(len(sample.turns) for sample in samples) == 5
    for sample in samples:
        assert sample.error == ""
        assert sample.loss_mask is not None
        media = request.media + tuple(
            library.load(reference) for reference in list_message_media(sample.turns)
        )
        whole, is_chosen = (
            np.append(prompt, sample.tokens),
            np.append(np.zeros(len(prompt), bool), sample.loss_mask.astype(bool)),
        )
        talked = replace(request, prompt_tokens=whole[:-1], is_sampled=is_chosen[:-1], media=media)
        found = expected(talked, whole[-1:], path=model(), start=len(prompt))
        what = (
            f"{sample.sample_id}: {whole.tolist()}, chosen {np.flatnonzero(is_chosen).tolist()}, "
            f"{[item.reference.digest for item in media]}"
        )
        pair = sample.logprobs[is_chosen[len(prompt) :]], found[is_chosen[len(prompt) :]]
        np.testing.assert_allclose(*pair, rtol=0, atol=TOLERANCE, err_msg=what)
    first_turns = sum(len(sample.turns) > 1 for sample in samples)
    assert inner.usage.num_cached >= first_turns * len(
        prompt
    )  # a turn reads nothing again that the server has in its cache


def test_sampled_placeholder_tokens_refer_to_no_media(
    make: MakeEngine, model: Model, library: MediaLibrary, layout: MediaLayout
) -> None:
    """As in an answer before the next turn, which brings another image."""
    engine, turns = (
        make(),
        [asked(model(), number, pieces_of(library, [IMAGE], seed=number)) for number in range(2)],
    )
    answer = np.array(
        [layout.placeholders[Modality.IMAGE], 65, layout.placeholders[Modality.VIDEO]], np.int32
    )
    prompt = np.concatenate([turns[0].prompt_tokens, answer, turns[1].prompt_tokens])
    chosen = np.zeros(len(prompt), bool)
    chosen[len(turns[0].prompt_tokens) :][: len(answer)] = True
    request = replace(
        turns[0], prompt_tokens=prompt, media=turns[0].media + turns[1].media, is_sampled=chosen
    )
    check(engine, [request], path=model())
    with pytest.raises(PoisonSample, match="the sequence has 26 placeholders"):
        engine.submit(replace(request, is_sampled=None))


def test_samples_containing_placeholder_tokens_are_scored_correctly(
    make: MakeEngine, model: Model, library: MediaLibrary, layout: MediaLayout
) -> None:
    engine, request = (
        make(),
        asked(model(), 1, pieces_of(library, [IMAGE]), num_samples=8, max_new_tokens=LONG),
    )
    weights = weights_of(model(), 1)
    engine.load_weights(
        replace(
            weights,
            tensors={
                name: tensor * (0 if name == "lm_head.weight" else 1)
                for name, tensor in weights.tensors.items()
            },
        )
    )
    engine.submit(request)
    samples = finish(engine)
    sampled = {token for sample in samples.values() for token in sample.tokens.tolist()}
    assert sampled >= set(layout.placeholders.values())
    begun = [
        replace(sample, tokens=sample.tokens[:150], logprobs=sample.logprobs[:150])
        for sample in samples.values()
    ]
    partial = [replace(sample, segments=(VersionSegment(1, 150),)) for sample in begun]
    engine.load_weights(replace(weights, policy_version=2))
    engine.submit(replace(continued(request, partial), media=request.media))
    for sample in finish(engine).values():
        np.testing.assert_allclose(
            sample.logprobs[150:],
            expected(request, sample.tokens, path=model())[150:],
            rtol=0,
            atol=TOLERANCE,
        )


def test_token_count_mismatch_with_the_server_fails_the_samples(
    make: MakeEngine, model: Model, library: MediaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = make(), asked(model(), 1, pieces_of(library, []))
    whole = InflightRequest.prompt.fget
    assert whole is not None
    monkeypatch.setattr(
        InflightRequest,
        "prompt",
        property(
            lambda request: {
                **whole(request),
                "input_ids": [*request.sample.sequence.tolist(), 65, 66],
            }
        ),
    )
    engine.submit(request)
    samples = finish(engine)
    num_sent = len(request.prompt_tokens)
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.ERROR}
    assert all(
        f"the server read {num_sent + 2} tokens, but the prompt has {num_sent}" in sample.error
        for sample in samples.values()
    )
    assert all(len(sample.tokens) == 0 for sample in samples.values())


@pytest.mark.parametrize("said", ["{}", "[1", '{"arrays": [{"modality": "smell"}], "runs": []}'])
def test_unreadable_media_fail_only_their_own_samples(
    make: MakeEngine,
    model: Model,
    library: MediaLibrary,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
) -> None:
    engine, request = make(), asked(model(), 1, pieces_of(library, [IMAGE]))
    with monkeypatch.context() as broken:
        broken.setattr(
            generation, "build_image_data", lambda samples, *_, **__: [PREFIX + said] * len(samples)
        )
        engine.submit(request)
        assert all("can't be read" in sample.error for sample in finish(engine).values())
    check(engine, [request], path=model())


def test_server_rejects_features_that_do_not_fit_their_placeholders(
    make: MakeEngine, model: Model, library: MediaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = make(), asked(model(), 1, pieces_of(library, [IMAGE]))
    with monkeypatch.context() as broken:
        broken.setattr(
            media_wire, "_token_ranges", lambda cells: [(int(cells[0]), int(cells[-1]) + 1)]
        )
        engine.submit(request)
        assert all(
            "12 features (image) don't match the token ranges" in sample.error
            for sample in finish(engine).values()
        )
    check(engine, [request], path=model())
