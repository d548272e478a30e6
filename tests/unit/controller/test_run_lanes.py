"""The number of rollout workers fits the broker's share group, and each has as many lanes as its
engine can hold.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.controller.scaling_admission import RejectedError, admit
from relax_events.controller.scaling_bounds import (
    ScalingBounds,
    read_share_group_size,
    require_rollout_capacity,
)
from relax_events.errors import BrokerRefused, ConfigError
from relax_events.projections.scale_requests import Kind, ScaleCommand
from relax_events.projections.scaling import ScaleState

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


def test_run_with_more_lanes_than_the_share_group_allows_is_rejected(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(workers={"rollout": 7}, engine={"max_prompt_groups": 32})
    with pytest.raises(
        ConfigError,
        match=r"7 rollout workers x 32 lanes = 224 members .* group.share.max.size = 200; lower engine",
    ):
        require_rollout_capacity(config, 200)
    assert (
        require_rollout_capacity(config, 1000)
        == "room for 31 rollout workers of 32 lanes (group.share.max.size = 1000)"
    )
    assert require_rollout_capacity(config, 224).startswith("room for 7 rollout workers of 32")
    assert (
        require_rollout_capacity(
            make_run_config(
                workers={"rollout": 7},
                broker={"prompt_queue": "consumer_group", "queue_partitions": 7},
            ),
            10,
        )
        == "no share group"
    )


def test_share_group_size_is_read_from_the_brokers(make_run_config: MakeRunConfig) -> None:
    config = make_run_config()
    assert read_share_group_size(config, Brokers({"group.share.max.size": "200"})) == 200  # type: ignore[arg-type]
    assert read_share_group_size(config, Brokers(None)) is None  # type: ignore[arg-type]


def test_scaling_request_beyond_the_share_group_size_is_rejected(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(engine={"max_prompt_groups": 32})
    bounds = ScalingBounds.from_config(config, is_supervised=True, share_group_size=200)
    with pytest.raises(
        RejectedError,
        match=r"7 workers of default are more than 6: each has 32 lanes, and group.share.max.size = 200",
    ):
        admit(ScaleState(), bounds, ScaleCommand(kind=Kind.OUT, target=7), now=1)
    assert ScalingBounds.from_config(config, is_supervised=True).pools["default"].max_workers == 32
