"""The sizes of a decoder that megatron-core builds, from a model's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from relax_events.api.errors import ConfigError
from relax_events.api.training import Topology
from relax_events.model_folder import NUM_EXPERTS, get_text_config, get_thinker_config

PREFIXES = {
    "qwen3": "model.",
    "qwen3_moe": "model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
    "qwen3_omni_moe_thinker": "model.",
    "qwen3_omni_moe": "model.",
}
"""How the names of a decoder's parameters begin in transformers, by `model_type`: the models whose
layers megatron-core 0.16.1 has and that we have a table for."""
TEXT_FAMILIES = ("qwen3", "qwen3_moe")
NO_LINEAR_ATTENTION = "this backend does not build its linear attention yet; backend `torch` does"
MISSING = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), NO_LINEAR_ATTENTION)
"""Why other models are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes of a decoder.

    Attributes:
        prefix: How the names of its parameters begin in transformers.
        num_layers: Decoder layers.
        hidden_size: Width of the hidden states.
        num_heads: Query heads.
        num_groups: Key and value heads, each with its group of query heads.
        head_dim: Width of a head.
        mlp_size: Inner width of the dense feed-forward layers.
        vocab_size: Rows of the embedding.
        is_tied: Whether the output head is the embedding.
        num_experts: Experts of each layer; 0 where the layers are dense.
        top_k: Experts of each token.
        expert_size: Inner width of an expert.
        normalises_top_k: Whether the weights of a token's experts add up to 1.
        eps: Epsilon of the norms.
        rope_theta: Base of the rotary positions.
        reads_media: Whether the model has towers for images or audio next to its decoder.
        towers: Names in transformers and shapes of their parameters, where these are read.
        num_deep: Decoder layers after which features of the vision tower are added.
        mrope_section: Frequencies of time, row and column where positions have three parts.
        outer_prefix: What stands before the names of towers.
        has_value_head: Whether it ends in a critic's scalar head instead of the output head.
    """

    prefix: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    is_tied: bool
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    normalises_top_k: bool = True
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    reads_media: bool = False
    towers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    num_deep: int = 0
    mrope_section: tuple[int, ...] = ()
    outer_prefix: str = ""
    has_value_head: bool = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, path: object) -> DecoderSizes:
        """Read the sizes from a `config.json`.

        Args:
            settings: Its content.
            path: The folder, for errors.
        Raises:
            ConfigError: The model is of no family that we have a table for, or has a part that
                megatron-core or the table lacks; the text names it.
        """
        kind, config = str(settings.get("model_type")), get_text_config(settings)
        if kind not in PREFIXES:
            why = MISSING.get(kind, f"the families are {', '.join(PREFIXES)}")
            raise ConfigError(
                f"the model in {path} is of type {kind!r}, which can't be built of megatron-core's "
                f"layers: {why}"
            )
        _require_known_parts(config, path)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        num_heads = int(config["num_attention_heads"])
        return cls(
            prefix=PREFIXES[kind],
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_heads=num_heads,
            num_groups=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
            mlp_size=int(config.get("intermediate_size") or 0),
            vocab_size=int(config["vocab_size"]),
            is_tied=bool(
                settings.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
            ),
            num_experts=next((int(config[name]) for name in NUM_EXPERTS if config.get(name)), 0),
            top_k=int(config.get("num_experts_per_tok") or 0),
            expert_size=int(config.get("moe_intermediate_size") or 0),
            normalises_top_k=bool(config.get("norm_topk_prob", True)),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            reads_media=kind not in TEXT_FAMILIES,
            num_deep=len(_vision_settings(settings).get("deepstack_visual_indexes") or ()),
            mrope_section=tuple(map(int, rope.get("mrope_section") or ())),
        )

    def as_critic(self) -> DecoderSizes:
        """Return the same decoder with a scalar head in place of the output head."""
        return replace(self, has_value_head=True, is_tied=False)

    def named_below(self, prefix: str) -> DecoderSizes:
        """Return the same sizes with names as in a critic's checkpoints: below a prefix, and those
        of a text model's decoder without their own.
        """
        inner = self.prefix if self.reads_media else ""
        return replace(self, prefix=f"{prefix}{inner}", outer_prefix=prefix)

    def require_fits(self, topology: Topology) -> None:
        """Require that the decoder can be split so.

        Raises:
            ConfigError: It can't; the text names size and setting.
        """
        stages = (
            f"pipeline_parallel ({topology.pipeline}) * trainer.pipeline_chunks ({topology.chunks})"
        )
        for key, divisor, what, size in (
            ("tensor_parallel", topology.tensor, "key-value heads", self.num_groups),
            ("tensor_parallel", topology.tensor, "rows of the MLP", self.mlp_size or 0),
            ("pipeline_parallel", topology.pipeline, "layers", self.num_layers),
            (stages, topology.pipeline * topology.chunks, "layers", self.num_layers),
            ("expert_parallel", topology.expert, "experts", self.num_experts),
            ("expert_tensor_parallel", topology.expert_tensor, "rows of an expert",
             self.expert_size),
        ):  # fmt: skip
            if divisor > 1 and (size % divisor or not size):
                raise ConfigError(
                    f"trainer.{key} = {divisor} must divide the model's {what}, which are "
                    f"{size}; lower it"
                )
        first = self.num_layers // (topology.pipeline * topology.chunks)
        if first < self.num_deep:
            raise ConfigError(
                f"the first pipeline stage must hold the {self.num_deep} decoder layers that "
                f"features of images are added after, and trainer.{stages} leaves it {first} of "
                f"{self.num_layers}; lower one of the two"
            )

    @property
    def attention_cost(self) -> float:
        """Multiplications of a pair of tokens in all layers' attention, relative to those of a
        token in all layers' matrices.
        """
        heads = self.num_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * self.num_groups * self.head_dim)
        experts = self.num_experts * (3 * self.expert_size + 1)
        layer = attention + self.hidden_size * (experts or 3 * self.mlp_size)
        return 2 * heads / layer

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Return the rows of the embedding with which every rank has the same number."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def _vision_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    vision: Mapping[str, Any] = get_thinker_config(settings).get("vision_config") or {}
    return vision


def _require_known_parts(config: Mapping[str, Any], path: object) -> None:
    """Require that the decoder is made of the parts that the tables know."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    layer_types = set(config.get("layer_types") or ["full_attention"])
    unknown = {
        "biases in attention": bool(config.get("attention_bias")),
        "sliding-window attention": bool(config.get("use_sliding_window"))
        or layer_types != {"full_attention"},
        f"rotary positions of type {kind!r}": kind not in ("default", "mrope"),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "dense layers among those with experts": bool(config.get("mlp_only_layers"))
        or int(config.get("decoder_sparse_step") or 1) != 1,
    }
    if part := next((name for name, is_there in unknown.items() if is_there), None):
        raise ConfigError(
            f"the model in {path} has {part}, for which we have no layer of megatron-core; the "
            "backend `torch` has them all"
        )
