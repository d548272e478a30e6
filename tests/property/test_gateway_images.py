"""Random sessions with images in messages and in results of tools, with edits, retries and
compactions: each call of the engine has the images of its history, and each path of the sample
those of its conversation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
from gateway_programs import PROGRAMS, Program, StoredResponsesProgram
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig, MediaConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.graph import path_media, sampled_mask
from relax_events.episodes.sample import finish_sample
from relax_events.episodes.session import SessionLimit
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import MediaLayout
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.session_media import MediaThreads, SessionMedia
from relax_events.training.batch.paths import split_paths
from tests.gateway_sessions import spoken_turn
from tests.unit.image_model import build_image_model, image_file, image_run

CALL = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
IMAGES = [image_file(*size, seed=seed) for seed, size in enumerate([(32, 32), (48, 32), (32, 32)])]


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    """Return a renderer of a model that reads images."""
    config = DataConfig(source="http")
    return PromptRenderer.from_folder(build_image_model(), config, media=MediaConfig())


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaThreads]:
    """Return the threads of a gateway, with the libraries of a run."""
    config = image_run(tmp_path_factory.mktemp("run"))
    found = MediaThreads(lambda: MediaLibrary(config), config)
    yield found
    found.close()


@pytest.fixture(scope="module")
def layout() -> MediaLayout:
    """Return the layout of the model's images."""
    found = MediaLayout.from_folder(build_image_model(), MediaConfig())
    assert found is not None
    return found


class LookingEngine:
    """Samples random tokens, placeholders of images among them, and calls of a tool; checks that
    the images of a request are those of its placeholders.
    """

    def __init__(self, renderer: PromptRenderer, layout: MediaLayout, rng: random.Random) -> None:
        self._layout, self._rng = layout, rng
        self._call = renderer.encode(CALL).tolist()
        self.seen: list[list[bytes]] = []

    async def __call__(self, request: GenerationRequest) -> GeneratedSample:
        """Sample a turn."""
        rng, references = self._rng, [piece.reference for piece in request.media]
        self._layout.find_media_tokens(request.prompt_tokens, request.is_input, references)
        self.seen.append([reference.digest for reference in references])
        choices = [*range(97, 120), *self._layout.placeholders.values()]
        tokens = [rng.choice(choices) for _ in range(rng.randrange(8))]
        tokens = self._call if rng.random() < 0.5 else tokens
        return spoken_turn(request, [*tokens, request.stop_token_ids[0]])


async def look(session: ChatSession, rng: random.Random, kind: type[Program]) -> list[list[bytes]]:
    """Drive a session as a program does; return the digests of the images of each call."""
    program, shown = kind("go"), []
    for number in range(rng.randrange(2, 9)):
        images = [rng.choice(IMAGES) for _ in range(rng.randrange(3))]
        step, before = rng.randrange(6), list(program.history)
        shown.append([sha256(image).digest() for image in program.images])
        try:
            await program.ask(session, number, is_streamed=False)
        except SessionLimit:
            return shown[:-1]
        if step == 0 and kind is not StoredResponsesProgram:
            program.history = before
            continue
        program.continue_conversation(step, rng.randrange(12), *images)
    return shown


def check_images(
    renderer: PromptRenderer,
    layout: MediaLayout,
    threads: MediaThreads,
    kind: type[Program],
    seed: int,
) -> None:
    """Run a session, and compare the images of its calls and of its sample with its history's."""
    rng = random.Random(seed)
    engine = LookingEngine(renderer, layout, rng)
    session = open_session(renderer, engine, media=SessionMedia(threads))
    shown = asyncio.run(look(session, rng, kind))
    assert engine.seen == shown
    sample = finish_sample(session, trains_all_paths=True)
    assert sample.prompt_tokens is not None
    assert sample.loss_mask is not None
    num_prompt = len(sample.prompt_tokens)
    tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
    whole = SimpleNamespace(
        sample_id=sample.sample_id,
        prompt_group_id=sample.prompt_group_id,
        num_prompt_tokens=num_prompt,
        tokens=tokens,
        loss_mask=np.concatenate([np.zeros(num_prompt, np.uint8), sample.loss_mask]),
        routed_experts=None,
        temperature=1.0,
        path_lengths=sample.path_lengths or (len(tokens),),
        path_media=sample.path_media,
    )
    for leaf, path in zip(session.graph.leaves(), split_paths([whole]), strict=True):
        if sample.path_media:
            assert list(path.media) == path_media(leaf)
        np.testing.assert_array_equal(path.is_sampled, sampled_mask(leaf))
        layout.find_media_tokens(path.tokens, ~path.is_sampled, path_media(leaf))
    last = [part.media for said in (*sample.prompt_messages, *sample.turns) for part in said.parts]
    assert [one for one in last if one is not None] == path_media(session.graph.nodes[-1])


@pytest.mark.parametrize("kind", PROGRAMS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_images_are_neither_lost_nor_doubled(
    renderer: PromptRenderer,
    layout: MediaLayout,
    threads: MediaThreads,
    kind: type[Program],
    seed: int,
) -> None:
    check_images(renderer, layout, threads, kind, seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_images_are_neither_lost_nor_doubled_in_two_thousand_sessions(
    renderer: PromptRenderer, layout: MediaLayout, threads: MediaThreads, kind: type[Program]
) -> None:
    for seed in range(2_000 // len(PROGRAMS)):
        check_images(renderer, layout, threads, kind, seed)
