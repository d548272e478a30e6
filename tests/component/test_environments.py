"""Multi-turn samples with an environment: texts, files, truncation, resumption, and the effect of a
failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from engine_requests import fresh_sample
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CollectorRegistry
from small_settings import small_run

from relax_events.config import EngineConfig, MediaConfig, ModelConfig, SamplingConfig
from relax_events.data.conversations import PLACEHOLDERS
from relax_events.data.messages import parse_message
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.environments.pool import EnvironmentPool
from relax_events.episodes.engine import EpisodeEngine
from relax_events.episodes.environment_drivers import FunctionDriver
from relax_events.episodes.session import SessionBounds, turn_seed
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason, MediaRef, Modality
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import read_modality
from relax_events.models.families import read_family
from relax_events.objects import ObjectStore
from relax_events.objects.store import list_message_media
from relax_events.packages.examples.zoom import quarter
from relax_events.roles.handover import PartialSamples
from relax_events.telemetry.component_metrics import EpisodeMetrics
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.batch.packing import pack
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.weights import Weights
from tests.environment_pools import pool_of
from tests.unit import image_model
from tests.unit.image_model import build_image_model, image_file, image_run, question
from tests.unit.video_and_audio import KINDS, item_of, media_run, omni_model

ENVIRONMENTS = Path(__file__).parents[1] / "environment_functions.py"
ENGINE: dict[str, Any] = {"max_running_samples": 8, "max_context_tokens": 512}
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}


@cache
def engine_of(path: Path, media: MediaConfig, *, records_experts: bool) -> TransformersEngine:
    """Open an engine once in a test process, with weights that it took after its start."""
    model_config = ModelConfig(
        dtype="float32",
        path=path,
        device="cpu",
        media=media,
        routing_replay="rollout" if records_experts else "none",
    )
    engine = TransformersEngine(path, config=EngineConfig(threads=1, **ENGINE), model=model_config)
    model = read_family(path, media).loader.from_pretrained(path, dtype=torch.float32)
    engine.load_weights(
        Weights(
            1,
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            bytes(32),
        )
    )
    return engine


class Talk:
    """An engine over a tiny model, an environment of `environment_functions.py`, and what belongs
    to them. A model that reads audio has experts."""

    def __init__(
        self, folder: Path, function: str, *, reads_audio: bool = False, **settings: Any
    ) -> None:
        path = omni_model() if reads_audio else build_image_model()
        config = media_run(folder, path) if reads_audio else image_run(folder)
        environment = {
            "function": function if function == "zoom" else f"{ENVIRONMENTS}:{function}",
            "timeout_seconds": 100.0,
            **settings,
        }
        tree = config.model_dump(mode="json", exclude_unset=True) | {
            "environment": environment,
            "engine": ENGINE,
        }
        tree["model"]["routing_replay"] = "rollout" if reads_audio else "none"
        self.config = small_run(tree)
        self.library = MediaLibrary(self.config)
        self.renderer = PromptRenderer.from_folder(
            path, self.config.data, media=self.config.model.media
        )
        self.inner, self.pool = (
            engine_of(path, self.config.model.media, records_experts=reads_audio),
            EnvironmentPool(self.config),
        )
        self.engine = EpisodeEngine(
            self.inner,
            FunctionDriver(self.pool),
            config=self.config,
            renderer=self.renderer,
            metrics=EpisodeMetrics("rollout", CollectorRegistry()),
        )

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokenizer's stop tokens, and so many characters that responses end early."""
        return (*self.renderer.stop_token_ids, *range(0, 256, 3))

    def request(
        self,
        name: str = "g0",
        *,
        references: Sequence[MediaRef] = (),
        num_samples: int = 3,
        seed: int = 0,
        **sampling: Any,
    ) -> GenerationRequest:
        messages = question(*references)
        return GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=self.renderer.prompt_tokens(messages),
            samples=tuple(
                fresh_sample(f"{name}/{index}", seed + index) for index in range(num_samples)
            ),
            sampling=SamplingConfig(**SETTINGS | sampling),
            stop_token_ids=self.stops,
            media=tuple(map(self.library.load, references)),
            environment_context=EnvironmentContext(
                messages=messages, answer="red", metadata='{"word": "so"}'
            ),
        )


