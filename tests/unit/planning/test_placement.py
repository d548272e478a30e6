"""Which worker gets which device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.config.devices import DevicesConfig
from relax_events.errors import ConfigError
from relax_events.planning.inventory import COMPUTING_ROLES
from relax_events.planning.placement import (
    place_worker,
    place_workers,
    share_among_hosts,
)

pytestmark = pytest.mark.unit
ASYNC = {"trainer": 1, "rollout": 1, "reference": 1, "actor-forward": 1, "prompter": 1, "reward": 1}
BY_ITSELF = DevicesConfig()


def place(
    roles: dict[str, int], *, ranks: int = 1, num_devices: int, named: DevicesConfig = BY_ITSELF
) -> dict[str, int]:
    """Return the one device of each worker."""
    placed = place_workers(roles, ranks=ranks, num_devices=num_devices, devices=named, sizes={})
    assert all(len(where) == 1 for where in placed.values())
    return {worker: where[0] for worker, where in placed.items()}


def test_one_device_is_shared_by_all() -> None:
    assert set(place(ASYNC, num_devices=1).values()) == {0}


def test_two_devices_are_divided_between_trainer_and_the_rest() -> None:
    assert place(ASYNC, num_devices=2) == {
        "trainer-0": 0,
        "rollout-0": 1,
        "reference-0": 1,
        "actor-forward-0": 1,
    }


def test_scorers_share_a_device_before_one_joins_an_engine() -> None:
    assert place(ASYNC, num_devices=3) == {
        "trainer-0": 0,
        "rollout-0": 1,
        "reference-0": 2,
        "actor-forward-0": 2,
    }


def test_eight_devices_of_a_run_with_four_ranks() -> None:
    found = place(ASYNC | {"rollout": 3}, ranks=4, num_devices=8)
    assert [found[f"trainer-{rank}"] for rank in range(4)] == [0, 1, 2, 3]
    assert sorted(found[f"rollout-{index}"] for index in range(3)) == [4, 5, 6]
    assert found["reference-0"] == found["actor-forward-0"] == 7


def test_named_devices_are_dealt_out_in_turn() -> None:
    named = DevicesConfig(trainer=(2, 3), rollout=(0, 1))
    found = place(ASYNC | {"rollout": 3}, ranks=2, num_devices=4, named=named)
    assert (found["trainer-0"], found["trainer-1"]) == (2, 3)
    assert [found[f"rollout-{index}"] for index in range(3)] == [0, 1, 0]
    assert found["reference-0"] == 1


def test_replay_has_no_engines() -> None:
    assert place({"trainer": 1, "controller": 1}, num_devices=4) == {"trainer-0": 0}


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.ranks is 8.*has 4 device.*trainer.ranks = 4"):
        place(ASYNC, ranks=8, num_devices=4)
    with pytest.raises(ConfigError, match=r"trainer.ranks is 2.*has 1 device"):
        place(ASYNC, ranks=2, num_devices=4, named=DevicesConfig(trainer=(3,)))


def test_ranks_of_the_critic_are_on_different_devices() -> None:
    roles = {"trainer": 1, "rollout": 1, "critic": 2}
    found = place(roles, ranks=2, num_devices=4)
    assert {found["critic-0"], found["critic-1"]} == {2, 3}
    shared = place(roles, ranks=2, num_devices=2)
    assert {shared["critic-0"], shared["critic-1"]} == {0, 1}
    named = DevicesConfig(critic=(3,))
    with pytest.raises(ConfigError, match=r"the critic has 2 ranks.*set critic.ranks = 1"):
        place(roles, ranks=2, num_devices=4, named=named)


def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices.actor_forward names device 4, and there are 4"):
        place(ASYNC, num_devices=4, named=DevicesConfig(actor_forward=(1, 4)))


def test_elastic_worker_gets_the_device_with_the_least_load() -> None:
    placed = place_workers(ASYNC, ranks=1, num_devices=4, devices=BY_ITSELF, sizes={})
    assert placed["rollout-0"] == (1,)
    assert place_worker("rollout", 1, placed, num_devices=4, devices=BY_ITSELF, size=1) == (2,)
    named = DevicesConfig(rollout=(2, 3))
    assert place_worker("rollout", 3, placed, num_devices=4, devices=named, size=1) == (3,)


def test_engine_over_several_devices_has_a_set_of_its_own() -> None:
    roles = {"trainer": 1, "rollout": 2, "reference": 1}
    sizes = {"rollout": 2}
    placed = place_workers(roles, ranks=4, num_devices=9, devices=BY_ITSELF, sizes=sizes)
    assert placed["rollout-0"] == (4, 5)
    assert placed["rollout-1"] == (6, 7)
    assert placed["reference-0"] == (8,)
    named = DevicesConfig(rollout=(7, 6, 5, 4))
    placed = place_workers(roles, ranks=4, num_devices=8, devices=named, sizes=sizes)
    assert placed["rollout-0"] == (7, 6)
    assert placed["rollout-1"] == (5, 4)
    assert placed["reference-0"] == (4,)
    joined = place_worker("rollout", 2, placed, num_devices=8, devices=BY_ITSELF, size=3)
    assert joined == (5, 6, 7)


def test_engine_shares_with_the_trainer_where_too_few_devices_are_left() -> None:
    roles = {"trainer": 1, "rollout": 1}
    placed = place_workers(roles, ranks=3, num_devices=4, devices=BY_ITSELF, sizes={"rollout": 2})
    assert placed["rollout-0"] == (0, 3)


def test_engine_over_more_devices_than_there_are_is_refused() -> None:
    roles = {"trainer": 1, "rollout": 1}
    text = r"a worker of role rollout computes on 4 GPUs.*there are 2; lower --tp-size"
    with pytest.raises(ConfigError, match=text):
        place_workers(roles, ranks=1, num_devices=2, devices=BY_ITSELF, sizes={"rollout": 4})
    text = r"computes on 4 GPUs.*devices.rollout names 2; name 4, or lower --tp-size"
    with pytest.raises(ConfigError, match=text):
        place_workers(
            roles,
            ranks=1,
            num_devices=8,
            devices=DevicesConfig(rollout=(1, 2)),
            sizes={"rollout": 4},
        )


@given(
    st.fixed_dictionaries({role: st.integers(0, 3) for role in COMPUTING_ROLES}),
    st.integers(1, 16),
    st.integers(8, 64),
    st.fixed_dictionaries({role: st.integers(1, 8) for role in ("rollout", "judge", "evaluator")}),
)
def test_devices_of_a_worker_are_as_many_as_it_computes_on(
    roles: dict[str, int], ranks: int, num_devices: int, sizes: dict[str, int]
) -> None:
    if max(ranks, roles["critic"]) > num_devices:
        return
    roles = roles | {"trainer": 1}
    placed = place_workers(
        roles, ranks=ranks, num_devices=num_devices, devices=BY_ITSELF, sizes=sizes
    )
    trained = {placed[f"trainer-{rank}"][0] for rank in range(ranks)}
    for worker, where in placed.items():
        role = worker.rpartition("-")[0]
        assert len(set(where)) == len(where) == sizes.get(role, 1)
        assert set(where) <= set(range(num_devices))
        if role in sizes and num_devices - ranks >= sizes[role]:
            assert trained.isdisjoint(where)


@given(
    st.fixed_dictionaries({role: st.integers(0, 5) for role in COMPUTING_ROLES}),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_every_worker_is_placed_and_ranks_are_alone_where_there_is_room(
    roles: dict[str, int], ranks: int, num_devices: int
) -> None:
    if max(ranks, roles["critic"]) > num_devices:
        return
    found = place(roles | {"trainer": 1}, ranks=ranks, num_devices=num_devices)
    assert len(found) == ranks + sum(roles.values())
    assert set(found.values()) <= set(range(num_devices))
    trained = {found[f"trainer-{rank}"] for rank in range(ranks)}
    assert len(trained) == ranks
    others = [at for worker, at in found.items() if not worker.startswith("trainer-")]
    critics = [at for worker, at in found.items() if worker.startswith("critic-")]
    assert len(set(critics)) == len(critics)
    free = num_devices - ranks
    if free >= max(1, len(critics)):
        assert not trained & set(others)
    if len(others) <= free:
        assert len(set(others)) == len(others)


def test_engine_over_several_devices_is_on_one_host() -> None:
    """Of 2 x 4 devices 3 are the trainer's; a pair across the border is never taken."""
    roles = {"trainer": 1, "rollout": 2}
    placed = place_workers(
        roles, ranks=3, num_devices=8, devices=BY_ITSELF, sizes={"rollout": 2}, num_hosts=2
    )
    assert (placed["rollout-0"], placed["rollout-1"]) == ((4, 5), (6, 7))
    first, second = share_among_hosts(placed, num_devices=8, num_hosts=2)
    assert first == {f"trainer-{rank}": (rank,) for rank in range(3)}
    assert second == {"rollout-0": (0, 1), "rollout-1": (2, 3)}


def test_engine_that_fits_on_no_host_is_refused() -> None:
    roles, sizes = {"trainer": 1, "rollout": 1}, {"rollout": 3}
    with pytest.raises(ConfigError, match=r"computes on 3 GPUs.*there are 2"):
        place_workers(roles, ranks=1, num_devices=4, devices=BY_ITSELF, sizes=sizes, num_hosts=2)


def test_named_devices_of_a_worker_on_two_hosts_are_refused() -> None:
    placed = {"rollout-0": (1, 2)}
    with pytest.raises(ConfigError, match=r"devices.rollout gives rollout-0 the devices \[1, 2\]"):
        share_among_hosts(placed, num_devices=4, num_hosts=2)


def test_ranks_beyond_one_host_continue_on_the_next() -> None:
    placed = place_workers(
        ASYNC | {"rollout": 2}, ranks=3, num_devices=4, devices=BY_ITSELF, sizes={}, num_hosts=2
    )
    first, second = share_among_hosts(placed, num_devices=4, num_hosts=2)
    assert first == {"trainer-0": (0,), "trainer-1": (1,)}
    assert second["trainer-2"] == (0,)
    assert {second[name] for name in second if name != "trainer-2"} == {(1,)}
