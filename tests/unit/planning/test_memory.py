"""Memory of the trainer by part; the expected bytes are computed by hand from Qwen3-0.6B's
published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_events.config.topology import Topology
from relax_events.planning.inventory import CheckpointFacts
from relax_events.planning.megatron_memory import MegatronMemory
from relax_events.planning.memory import TrainerMemory

pytestmark = pytest.mark.unit
SMALL = CheckpointFacts("bfloat16", 596_049_920, 151_936, 1024, 28, 16, 8, 128, 3072, 40_960)
HEAD = 151_936 * 1024
LAYER = (596_049_920 - HEAD) // 28
LOGITS = 441 * 151_936 * (2 + 24)
"""Of a chunk: 2^26 // 151,936 rows, in bfloat16 and six times in float32."""


def test_one_rank_holds_eighteen_bytes_a_parameter() -> None:
    parts = TrainerMemory(SMALL, "bfloat16").parts(1024).parts
    assert parts == {
        "weights": 2 * 596_049_920,
        "float32 weights": 4 * 596_049_920,
        "gradients": 4 * 596_049_920,
        "optimizer": 8 * 596_049_920,
        "activations": 1024 * 2_064_384,
        "output head": LOGITS + 4 * HEAD + 2 * HEAD,
        "process": 2_000_000_000,
    }


def test_float32_weights_are_their_own_masters() -> None:
    parts = TrainerMemory(SMALL, "float32", on_gpu=False).parts(0).parts
    assert (parts["weights"], parts["float32 weights"]) == (4 * 596_049_920, 0)
    assert parts["process"] == 500_000_000


def test_optimizer_on_the_host_takes_no_memory_of_a_gpu() -> None:
    whole = TrainerMemory(SMALL, "bfloat16", offloads_optimizer=True).parts(0).parts
    assert (whole["optimizer"], whole["float32 weights"]) == (0, 0)
    assert whole["weights"] == 2 * SMALL.num_parameters
    sharded = TrainerMemory(SMALL, "bfloat16", num_pieces=4, offloads_optimizer=True)
    assert sharded.parts(0).parts["optimizer"] == 0
    assert sharded.parts(0).parts["weights"] == SMALL.num_parameters
    # two moments, masters and a copy of the gradients
    assert (
        TrainerMemory(SMALL, "bfloat16", offloads_optimizer=True).host_bytes
        == 16 * SMALL.num_parameters
    )
    assert sharded.host_bytes == 4 * SMALL.num_parameters
    assert TrainerMemory(SMALL, "bfloat16").host_bytes == 0
    adapters = TrainerMemory(SMALL, "bfloat16", adapter_rank=16, offloads_optimizer=True)
    assert adapters.host_bytes == 16 * SMALL.num_adapter_parameters(16)
    staged = MegatronMemory(
        SMALL, "bfloat16", topology=Topology.of(4, tensor=2), offloads_optimizer=True
    )
    assert staged.host_bytes == 16 * SMALL.num_parameters // 4
    assert (staged.parts(0).parts["optimizer"], staged.parts(0).parts["float32 weights"]) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "pieces", "num_bytes"), [("bfloat16", 1, 4), ("float32", 1, 8), ("float32", 4, 4)]
)
def test_optimizer_on_the_host_takes_more_where_the_cpu_trains(
    dtype: str, pieces: int, num_bytes: int
) -> None:
    on_cpu = TrainerMemory(SMALL, dtype, num_pieces=pieces, offloads_optimizer=True, on_gpu=False)
    parts = on_cpu.parts(0).parts
    assert parts["optimizer"] == 8 * SMALL.num_parameters // pieces
    assert parts["copies for the host"] == num_bytes * SMALL.num_parameters // pieces
    assert on_cpu.host_bytes == 0


def test_state_of_another_optimizer_counts_as_measured() -> None:
    none, one = (replace(SMALL, optimizer_bytes=value) for value in (0.0, 4.0))
    assert TrainerMemory(none, "bfloat16").parts(0).parts["optimizer"] == 0
    assert TrainerMemory(one, "bfloat16").parts(0).parts["optimizer"] == 4 * SMALL.num_parameters
    assert none.training_bytes("bfloat16") == 10 * SMALL.num_parameters
    assert one.training_bytes("float32") == 12 * SMALL.num_parameters


def test_sharding_divides_the_state_and_gathers_layers() -> None:
    parts = TrainerMemory(SMALL, "bfloat16", num_pieces=8).parts(0).parts
    assert parts["weights"] == 4 * 596_049_920 // 8
    assert parts["float32 weights"] == 0
    assert parts["optimizer"] == 596_049_920
    # embeddings (the head too) and their gradient, two layers and a layer's gradient, in bfloat16;
    # the reduction's buffer in float32
    assert parts["gathered layers"] == (2 * HEAD + 3 * LAYER) * 2 + 4 * HEAD


def test_recomputation_keeps_the_inputs_of_layers_and_one_layers_activations() -> None:
    one_layer = 2_064_384 // 28
    assert TrainerMemory(SMALL, "bfloat16", recomputed="whole").cell_bytes == (
        28 * 1024 * 2 + one_layer
    )
    assert TrainerMemory(SMALL, "bfloat16", recomputed="selective").cell_bytes == (
        28 * 1024 * 2 + 28 * 16 * (128 * 2 + 4) + one_layer
    )