@contextmanager
def conversation(folder: Path, function: str, **settings: Any) -> Iterator[Talk]:
    opened = Talk(folder, function, **settings)
    try:
        yield opened
    finally:
        opened.engine.abort()
        opened.pool.close()


def finish(engine: EpisodeEngine, seconds: float = 100.0) -> dict[str, GeneratedSample]:
    deadline, ended = time.monotonic() + seconds, {}
    while engine.num_running:
        assert time.monotonic() < deadline
        ended |= {sample.sample_id: sample for sample in engine.poll(timeout_seconds=0.5)}
    return ended


def ready(request: GenerationRequest, sample: GeneratedSample) -> SampleReady:
    """Make what the trainer reads of a sample."""
    assert sample.loss_mask is not None
    mask = np.append(np.zeros(len(request.prompt_tokens), np.uint8), sample.loss_mask)
    media = [*(piece.reference for piece in request.media), *list_message_media(sample.turns)]
    plain = image_model.ready(request, sample, int(sample.sample_id[-1]))
    return replace(
        plain,
        loss_mask=mask,
        finish_reason=sample.finish_reason,
        media=media,
        routed_experts=sample.routed_experts,
    )


def render_by_hand(
    renderer: PromptRenderer, task: EnvironmentContext, turns: Sequence[ChatMessage]
) -> str:
    """Render a whole conversation as the tokenizer's template does, from its beginning."""
    return renderer.apply_template([*task.messages, *turns], is_complete=True)


def test_policy_and_environment_alternate_turns_until_environment_ends(tmp_path: Path) -> None:
    with conversation(tmp_path, "echo_twice") as one:
        request = one.request()
        one.engine.submit(request)
        ended = finish(one.engine)
    assert sorted(ended) == ["g0/0", "g0/1", "g0/2"]
    for sample in ended.values():
        roles = [message.role for message in sample.turns]
        assert roles[-1] == "assistant"
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
        assert len(roles) <= 5
        assert sample.loss_mask is not None
        assert sample.num_sampled_tokens == sample.loss_mask.sum() <= 12
        assert (sample.logprobs[sample.loss_mask == 0] == 0).all()
        assert (sample.logprobs[sample.loss_mask == 1] < 0).all()
        for before, reply in zip(sample.turns[::2], sample.turns[1::2], strict=False):
            assert reply.text == (
                f"so {len(before.text)} of red, after 1 and {sample.turns.index(reply) // 2} more"
            )
    assert any(len(sample.turns) == 5 for sample in ended.values())


def test_observation_tokens_match_the_chat_template_between_two_responses(tmp_path: Path) -> None:
    with conversation(tmp_path, "echo_twice") as one:
        request = one.request()
        one.engine.submit(request)
        sample = next(sample for sample in finish(one.engine).values() if len(sample.turns) > 1)
        assert sample.loss_mask is not None
        replies = np.split(sample.tokens, np.flatnonzero(np.diff(sample.loss_mask)) + 1)[1::2]
        end, start = (
            one.renderer.encode("<|im_end|>\n"),
            one.renderer.encode("<|im_start|>assistant\n"),
        )
        expected_replies = [
            one.renderer.encode(f"<|im_start|>user\n{message.text}")
            for message in sample.turns[1::2]
        ]
        for tokens, expected in zip(replies, expected_replies, strict=True):
            assert tokens.tolist() == [*end[1:], *expected, *end, *start]


