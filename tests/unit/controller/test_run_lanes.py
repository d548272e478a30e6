"""The number of rollout workers fits the broker's share group, and each has as many lanes as its
engine can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.controller.scaling_admission import RejectedError, admit
from relax_events.controller.scaling_bounds import (
    ScalingBounds,
    require_rollout_capacity,
)
from relax_events.errors import BrokerRefused, ConfigError
from relax_events.kafka.leases import read_share_group_size
from relax_events.projections.scale_requests import Kind, ScaleCommand
from relax_events.projections.scaling import ScaleState
from relax_events.roles.engine_factory import bound_engine_rows

MakeRunConfig = Callable[..., RunConfig]


class Brokers:
    """Brokers that report their settings, or don't."""

    def __init__(self, settings: dict[str, str] | None) -> None:
        self._settings = settings

    def broker_settings(self) -> dict[str, str]:
        if self._settings is None:
            raise BrokerRefused("not authorised")
        return self._settings


@pytest.mark.parametrize(
    ("running", "samples", "lanes"), [(256, 8, 32), (256, 16, 16), (20, 8, 3), (4, 8, 1)]
)
def test_rollout_worker_has_enough_lanes_to_fill_its_engine(
    make_run_config: MakeRunConfig, running: int, samples: int, lanes: int
) -> None:
    config = make_run_config(
        run={"samples_per_prompt": samples}, engine={"max_running_samples": running}
    )
    assert config.num_lanes == lanes
    assert (
        make_run_config(engine={"max_running_samples": running, "max_prompt_groups": 5}).num_lanes
        == 5
    )


@pytest.mark.parametrize(
    ("staleness", "running", "environment", "rows"),
    [
        (0, 256, {}, 8),
        (2, 256, {}, 24),
        (2, 16, {}, 16),
        (2, 256, {"command": ["agent"]}, 256),
    ],
)
def test_engine_of_a_rollout_worker_has_no_more_rows_than_samples_can_be_in_flight(
    make_run_config: MakeRunConfig,
    staleness: int,
    running: int,
    environment: dict[str, Any],
    rows: int,
) -> None:
    config = make_run_config(
        run={"prompts_per_step": 2, "samples_per_prompt": 4, "max_staleness": staleness},
        engine={"max_running_samples": running},
        environment=environment,
    )
    assert bound_engine_rows(config).engine.max_running_samples == rows
    assert config.engine.max_running_samples == running, "it holds as many prompt groups as before"


@pytest.mark.parametrize(
    ("prompts", "workers", "room", "size"),
    [(32, 1, 31, 7), (128, 4, 32, 4), (128, 4, 8, 1), (32, 8, 32, 1), (1024, 1, 32, 8)],
)
def test_lease_holds_at_most_a_part_of_a_workers_room_and_of_its_share_of_a_step(
    make_run_config: MakeRunConfig, prompts: int, workers: int, room: int, size: int
) -> None:
    config = make_run_config(
        run={"prompts_per_step": prompts},
        workers={"rollout": workers},
        engine={"max_prompt_groups": room},
    )
    assert config.prompt_groups_per_lease() == size