def test_adapters_leave_the_base_without_gradients_and_moments() -> None:
    num_adapters = SMALL.num_adapter_parameters(16)
    parts = TrainerMemory(SMALL, "bfloat16", adapter_rank=16).parts(1024).parts
    assert parts["weights"] == 2 * 596_049_920 + 2 * num_adapters
    assert parts["optimizer"] == 8 * num_adapters
    assert parts["output head"] == LOGITS


def test_sharding_divides_the_base_of_adapters_too() -> None:
    num_adapters = SMALL.num_adapter_parameters(16)
    parts = TrainerMemory(SMALL, "bfloat16", num_pieces=4, adapter_rank=16).parts(1024).parts
    assert parts["weights"] == 2 * 596_049_920 // 4 + 4 * num_adapters // 4
    assert parts["optimizer"] == 8 * num_adapters // 4
    assert parts["float32 weights"] == 0


def test_small_micro_batch_has_no_chunks() -> None:
    parts = TrainerMemory(SMALL, "bfloat16").parts(100).parts
    assert parts["output head"] == 100 * 151_936 * 26 + 2 * HEAD


@pytest.mark.parametrize("unit", [1, 256])
def test_as_many_tokens_as_fit_and_not_one_more(unit: int) -> None:
    memory = TrainerMemory(SMALL, "bfloat16")
    found = memory.most_tokens(30e9, unit=unit, most=65_536)
    assert found % unit == 0
    assert memory.parts(found).total <= 30e9 < memory.parts(found + unit).total
    assert memory.most_tokens(1e9, unit=unit, most=65_536) == 0
    assert memory.most_tokens(1e15, unit=unit, most=65_536) == 65_536


def test_megatron_ranks_hold_their_part_and_divide_the_moments_over_copies() -> None:
    memory = MegatronMemory(SMALL, "bfloat16", topology=Topology.of(4, tensor=2))
    parts = memory.parts(1024).parts
    assert parts["weights"] == 2 * 596_049_920 // 2
    assert parts["gradients"] == 4 * 596_049_920 // 2
    assert parts["optimizer"] == 8 * 596_049_920 // 4
    assert parts["float32 weights"] == 4 * 596_049_920 // 4
    assert parts["activations"] == 1024 * 2_064_384 // 2
    assert parts["output head"] == (LOGITS + 4 * HEAD + 2 * HEAD) // 2


def test_megatron_ranks_train_their_part_of_the_adapters_alone() -> None:
    topology, num_adapters = Topology.of(4, tensor=2), SMALL.num_adapter_parameters(16)
    parts = MegatronMemory(SMALL, "bfloat16", adapter_rank=16, topology=topology).parts(0).parts
    assert parts["weights"] == 2 * (596_049_920 + num_adapters) // 2
    assert parts["gradients"] == 4 * num_adapters // 2
    assert parts["optimizer"] == 8 * num_adapters // 4


def test_float32_model_of_megatron_has_no_masters_besides_its_weights() -> None:
    parts = MegatronMemory(SMALL, "float32", topology=Topology.of(2, tensor=2)).parts(0).parts
    assert parts["weights"] == 4 * 596_049_920 // 2
    assert parts["float32 weights"] == 0
    assert parts["optimizer"] == 8 * 596_049_920 // 2


def test_first_pipeline_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    memory = MegatronMemory(SMALL, "bfloat16", topology=Topology.of(4, pipeline=4))
    parts = memory.parts(1024).parts
    stage = HEAD + (596_049_920 - HEAD) / 4
    assert parts["weights"] == 2 * stage
    assert parts["optimizer"] == 8 * stage
    assert parts["activations"] == 1024 * 2_064_384


def test_first_stage_of_several_chunks_holds_more_activations() -> None:
    topology = Topology.of(2, pipeline=2, chunks=2)
    parts = MegatronMemory(SMALL, "bfloat16", topology=topology).parts(1024).parts
    # parts of a quarter of the layers: two micro-batches in each of two chunks, and one more
    assert parts["activations"] == 1024 * 2_064_384 * 5 // 4


def test_experts_of_a_mixture_are_divided_by_their_own_axes() -> None:
    # 128 experts of 48 layers, each of 3 x 2048 x 768
    mixture = CheckpointFacts(
        "bfloat16", 30_532_122_624, 151_936, 2048, 48, 32, 4, 128, 8 * 768, 40_960, False
    )
    experts = 48 * 128 * 3 * 2048 * 768
    assert mixture.num_expert_parameters == pytest.approx(experts, rel=1e-3)  # with the routers
    assert SMALL.num_expert_parameters == 0
    memory = MegatronMemory(mixture, "bfloat16", topology=Topology.of(16, tensor=2, expert=8))
    dense, own = 30_532_122_624 - mixture.num_expert_parameters, mixture.num_expert_parameters / 8
    parts = memory.parts(0).parts
    assert parts["weights"] == round(2 * (dense / 2 + own))
    assert parts["optimizer"] == round(8 * (dense / 2 / 8 + own / 2))


def test_context_parallel_ranks_share_the_tokens() -> None:
    whole = MegatronMemory(SMALL, "bfloat16", recomputed="whole", topology=Topology.of(1))
    shared = MegatronMemory(
        SMALL, "bfloat16", recomputed="whole", topology=Topology.of(2, context=2)
    )
    assert whole.cell_bytes == 28 * 1024 * 2 + 2_064_384 // 28
    assert shared.cell_bytes == whole.cell_bytes // 2
    assert shared.parts(1024).parts["output head"] == whole.parts(512).parts["output head"]