def test_environment_leaves_first_turn_unchanged_and_later_turns_get_own_seeds(
    tmp_path: Path,
) -> None:
    with conversation(tmp_path, "echo_twice") as one:
        request = one.request()
        one.inner.submit(request)
        alone = {sample.sample_id: sample for sample in one.inner.poll(timeout_seconds=30)}
        while one.inner.num_running:
            alone |= {sample.sample_id: sample for sample in one.inner.poll(timeout_seconds=30)}
        one.engine.submit(request)
        for name, sample in finish(one.engine).items():
            first = alone[name].tokens
            assert sample.tokens[: len(first)].tolist() == first.tolist()
            np.testing.assert_allclose(
                sample.logprobs[: len(first)], alone[name].logprobs, rtol=0, atol=1e-5
            )
    assert turn_seed(7, b"", 0) == 7
    later = {turn_seed(7, path, number) for path in (b"", b"a") for number in range(5)}
    assert len(later) == 10


ROW = (
    {"role": "user", "content": "which day is it?", "name": "ann"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I must ask.",
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "date", "arguments": '{"zone": "UTC"}'},
            }
        ],
    },
    {"role": "tool", "content": "Monday", "name": "date", "tool_call_id": "call-1"},
)


@pytest.mark.parametrize("has_sessions", [False, True], ids=["function", "session"])
def test_environment_in_a_child_receives_whole_messages(tmp_path: Path, has_sessions: bool) -> None:
    task = EnvironmentContext(messages=[parse_message(message) for message in ROW])
    if has_sessions:
        function = f"{ENVIRONMENTS.with_name('session_environments.py')}:Recital"
        with pool_of(tmp_path, interface="skyrl_gym", function=function) as pool:
            shown = pool.session("g0/0", task).open().result(60).messages[0].message
    else:
        with conversation(tmp_path, "return_messages") as one:
            turn = ChatMessage.of_text("assistant", "so it is Monday")
            reply = one.pool.loop.run(one.pool.reply("g0/0", task, [turn])).result(60)
            assert reply is not None
            shown = reply.message
    assert orjson.loads(shown.text) == list(ROW)


