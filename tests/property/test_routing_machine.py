"""Routers whose engines fail, stay unavailable or refuse weights in any order: each sample is
returned once, with its tokens, from the weights that it names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engine_requests import (
    continued,
    finish,
    make_engine,
    make_request,
    other_weights,
    plain_logprobs,
    tiny_model,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from routed_engines import Site, make_router

from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest
from relax_events.engines.replicas import policies, replica, router
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import WeightsError
from relax_events.events.parts import FinishReason
from relax_events.weights import Weights

NUM_SITES = 3
SITES = st.integers(0, NUM_SITES - 1)
PAUSE_SECONDS = 0.01


def folder_of(policy_version: int) -> Path:
    """Return the folder of the model whose weights a version has."""
    return tiny_model(seed=3 + policy_version % 2)


@cache
def weights_of(policy_version: int) -> Weights:
    """Return the tensors of a version."""
    return other_weights(policy_version, seed=3 + policy_version % 2)[0]


@cache
def engine_of(index: int) -> TransformersEngine:
    """Open an engine once for all examples."""
    return make_engine()


@cache
def tokens_of(number: int, num_samples: int, policy_version: int) -> dict[str, list[int]]:
    """Return what one engine alone samples for a prompt group under one version."""
    engine = engine_of(NUM_SITES)
    engine.load_weights(weights_of(policy_version % 2))
    engine.submit(make_request(number, num_samples=num_samples, max_new_tokens=40))
    return {name: sample.tokens.tolist() for name, sample in finish(engine).items()}


def opened(index: int) -> Callable[[], Engine]:
    """Return a factory of engines in their initial state: no samples, and the weights of the
    model's folder."""

    def open_engine() -> Engine:
        engine = engine_of(index)
        engine.abort()
        engine.load_weights(weights_of(0))
        engine.poll(timeout_seconds=0.0)
        return engine

    return open_engine


class RoutingMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for module in (policies, replica):
            self.patch.setattr(module, "MIN_PAUSE_SECONDS", PAUSE_SECONDS)
        self.patch.setattr(policies, "MAX_PAUSE_SECONDS", PAUSE_SECONDS)
        self.patch.setattr(replica, "IDLE_SECONDS", PAUSE_SECONDS)
        self.patch.setattr(router, "MAX_CONSECUTIVE_FAILURES", 10**6)
        self.sites = [Site(f"engine-{index}", opened(index)) for index in range(NUM_SITES)]
        self.router = make_router(self.sites)
        self.requests: dict[str, GenerationRequest] = {}
        self.running: set[str] = set()
        self.begun: dict[str, list[int]] = {}
        self.ended: dict[str, GeneratedSample] = {}

    @rule(num_samples=st.integers(1, 4))
    def submit(self, num_samples: int) -> None:
        request = make_request(len(self.requests), num_samples=num_samples, max_new_tokens=40)
        self.requests[request.prompt_group_id] = request
        self.router.submit(request)
        self.running |= {sample.sample_id for sample in request.samples}

    @rule()
    def poll(self) -> None:
        self.take(self.router.poll(timeout_seconds=0.02))

    @rule(index=SITES, is_away=st.booleans())
    def record_failure(self, index: int, is_away: bool) -> None:
        self.sites[index].is_away = is_away
        self.sites[index].record_failure()

    @rule(index=SITES)
    def return_(self, index: int) -> None:
        self.sites[index].is_away = False

    @rule(index=SITES, is_held=st.booleans(), refuses=st.booleans())
    def hinder(self, index: int, is_held: bool, refuses: bool) -> None:
        self.sites[index].is_held, self.sites[index].refuses_weights = is_held, refuses

    @rule(on_running=st.sampled_from(["restart", "swap"]))
    def load(self, on_running: str) -> None:
        before = self.router.policy_version
        try:
            self.router.load_weights(
                weights_of(before + 1), on_running="restart" if on_running == "restart" else "swap"
            )
        except WeightsError:
            assert self.router.policy_version == before
        else:
            assert self.router.policy_version == before + 1

    @rule(picks=st.sets(st.integers(0, 15), min_size=1))
    def abort_and_continue(self, picks: set[int]) -> None:
        """Abort some of those that run; numbers choose them, since which ones run is a matter of
        time, and nothing that is sampled may be."""
        running = sorted(self.running)
        chosen = {running[pick % len(running)] for pick in picks if running}
        aborted = self.router.abort(chosen)
        assert {sample.sample_id for sample in aborted} <= chosen
        for sample in aborted:
            assert sample.finish_reason is FinishReason.ABORT
            self.begun[sample.sample_id] = sample.tokens.tolist()
        for name in {sample.prompt_group_id for sample in aborted}:
            self.router.submit(
                continued(
                    self.requests[name],
                    [sample for sample in aborted if sample.prompt_group_id == name],
                )
            )

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "router"):
            assert self.router.num_running == len(self.running)

    def take(self, samples: list[GeneratedSample]) -> None:
        """Note samples that ended, each once."""
        for sample in samples:
            assert sample.sample_id in self.running
            self.running.discard(sample.sample_id)
            self.ended[sample.sample_id] = sample

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        try:
            for site in self.sites:
                site.is_away = site.is_held = site.refuses_weights = False
            while self.running:
                self.take(self.router.poll(timeout_seconds=10.0))
            for sample in self.ended.values():
                self.check(sample)
        finally:
            self.router.close()
            self.patch.undo()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine ")]

    def check(self, sample: GeneratedSample) -> None:
        """Compare a sample with what was sampled of it before, and with the weights that it
        names."""
        request = self.requests[sample.prompt_group_id]
        assert (len(sample.tokens), sample.finish_reason, sample.error) == (
            40,
            FinishReason.LENGTH,
            "",
        )
        begun = self.begun.get(sample.sample_id, [])
        assert sample.tokens[: len(begun)].tolist() == begun
        versions = [segment.policy_version for segment in sample.segments]
        assert all(before <= after for before, after in pairwise(versions))
        ends = np.cumsum([segment.num_tokens for segment in sample.segments]).tolist()
        assert ends[-1] == 40
        for segment, end in zip(sample.segments, ends, strict=True):
            tokens_of_segment = slice(end - segment.num_tokens, end)
            if not segment.kept_cache:
                plain = plain_logprobs(
                    request.prompt_tokens, sample.tokens, path=folder_of(segment.policy_version)
                )
                np.testing.assert_allclose(
                    sample.logprobs[tokens_of_segment], plain[tokens_of_segment], atol=1e-5
                )
        if len(set(versions)) == 1 and not sample.segments[0].kept_cache:
            number = int(sample.prompt_group_id[1:])
            assert (
                sample.tokens.tolist()
                == tokens_of(number, len(request.samples), versions[0] % 2)[sample.sample_id]
            )


TestRouting = RoutingMachine.TestCase
TestRouting.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
TestRouting.pytestmark = [pytest.mark.timeout(300)]