def test_lease_holds_a_whole_step_while_one_worker_generates_it(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(
        run={"prompts_per_step": 32}, engine={"max_prompt_groups": 32}, workers={"rollout": 1}
    )
    sizes = [config.prompt_groups_per_lease(num_workers=count) for count in (0, 1, 2, 4)]
    assert sizes == [32, 32, 2, 1]


def test_lease_is_small_enough_for_all_workers_that_the_autoscaler_may_start(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(
        run={"prompts_per_step": 128},
        engine={"max_prompt_groups": 32},
        scaling={"max_workers": 8, "autoscaler": {"enabled": True}},
    )
    assert config.prompt_groups_per_lease() == 2


@pytest.mark.parametrize(
    ("prompts", "staleness", "workers", "first"),
    [
        (128, 1, 1, 4),  # 32 of 256 prompt groups, 8 by a lease
        (128, 1, 2, 8),
        (128, 1, 31, 9),
        (128, 1, 64, 4),
        (128, 1, 1000, 1),
        (1024, 0, 8, 8),
        (1024, 4, 64, 16),
        (4, 1, 16, 1),
    ],
)
def test_rollout_worker_starts_with_the_lanes_that_lease_its_share(
    make_run_config: MakeRunConfig, prompts: int, staleness: int, workers: int, first: int
) -> None:
    config = make_run_config(
        run={"prompts_per_step": prompts, "max_staleness": staleness},
        workers={"rollout": workers},
        engine={"max_running_samples": 256},
    )
    assert config.num_lanes == 32
    for size in (None, 100_000):
        assert config.plan_lanes(size).first == first
    size = max(1000, workers * first)
    assert config.plan_lanes(size).workers >= workers
    assert require_rollout_capacity(config, size)


@pytest.mark.parametrize(
    ("settings", "size", "most", "workers"),
    [
        ({}, 1000, 256, 186),  # one for each admitted prompt group
        ({"workers": {"rollout": 64}}, 1000, 256, 186),
        ({"workers": {"rollout": 8}}, 1000, 256, 46),
        ({"scaling": {"max_workers": 8, "autoscaler": {"enabled": True}}}, 1000, 256, 46),
        ({"workers": {"rollout": 1000}}, 1000, 1, 1000),
        ({}, 200, 32, 6),  # as many as lease at first
        ({"workers": {"rollout": 8}}, 200, 25, 8),  # an equal part
        ({"scaling": {"max_workers": 4}}, 200, 50, 4),
        ({"engine": {"max_prompt_groups": 5}}, 1000, 5, 148),
        ({}, None, 32, 1),
    ],
)
def test_rollout_worker_may_have_the_lanes_that_leave_room_for_the_others(
    make_run_config: MakeRunConfig,
    settings: dict[str, Any],
    size: int | None,
    most: int,
    workers: int,
) -> None:
    base = {
        "run": {"prompts_per_step": 128, "max_staleness": 1},
        "engine": {"max_running_samples": 256},
    }
    config = make_run_config(**(base | settings))
    lanes = config.plan_lanes(size)
    assert (lanes.most, lanes.workers) == (most, workers)
    if size is not None:
        assert min(workers * most, workers * lanes.first + 256) <= size


@pytest.mark.parametrize("size", [200, 1000])
@pytest.mark.parametrize("workers", [1, 8, 31, 100])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("prompts", [4, 128, 900])
def test_as_many_workers_fit_as_with_lanes_that_fill_their_engines(
    make_run_config: MakeRunConfig, prompts: int, staleness: int, workers: int, size: int
) -> None:
    config = make_run_config(
        run={"prompts_per_step": prompts, "max_staleness": staleness},
        workers={"rollout": workers},
        engine={"max_running_samples": 256},
    )
    lanes, num_full = config.plan_lanes(size), size // config.num_lanes
    assert lanes.workers >= min(num_full, config.scaling.max_workers)
    if workers <= num_full or workers * lanes.first <= size:
        assert lanes.workers >= workers
        num_needed = workers * lanes.first + prompts * (staleness + 1)
        assert min(workers * lanes.most, num_needed) <= size


def test_run_whose_first_lanes_the_share_group_does_not_allow_is_rejected(
    make_run_config: MakeRunConfig,
) -> None:
    run = {"prompts_per_step": 1024, "max_staleness": 1}
    engine = {"max_prompt_groups": 32}
    config = make_run_config(run=run, workers={"rollout": 64}, engine=engine)
    with pytest.raises(
        ConfigError,
        match=r"64 rollout workers x 16 lanes at their start = 1024 members .* "
        r"group.share.max.size = 1000; lower engine",
    ):
        require_rollout_capacity(config, 1000)
    fewer = make_run_config(run=run, workers={"rollout": 31}, engine=engine)
    assert require_rollout_capacity(fewer, 1000) == (
        "room for 31 rollout workers of 8 to 32 lanes (group.share.max.size = 1000)"
    )
    by_partition = make_run_config(
        workers={"rollout": 7}, broker={"prompt_queue": "consumer_group", "queue_partitions": 7}
    )
    assert require_rollout_capacity(by_partition, 10) == "no share group"


def test_share_group_size_is_read_from_the_brokers() -> None:
    assert read_share_group_size(Brokers({"group.share.max.size": "200"})) == 200  # type: ignore[arg-type]
    assert read_share_group_size(Brokers({})) is None  # type: ignore[arg-type]
    assert read_share_group_size(Brokers(None)) is None  # type: ignore[arg-type]


def test_scaling_request_beyond_the_share_group_size_is_rejected(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(
        run={"prompts_per_step": 128}, engine={"max_prompt_groups": 32}, workers={"rollout": 1}
    )
    bounds = ScalingBounds.from_config(config, is_supervised=True, share_group_size=200)
    with pytest.raises(
        RejectedError,
        match=r"7 workers of default are more than 6: each starts with 4 lanes and may have 32, "
        r"and group.share.max.size = 200",
    ):
        admit(ScaleState(), bounds, ScaleCommand(kind=Kind.OUT, target=7), now=1)
    assert ScalingBounds.from_config(config, is_supervised=True).pools["default"].max_workers == 32
