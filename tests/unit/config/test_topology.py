"""The layout of ranks: coordinates as megatron-core numbers them, groups, and errors that say what
to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.config.topology import Axis, Topology
from relax_events.config.training import TrainerConfig
from relax_events.errors import ConfigError

SIZE = st.sampled_from((1, 2, 3, 4))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Return a topology of up to a few hundred ranks."""
    tensor, context, pipeline = draw(SIZE), draw(SIZE), draw(SIZE)
    expert, expert_tensor = draw(SIZE), draw(SIZE)
    stage = tensor * context * expert * expert_tensor
    return Topology.of(
        stage * pipeline,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )


def test_groups_are_those_of_megatron_core() -> None:
    # megatron.core.parallel_state.initialize_model_parallel's docstring: 16 ranks, tensor 2,
    # pipeline 4
    topology = Topology.of(16, tensor=2, pipeline=4)

    assert topology.groups(Axis.DATA) == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert topology.groups(Axis.TENSOR) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert topology.groups(Axis.PIPELINE) == [
        [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
    ]  # fmt: skip


def test_expert_groups_lie_inside_a_pipeline_stage() -> None:
    topology = Topology.of(16, tensor=2, pipeline=2, expert=4)

    assert topology.groups(Axis.EXPERT) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15],
    ]  # fmt: skip
    assert topology.groups(Axis.EXPERT_DATA)[0] == [0, 4]
    assert topology.expert_data == 2


@given(topologies(), st.sampled_from(Axis))
def test_each_rank_is_in_one_group_of_each_axis(topology: Topology, axis: Axis) -> None:
    groups = topology.groups(axis)

    assert sorted(rank for group in groups for rank in group) == list(range(topology.num_ranks))
    assert {len(group) for group in groups} == {
        {
            Axis.DATA: topology.data,
            Axis.MODEL: topology.model,
            Axis.DATA_CONTEXT: topology.data * topology.context,
        }.get(axis)
        or getattr(topology, axis)
    }


@given(topologies())
def test_each_copy_of_the_model_has_one_data_leader(topology: Topology) -> None:
    leaders = [rank for rank in range(topology.num_ranks) if topology.at(rank).is_data_leader]

    assert topology.data_leaders() == leaders
    assert [topology.at(rank).data for rank in leaders] == list(range(topology.data))
    assert [min(group) for group in topology.groups(Axis.MODEL)] == leaders


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "remedy"),
    [
        (6, {"tensor": 4}, "set trainer.ranks = 8 or trainer.tensor_parallel = 2"),
        (
            8,
            {"tensor": 2, "pipeline": 3},
            "set trainer.ranks = 6 or trainer.pipeline_parallel = 1",
        ),
        (8, {"expert": 3}, "set trainer.ranks = 9 or trainer.expert_parallel = 1"),
        (1, {"tensor": 2, "pipeline": 2}, "set trainer.ranks = 4"),
    ],
)
def test_error_names_the_smallest_change(
    num_ranks: int, sizes: dict[str, int], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology.of(num_ranks, **sizes)

    assert str(caught.value).endswith(remedy)


def test_chunks_of_a_single_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.pipeline_chunks \(2\) are of each pipeline"):
        Topology.of(2, chunks=2)
    assert Topology.of(2, pipeline=2, chunks=2).data == 1


def test_error_names_the_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        Topology.of(6, tensor=4)

    assert str(caught.value).startswith(
        "trainer.ranks (6) must be a multiple of trainer.tensor_parallel (4) * "
        "trainer.pipeline_parallel (1) * trainer.context_parallel (1) = 4; "
    )


def test_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be in 0 to 1, got 2"):
        Topology.of(2).at(2)


def test_backend_torch_keeps_layers_whole() -> None:
    with pytest.raises(ValueError, match=r"trainer\.tensor_parallel is 2; set it to 1"):
        TrainerConfig(ranks=2, tensor_parallel=2)
