"""Routers over real engines of the tiny model: how they spread prompt groups, and how they recover
from lost engines.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_gate import Gate
from engine_requests import (
    check_draws,
    finish,
    make_engine,
    make_prompt,
    make_request,
    other_weights,
    tiny_model,
)
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from routed_engines import Site, make_router, make_sites
from routed_samples import check_experts

from relax_events.engines.protocol import Engine
from relax_events.engines.replicas import policies as loading
from relax_events.engines.replicas.policies import (
    MAX_PAUSE_SECONDS,
    CircuitBreaker,
    max_samples_per_engine,
    rank_engines,
)
from relax_events.engines.replicas.replica import ReplicaState
from relax_events.engines.replicas.router import Router
from relax_events.errors import (
    ConfigError,
    EngineFailed,
    EnvironmentProblem,
    PoisonSample,
    WeightsError,
)
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.telemetry.component_metrics import ReplicaMetrics

pytestmark = pytest.mark.timeout(300)
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=9, unique=True)
SECONDS = 20.0
OpenRouter = Callable[..., tuple[Router, list[Site]]]


@pytest.fixture
def open_router() -> Iterator[OpenRouter]:
    """Return a maker of routers over engines of the tiny model, with their sites."""
    with ExitStack() as stack:

        def make(count: int = 2, **settings: Any) -> tuple[Router, list[Site]]:
            sites = make_sites(count, **settings)
            return stack.enter_context(closing(make_router(sites))), sites

        yield make


def wait_for(router: Router, condition: Callable[[], bool]) -> None:
    """Handle what engines report until something is so; nothing may end meanwhile."""
    pause = threading.Event()
    while not condition():
        assert router.poll(timeout_seconds=0.01) == []
        pause.wait(0.01)
        router._handle_events()


def home_of(sites: list[Site], number: int) -> Site:
    """Return the site that a prompt group is sent to first."""
    first = rank_engines(f"g{number}", [site.name for site in sites])[0]
    return next(site for site in sites if site.name == first)


def groups_in(site: Site) -> set[str]:
    """Name the prompt groups that a site was ever given."""
    return {request.prompt_group_id for request in site.submitted}


def await_gate(router: Router, sites: list[Site], gate: Gate) -> None:
    """Wait until the gate holds every engine."""
    wait_for(router, lambda: all(gate.is_reached_by(site.engines[-1]._engine) for site in sites))  # type: ignore[arg-type]


@given(NAMES, st.lists(st.text(max_size=12), min_size=1, max_size=40), st.data())
def test_removing_an_engine_moves_only_its_own_prompt_groups(
    names: list[str], keys: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for key in keys:
        before, after = rank_engines(key, names), rank_engines(key, left)
        assert after == [name for name in before if name != gone]
        assert rank_engines(key, reversed(names)) == before


def test_prompt_groups_are_spread_evenly_over_engines() -> None:
    names = [f"http://10.0.0.{index}:30000" for index in range(8)]
    homes = Counter(rank_engines(f"group-{number}", names)[0] for number in range(8000))
    assert min(homes.values()) > 850
    assert max(homes.values()) < 1150


@given(st.lists(st.integers(0, 500), min_size=1, max_size=9), st.integers(1, 64))
def test_sample_limit_admits_a_new_group_and_stays_near_the_mean_load(
    counts: list[int], num_new: int
) -> None:
    most = max_samples_per_engine(sum(counts), num_new=num_new, num_engines=len(counts))
    mean = (sum(counts) + num_new) / len(counts)
    assert min(counts) + num_new <= most + num_new - 1 or min(counts) == 0
    assert most <= max(num_new, 1.25 * mean + 1)


def test_circuit_breaker_pauses_grow_until_a_sample_finishes() -> None:
    circuit_breaker = CircuitBreaker()
    assert [circuit_breaker.record_failure() for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert max(circuit_breaker.record_failure() for _ in range(2000)) == MAX_PAUSE_SECONDS
    assert circuit_breaker.is_half_open
    circuit_breaker.record_success()
    assert (circuit_breaker.is_half_open, circuit_breaker.record_failure()) == (False, 0.0)


def test_sampled_tokens_depend_on_seeds_and_not_on_the_engine(open_router: OpenRouter) -> None:
    router, sites = open_router(3)
    requests = [make_request(number, num_samples=3, max_new_tokens=12) for number in range(12)]
    for request in requests:
        router.submit(request)
    assert router.num_running == 36
    samples = finish(router)
    assert len(samples) == 36
    check_draws(samples, *requests)
    assert router.num_tokens == 36 * 12
    assert sum(len(groups_in(site)) for site in sites) == 12
    assert all(groups_in(site) for site in sites)


def test_later_turns_of_a_prompt_group_use_the_same_engine(open_router: OpenRouter) -> None:
    router, sites = open_router(3)
    for turn in range(4):
        for number in range(6):
            request = make_request(number, prompt=make_prompt(number, 4 + turn))
            router.submit(replace(request, samples=request.samples[:1]))
        finish(router)
    assert sum(len(groups_in(site)) for site in sites) == 6


def test_prompt_group_is_routed_to_the_next_engine_when_its_own_is_full(
    open_router: OpenRouter,
) -> None:
    router, sites = open_router(2)
    for site in sites:
        site.is_held = True
    same = [number for number in range(60) if home_of(sites, number) is sites[0]][:8]
    for number in same:
        router.submit(make_request(number, num_samples=4))
    counts = [sum(len(request.samples) for request in site.submitted) for site in sites]
    assert counts == [20, 12]
    for site in sites:
        site.is_held = False
    assert len(finish(router)) == 32


def test_samples_of_a_lost_engine_continue_on_another_engine(
    open_router: OpenRouter, gate: Gate
) -> None:
    gate.shut(8)
    router, sites = open_router(2)
    requests = [make_request(number, max_new_tokens=60) for number in range(8)]
    for request in requests:
        router.submit(request)
    await_gate(router, sites, gate)
    sites[0].is_away = True
    sites[0].record_failure()
    gate.open()
    samples = finish(router)
    moved = [
        sample for request in sites[1].submitted for sample in request.samples if len(sample.tokens)
    ]
    assert moved
    for sample in moved:
        whole = samples[sample.sample_id]
        assert whole.tokens[: len(sample.tokens)].tolist() == sample.tokens.tolist()
        assert whole.segments == (VersionSegment(0, 60),)
    check_draws(samples, *requests)


def test_samples_migrated_to_another_engine_report_all_routed_experts(
    open_router: OpenRouter, gate: Gate
) -> None:
    gate.shut(8)
    path = tiny_model("qwen3_moe")
    router, sites = open_router(2, path=path, model={"routing_replay": "rollout"})
    requests = [make_request(number, max_new_tokens=30) for number in range(4)]
    for request in requests:
        router.submit(request)
    await_gate(router, sites, gate)
    sites[0].is_away = True
    sites[0].record_failure()
    gate.open()
    samples = finish(router)
    assert any(len(sample.tokens) for request in sites[1].submitted for sample in request.samples)
    for request in requests:
        for one in request.samples:
            tokens = np.concatenate([request.prompt_tokens, samples[one.sample_id].tokens])
            experts = samples[one.sample_id].routed_experts
            assert experts is not None
            assert len(experts) == len(tokens) - 1
            check_experts(experts, path, tokens)


def test_recovered_engine_loads_the_newest_version_before_serving(
    open_router: OpenRouter,
) -> None:
    router, sites = open_router(2)
    weights, _ = other_weights(1)
    sites[0].is_away = True
    sites[0].record_failure()
    wait_for(router, lambda: len(router._serving) == 1)
    router.load_weights(weights)
    sites[0].is_away = False
    wait_for(router, lambda: len(router._serving) == 2)
    assert [site.engines[-1].policy_version for site in sites] == [1, 1]
    numbers = [number for number in range(40) if home_of(sites, number) is sites[0]][:2]
    for number in numbers:
        router.submit(make_request(number))
    assert all(sample.segments == (VersionSegment(1, 6),) for sample in finish(router).values())
    assert groups_in(sites[0]) == {
        f"g{numbers[0]}"
    }  # half open: the second group went elsewhere until a sample had ended
    assert groups_in(sites[1]) == {f"g{numbers[1]}"}


def test_reopened_engine_waits_for_next_version_if_weights_left_memory(
    open_router: OpenRouter,
) -> None:
    router, sites = open_router(2)
    (first, _), (second, _) = other_weights(1), other_weights(2, seed=5)
    router.load_weights(first)
    next(iter(first.tensors.values())).zero_()
    sites[0].record_failure()
    wait_for(router, lambda: len(sites[0].engines) == 2 and len(router._serving) == 1)
    router.submit(make_request(1))
    assert all(sample.segments == (VersionSegment(1, 6),) for sample in finish(router).values())
    assert len(router._serving) == 1
    router.load_weights(second)
    assert [site.engines[-1].policy_version for site in sites] == [2, 2]
    assert len(router._serving) == 2


def test_engine_that_rejects_weights_accepted_by_another_is_reopened(
    open_router: OpenRouter, gate: Gate
) -> None:
    gate.shut(8)
    router, sites = open_router(2)
    requests = [make_request(number, max_new_tokens=100) for number in range(6)]
    for request in requests:
        router.submit(request)
    await_gate(router, sites, gate)
    sites[0].refuses_weights = True
    router.load_weights(other_weights(1)[0])
    assert router.policy_version == 1
    sites[0].refuses_weights = False
    gate.open()
    samples = finish(router)
    assert len(samples) == 12
    versions = {
        tuple(segment.policy_version for segment in sample.segments) for sample in samples.values()
    }
    assert (0, 1) in versions
    assert versions <= {(0, 1), (1,)}  # the last may not have begun when the version came
    wait_for(router, lambda: len(router._serving) == 2)
    assert [len(site.engines) for site in sites] == [2, 1]


def test_engine_that_hangs_in_a_weight_load_does_not_block_the_router(
    open_router: OpenRouter, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.shut(8)
    monkeypatch.setattr(loading, "GRACE_SECONDS", 0.1)
    router, sites = open_router(2)
    requests = [make_request(number, max_new_tokens=100) for number in range(6)]
    for request in requests:
        router.submit(request)
    await_gate(router, sites, gate)
    sites[0].may_load.clear()
    router.load_weights(other_weights(1)[0])
    assert (router.policy_version, len(router._serving)) == (1, 1)
    given = [len(groups_in(site)) for site in sites]
    router.submit(make_request(6))
    assert [len(groups_in(site)) for site in sites] == [given[0], given[1] + 1]
    router.load_weights(other_weights(2)[0])
    sites[0].may_load.set()
    gate.open()
    samples = finish(router)
    assert len(samples) == 14
    wait_for(router, lambda: len(router._serving) == 2)
    assert [site.engines[-1].policy_version for site in sites] == [2, 2]
    assert [len(site.engines) for site in sites] == [1, 1]


def test_weights_rejected_by_all_engines_leave_the_old_version_serving(
    open_router: OpenRouter,
) -> None:
    router, sites = open_router(2)
    for site in sites:
        site.refuses_weights = True
    with pytest.raises(WeightsError, match=r"engine-\d takes no policy version 1"):
        router.load_weights(other_weights(1)[0])
    router.submit(make_request(1))
    assert all(sample.segments == (VersionSegment(0, 6),) for sample in finish(router).values())
    assert [len(site.engines) for site in sites] == [1, 1]


def test_samples_wait_while_no_engine_is_there(open_router: OpenRouter) -> None:
    router, sites = open_router(2)
    for site in sites:
        site.is_away = True
        site.record_failure()
    wait_for(router, lambda: not router._serving)
    router.submit(make_request(1))
    with pytest.raises(
        WeightsError, match="policy version 1 is not served: no engine is available to load it"
    ):
        router.load_weights(other_weights(1)[0])
    router.submit(make_request(2))
    (aborted,) = router.abort(["g2/1", "unknown"])
    assert (aborted.sample_id, aborted.finish_reason, len(aborted.tokens)) == (
        "g2/1",
        FinishReason.ABORT,
        0,
    )
    assert router.poll(timeout_seconds=0.01) == []
    assert router.num_running == 3
    for site in sites:
        site.is_away = False
    samples = finish(router)
    assert samples.keys() == {"g1/0", "g1/1", "g2/0"}
    second = make_request(2)
    check_draws(samples, make_request(1), replace(second, samples=second.samples[:1]))


def test_router_fails_when_engines_are_lost_repeatedly(open_router: OpenRouter) -> None:
    router, sites = open_router(1)
    sites[0].is_held = True
    router.submit(make_request(1))

    def lose_while_it_runs() -> None:
        while True:
            sites[0].record_failure()
            router.poll(timeout_seconds=0.05)

    with pytest.raises(
        EngineFailed,
        match=(
            "every engine was lost 4 times without a finished sample in between; the last "
            "one, engine-0: "
            "engine-0 is lost"
        ),
    ):
        lose_while_it_runs()
    with pytest.raises(EngineFailed):
        router.submit(make_request(2))


def test_router_opens_with_the_engines_that_are_available() -> None:
    sites = make_sites(2)
    sites[1].is_away = True
    with closing(make_router(sites)) as router:
        router.submit(make_request(1))
        assert len(finish(router)) == 2
    sites[0].is_away = True
    with pytest.raises(EnvironmentProblem, match=r"engine-\d is away"):
        make_router(sites)


def test_router_reports_config_error_of_an_engine_at_startup() -> None:
    def wrong() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        Router({"right": make_engine, "wrong": wrong})  # type: ignore[dict-item]


def test_unexpected_engine_error_ends_the_router(open_router: OpenRouter) -> None:
    router, sites = open_router(2)

    def broken(**_: float) -> None:
        raise ZeroDivisionError

    sites[0].engines[0].poll = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        wait_for(router, lambda: False)


def test_sample_already_running_in_another_engine_is_rejected(open_router: OpenRouter) -> None:
    router, sites = open_router(2)
    for site in sites:
        site.is_held = True
    request = make_request(1)
    router.submit(request)
    with pytest.raises(PoisonSample, match="sample g1/0 is already running"):
        router.submit(replace(make_request(2), samples=request.samples))
    assert router.num_running == 2


def test_sleeping_engines_wake_and_continue(open_router: OpenRouter, gate: Gate) -> None:
    gate.shut(8)
    router, sites = open_router(2)
    request = make_request(1, max_new_tokens=60)
    router.submit(request)
    await_gate(router, [home_of(sites, 1)], gate)
    router.sleep()
    home_of(sites, 1).record_failure()
    wait_for(router, lambda: len(home_of(sites, 1).engines) == 2)
    assert router.poll(timeout_seconds=3600.0) == []
    router.wake()
    gate.open()
    check_draws(finish(router), request)


def test_no_engine_is_opened_while_those_that_free_memory_sleep(
    open_router: OpenRouter, gate: Gate
) -> None:
    gate.shut(8)
    router, sites = open_router(2)
    router.frees_memory = True
    home, begun = home_of(sites, 1), threading.Event()
    request = make_request(1, max_new_tokens=60)
    router.submit(request)
    await_gate(router, [home], gate)
    replica = next(one for one in router._replicas if one.name == home.name)
    open_engine, pause = home._open, threading.Event()

    def open_until_sleep() -> Engine:
        begun.set()
        for _ in range(int(SECONDS / 0.01)):
            if not replica.gate.is_held:
                pause.wait(0.01)
        return open_engine()

    home._open = open_until_sleep
    router.sleep()
    home.record_failure()
    wait_for(router, lambda: replica.state is ReplicaState.LOST)
    assert not begun.wait(0.5), "it waits for its turn"
    router.wake()
    assert begun.wait(SECONDS)
    router.sleep()
    assert replica._is_asleep, "also the engine that was being opened"
    assert len(home.engines) == 2
    router.wake()
    gate.open()
    check_draws(finish(router), request)


def test_router_metrics_count_lost_engines_and_migrated_samples(open_router: OpenRouter) -> None:
    registry = CollectorRegistry()
    router, sites = open_router(2)
    router.set_metrics(ReplicaMetrics("rollout", registry))

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, {"role": "rollout"})

    assert (value("relax_engine_serving"), value("relax_engine_open_circuits")) == (2, 0)
    for site in sites:
        site.is_held = True
    router.submit(make_request(1, num_samples=3))
    home = home_of(sites, 1)
    home.is_away = True
    home.record_failure()
    wait_for(router, lambda: len(router._serving) == 1)
    assert (value("relax_engine_serving"), value("relax_engine_open_circuits")) == (1, 1)
    assert value("relax_engine_failures_total") in (1, 2)  # lost, and away when it was to be opened
    assert value("relax_engine_migrated_samples_total") == 3
    assert np.concatenate([sample.tokens for sample in router.abort()]).size == 0