@pytest.mark.parametrize("reads_audio", [False, True], ids=["images", "images, audio and videos"])
def test_trainer_forward_inputs_match_the_engine_in_multi_turn_samples(
    tmp_path: Path, reads_audio: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with conversation(
        tmp_path, "show_all" if reads_audio else "show_images", reads_audio=reads_audio
    ) as one:
        kinds = (
            KINDS
            if reads_audio
            else {kind: sizes for kind, sizes in KINDS.items() if kind is Modality.IMAGE}
        )
        references = [
            one.library.add(item_of(kind, sizes[0], seed=9)) for kind, sizes in kinds.items()
        ]
        requests = [
            one.request(f"g{number}", references=references[:number], seed=100 * number)
            for number in range(2)
        ]
        read = record_forwards(one.inner, monkeypatch)
        for request in requests:
            one.engine.submit(request)
        ended = finish(one.engine)
        samples = [
            ready(request, ended[sample.sample_id])
            for request in requests
            for sample in request.samples
        ]
        assert max(len(sample.media) for sample in samples) >= 2
        if reads_audio:
            assert {read_modality(media) for sample in samples for media in sample.media} == set(
                PLACEHOLDERS
            )
        policy = PolicyModel(
            one.config.model.path, config=one.config.model, device=torch.device("cpu")
        )
        media = SampleMedia(policy.family, one.library)
        for sample in samples:
            batch = media.add_to(pack([sample], vocab_size=policy.vocab_size), [sample])
            tokens, positions, features = read.pop(
                np.asarray(sample.tokens)[: sample.num_prompt_tokens].tobytes(), sample
            )
            length = len(tokens)
            assert batch.input_ids[0, :length].tolist() == tokens.tolist()
            found = (
                np.tile(batch.position_ids, (3, 1))
                if batch.media is None
                else batch.media.positions[:, 0]
            )
            np.testing.assert_array_equal(found[:, :length], positions)
            cells = (
                {}
                if batch.media is None
                else dict(zip(batch.media.cells.tolist(), rows_of(batch.media), strict=True))
            )
            assert features == cells
        check_logprobs(one, policy, media, samples)


class Read:
    """What an engine's forwards were given: of each sequence the ids, the rotary positions, and
    which row of which file went to which cell."""

    def __init__(self) -> None:
        self.prefills: list[tuple[NDArray[Any], NDArray[Any], dict[int, tuple[bytes, int]]]] = []

    def pop(
        self, prompt: bytes, sample: SampleReady
    ) -> tuple[NDArray[Any], NDArray[Any], dict[int, tuple[bytes, int]]]:
        """Return the longest prefill that the sample's tokens begin with: the one of its last
        answer."""
        tokens = np.asarray(sample.tokens)
        found = [
            read for read in self.prefills if tokens[: len(read[0])].tolist() == read[0].tolist()
        ]
        return max(found, key=lambda read: len(read[0]))


def rows_of(media: Any) -> list[tuple[bytes, int]]:
    """Name each row of features by its file and its index in it."""
    counts: dict[int, tuple[bytes, int]] = {}
    for feature in media.features.tolist():
        counts[feature] = (b"".join(piece.reference.digest for piece in media.media), feature)
    return [counts[feature] for feature in media.features.tolist()]


def record_forwards(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> Read:
    read, family = Read(), engine._model.family
    prefill = engine._model.prefill

    def noted(input_ids: Any, last: Any, sequences: Any = ()) -> Any:
        for row, end in enumerate(last.tolist()):
            tokens = input_ids[row, : end + 1].numpy()
            cell_indices, cells = np.arange(end + 1), {}
            positions = np.tile(cell_indices, (3, 1))
            if sequences:
                alone = replace(sequences[row], cells=cell_indices)
                made = family.build_inputs([alone], position_ids=cell_indices[None])
                if made is not None:
                    positions, cells = (
                        made.positions[:, 0],
                        dict(zip(made.cells.tolist(), rows_of(made), strict=True)),
                    )
            read.prefills.append((tokens, positions, cells))
        return prefill(input_ids, last, sequences)

    monkeypatch.setattr(engine._model, "prefill", noted)
    return read


def check_logprobs(
    one: Talk, policy: PolicyModel, media: SampleMedia, samples: list[SampleReady]
) -> None:
    """Trainer and scorers compute the engine's log-probability of every token: packed, padded, and
    with shared prefixes."""
    sampled = torch.from_numpy(
        np.concatenate(
            [
                np.asarray(sample.rollout_logprobs)[np.asarray(sample.loss_mask).astype(bool)]
                for sample in samples
            ]
        )
    )
    assert policy.prefix_sharing is not None
    sharing = replace(policy.prefix_sharing, min_tokens=1)
    with torch.no_grad():
        for layout in (
            {"share_rows": True},
            {"share_rows": False, "row_multiple": 16},
            {"sharing": sharing},
        ):
            batch = media.add_to(
                pack(samples, vocab_size=policy.vocab_size, experts=policy.experts, **layout),
                samples,
            )  # type: ignore[arg-type]
            torch.testing.assert_close(
                policy.token_logprobs(batch).logprobs, sampled, rtol=0, atol=1e-4
            )
    scorer = LogprobScorer(
        one.config.model.path,
        model=one.config.model,
        threads=1,
        max_tokens=600,
        library=one.library,
    )
    for sample, scores in zip(samples, scorer.score(samples), strict=True):
        np.testing.assert_allclose(scores, np.asarray(sample.rollout_logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("reads_audio", [False, True], ids=["", "experts"])
def test_aborted_multi_turn_sample_resumes_from_its_prefix_to_the_same_result(
    tmp_path: Path, reads_audio: bool
) -> None:
    with conversation(tmp_path, "show_images", reads_audio=reads_audio) as one:
        request = one.request(references=[one.library.add(item_of(Modality.IMAGE, (32, 32)))])
        one.engine.submit(request)
        whole = finish(one.engine)
        one.engine.submit(request)
        ended: dict[str, GeneratedSample] = {}
        seeds = {sample.sample_id: sample.seed for sample in request.samples}
        for _ in range(
            8
        ):  # wherever it is: before the first token, within an answer, while the environment has the word
            ended |= {sample.sample_id: sample for sample in one.engine.poll(timeout_seconds=0.01)}
            partial = one.engine.abort()
            assert one.engine.num_running == 0
            assert {sample.sample_id for sample in partial} == set(seeds) - set(ended)
            if partial:
                handed_over = [through_the_store(tmp_path, sample) for sample in partial]
                one.engine.submit(
                    replace(
                        request,
                        samples=tuple(
                            resumed(sample, seeds[sample.sample_id]) for sample in handed_over
                        ),
                    )
                )
        for name, sample in (ended | finish(one.engine)).items():
            assert sample.tokens.tolist() == whole[name].tokens.tolist()
            assert sample.turns == whole[name].turns
            assert (sample.loss_mask == whole[name].loss_mask).all()
            assert sample.num_sampled_tokens == whole[name].num_sampled_tokens
            assert (sample.routed_experts is not None) == reads_audio
            if sample.routed_experts is not None:
                assert (
                    len(sample.routed_experts)
                    == len(request.prompt_tokens) + len(sample.tokens) - 1
                )
                np.testing.assert_array_equal(sample.routed_experts, whole[name].routed_experts)
            np.testing.assert_allclose(sample.logprobs, whole[name].logprobs, rtol=0, atol=1e-5)


def through_the_store(folder: Path, sample: GeneratedSample) -> GeneratedSample:
    """Return a sample as the worker that takes its prompt group next finds it; one that has not
    begun is not kept."""
    partials, index = (
        PartialSamples(ObjectStore.open((folder / "handed-over").as_uri())),
        int(sample.sample_id[-1]),
    )
    is_kept = partials.keep(sample.prompt_group_id, [sample]) > 0
    assert is_kept == (len(sample.tokens) > 0)
    return (
        partials.find(sample.prompt_group_id, num_samples=index + 1)[index] if is_kept else sample
    )


def resumed(sample: GeneratedSample, seed: int) -> SampleRequest:
    return SampleRequest(
        sample_id=sample.sample_id,
        seed=seed,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        segments=sample.segments,
        loss_mask=sample.loss_mask,
        turns=sample.turns,
        routed_experts=sample.routed_experts,
    )


TOLD = {
    "raises": "raised ValueError: no such file",
    "hangs": "took longer than 5 s (environment.timeout_seconds)",
    "dies": "died (exit code 3)",
    "brings no image": "which is not an image of the formats PNG",
    "brings a bomb": "many pixels: Image size (900000000 pixels)",
    "names a file": "rows may not name files",
    "names an address": "media_hosts allows none",
    "brings too few": "the prompt has 2 <image> and the row has 1",
    "brings too much": "model.media.max_item_bytes",
    "writes a placeholder": "",
    "returns a number": "returned int",
    "is silent": "",
}


def test_late_sample_that_was_not_returned_is_finished_and_not_handed_over(tmp_path: Path) -> None:
    with conversation(tmp_path, "hostile", timeout_seconds=1.0) as one:
        request = one.request(num_samples=1)
        assert request.environment_context is not None
        context = replace(request.environment_context, answer="hangs")
        stops = tuple(range(one.inner._model.vocab_size))
        request = replace(request, stop_token_ids=stops, environment_context=context)
        one.engine.submit(request)
        (episode,) = one.engine._episodes.values()
        while not episode.session.graph.nodes:
            one.engine.poll(timeout_seconds=0.1)
        assert episode.running.result(60).finish_reason is FinishReason.LATE
        assert one.engine.abort() == []
        (sample,) = finish(one.engine).values()
        assert (sample.finish_reason, len(sample.tokens)) == (FinishReason.LATE, 1)


def test_environment_failure_affects_only_its_own_sample(tmp_path: Path) -> None:
    with conversation(tmp_path, "hostile", timeout_seconds=5.0) as one:
        for number, what in enumerate(TOLD):
            request = one.request(what, num_samples=1, seed=number)
            assert request.environment_context is not None
            one.engine.submit(
                replace(
                    request,
                    stop_token_ids=tuple(range(one.inner._model.vocab_size)),
                    environment_context=replace(request.environment_context, answer=what),
                )
            )
        ended = finish(one.engine)
    for what, reported in TOLD.items():
        sample = ended[f"{what}/0"]
        assert reported in sample.error
        failed = FinishReason.LATE if what == "hangs" else FinishReason.ERROR
        assert (sample.finish_reason is failed) == bool(reported) == bool(sample.error)
        assert f"on turn 1 of sample {what}/0" in sample.error or not reported


def test_environment_samples_respect_turn_and_token_limits(tmp_path: Path) -> None:
    with conversation(tmp_path, "echo_always", max_turns=3) as one:
        one.engine.submit(one.request("g0", max_new_tokens=60))
        assert {
            sum(message.role == "assistant" for message in sample.turns)
            for sample in finish(one.engine).values()
        } <= {1, 2, 3}
        one.engine.submit(one.request("g1", max_new_tokens=3))
        assert max(sample.num_sampled_tokens for sample in finish(one.engine).values()) <= 3
        one.engine._bounds = SessionBounds(
            max_turns=3, max_context_tokens=len(one.request().prompt_tokens) + 14
        )
        one.engine.submit(one.request("g2", max_new_tokens=60))
        for sample in finish(one.engine).values():
            assert sample.loss_mask is not None
            assert max(np.flatnonzero(sample.loss_mask == 0), default=0) < 14
            assert sample.turns[-1].role == "assistant"


@pytest.mark.parametrize(
    ("function", "options", "reported"),
    [
        ("absent", {}, "has no function 'absent'"),
        ("with_option", {}, "missing a required argument: 'num_rooms'"),
        ("with_option", {"num_rooms": 2, "rooms": 3}, "unexpected keyword argument 'rooms'"),
    ],
)
def test_invalid_environment_is_rejected_at_startup(
    tmp_path: Path, function: str, options: dict[str, Any], reported: str
) -> None:
    environment = {"function": f"{ENVIRONMENTS}:{function}", "options": options}
    config = small_run(
        image_run(tmp_path).model_dump(mode="json", exclude_unset=True)
        | {"environment": environment}
    )
    with pytest.raises(ConfigError, match=r"environment\.function") as caught:
        EnvironmentPool(config)
    assert reported in str(caught.value)


def test_zoom_environment_crops_the_named_quarter(tmp_path: Path) -> None:
    image = image_file(64, 48, seed=2)
    whole = np.asarray(Image.open(write(tmp_path / "whole.png", image)))
    for name, (row, column) in {
        "top left": (0, 0),
        "bottom right": (1, 1),
        "top right": (0, 1),
    }.items():
        cut = np.asarray(
            Image.open(write(tmp_path / f"{name}.png", quarter(image, row=row, column=column)))
        )
        np.testing.assert_array_equal(
            cut, whole[24 * row : 24 * (row + 1), 32 * column : 32 * (column + 1)]
        )


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_prompt_group_without_environment_context_is_rejected(tmp_path: Path) -> None:
    with (
        conversation(tmp_path, "echo_twice") as one,
        pytest.raises(PoisonSample, match="g0 has no context"),
    ):
        one.engine.submit(replace(one.request(), environment_context=None))
