"""Builds a rank's part of a decoder from megatron-core's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from relax_events.api.training import Topology
from relax_events.packages.megatron.modules import PackedAttention, RankNorm, ValueHead
from relax_events.packages.megatron.sizes import DecoderSizes

DECODER: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "perform_initialization": False,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",  # the one for variable lengths
    "calculate_per_token_loss": True,
}
"""Settings of megatron-core that are the same for every decoder."""
RECOMPUTATION: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start_model_parallel(topology: Topology, *, seed: int, timeout_seconds: float) -> None:
    """Create the process groups of a topology, and end the groups of an earlier one; collective.

    Args:
        topology: All ranks.
        seed: Of megatron-core's generators.
        timeout_seconds: Deadline of collectives.
    """
    if not dist.is_initialized():  # a single rank
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        topology.tensor,
        topology.pipeline,
        topology.chunks if topology.chunks > 1 else None,
        context_parallel_size=topology.context,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


@contextmanager
def single_rank() -> Iterator[None]:
    """Let this process be the only rank in this context."""
    start_model_parallel(Topology.of(1), seed=0, timeout_seconds=60.0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_config(
    sizes: DecoderSizes,
    topology: Topology,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
    on_cpu: bool = False,
) -> TransformerConfig:
    """Return megatron-core's configuration of a decoder.

    Args:
        sizes: Of the decoder.
        topology: All ranks.
        dtype: Of weights and activations.
        sequence_parallel: Split what is between the matrices along the sequence, over the
            tensor-parallel ranks.
        recompute: Compute each layer again in the backward pass.
        on_cpu: Keep the weights on the CPU, also where there is a GPU.
    """
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_groups,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.mlp_size or sizes.expert_size,
        layernorm_epsilon=sizes.eps,
        use_cpu_initialization=on_cpu or not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        sequence_parallel=sequence_parallel,
        **DECODER,
        **_lay_out(topology),
        **_configure_experts(sizes, dtype),
        **(RECOMPUTATION if recompute else {}),
    )


def _configure_experts(sizes: DecoderSizes, dtype: torch.dtype) -> dict[str, Any]:
    return (
        {
            "num_moe_experts": sizes.num_experts,
            "moe_router_topk": sizes.top_k,
            "moe_ffn_hidden_size": sizes.expert_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
            "moe_router_pre_softmax": not sizes.normalises_top_k,
            "moe_aux_loss_coeff": 0.0,
        }
        if sizes.num_experts
        else {}
    )


def _lay_out(topology: Topology) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": topology.tensor,
        "pipeline_model_parallel_size": topology.pipeline,
        "virtual_pipeline_model_parallel_size": topology.chunks if topology.chunks > 1 else None,
        # each direction on its own: between two stages all four messages at once would be mixed up
        "overlap_p2p_comm": topology.chunks > 1,
        "batch_p2p_comm": topology.chunks == 1,
        "context_parallel_size": topology.context,
        "expert_model_parallel_size": topology.expert,
        "expert_tensor_parallel_size": topology.expert_tensor,
    }


def build_model(sizes: DecoderSizes, config: TransformerConfig, *, chunk: int = 0) -> GPTModel:
    """Return a rank's part of the decoder, with memory for its weights but no values.

    Args:
        sizes: Of the decoder.
        config: From `build_config`.
        chunk: Which of the stage's chunks of layers.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    stage = chunk if num_chunks > 1 else None
    layer = get_gpt_layer_local_spec(
        num_experts=sizes.num_experts or None, qk_layernorm=True, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RankNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = RankNorm
    layers = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, stage), layer_norm=RankNorm
    )
    model = GPTModel(
        config,
        layers,
        vocab_size=sizes.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=0,  # only learned positions need it
        position_embedding_type="none",
        share_embeddings_and_output_weights=sizes.is_tied,
        pre_process=chunk == 0 and parallel_state.is_pipeline_first_stage(),
        post_process=chunk == num_chunks - 1 and parallel_state.is_pipeline_last_stage(),
        vp_stage=stage,
    )
    if sizes.has_value_head and model.post_process:
        del model.output_layer
        model.value_head = ValueHead(config, sizes.hidden_size)
    return model
