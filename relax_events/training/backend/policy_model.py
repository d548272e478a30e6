"""Runs a causal language model for trainer and scorers: packed micro-batch in, log-probabilities of
its loss tokens out. The model is computed by transformers' modules (ADR 61). A large output head is
applied in chunks, whose weight gradients are added in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_events.config import ModelConfig
from relax_events.errors import ConfigError
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.model_inputs import MediaInputs
from relax_events.models.adapters import Adapters, replace_version
from relax_events.models.causal_lm import attention_kinds, build_causal_lm, load_causal_lm
from relax_events.models.families import Family, read_family
from relax_events.models.folder_weights import FolderWeights
from relax_events.models.routers import RoutedLayer, Routers, imbalance
from relax_events.training.backend.chunked_head import count_chunk_tokens
from relax_events.training.backend.head_logprobs import HeadInputs, apply_head
from relax_events.training.backend.packing_probe import (
    BRANCHES,
    build_probe,
    is_isolated,
    isolates_neighbours,
)
from relax_events.training.backend.sharded_parameters import call_with_weights
from relax_events.training.backend.tree_attention import ARGUMENT, TreeAttention
from relax_events.training.batch.packing import PackedBatch, ReplayedExperts, in_one_row
from relax_events.training.batch.prefix_tree import PrefixTree
from relax_events.training.batch.shared_prefixes import (
    MIN_TOKENS,
    MIN_TOKENS_CPU,
    PrefixSharing,
)

log = structlog.get_logger()
MIN_LONG_ROW = 2048
"""Tokens of a row in which a mask costs more than a call for each sequence, on a GPU."""


Prepare = Callable[
    [PreTrainedModel, Family, Adapters | None, Routers | None, FolderWeights | None], None
]
"""Freezes and shards a model, sets what it recomputes, and fills one that was built without memory.
"""


class TokenLogprobs(NamedTuple):
    """At each loss token: the log-probability of the token, and the entropy of the distribution
    that it was sampled from, in nats.

    `ids` are the requested ones, usually none, and `id_logprobs` their log-probabilities.
    `imbalance` is the load-balancing loss of each token's path; empty where it is not computed.
    """

    logprobs: Float[Tensor, " loss_tokens"]
    entropies: Float[Tensor, " loss_tokens"]
    ids: Int[Tensor, "loss_tokens ids"]
    id_logprobs: Float[Tensor, "loss_tokens ids"]
    imbalance: Float[Tensor, " balanced_tokens"]


class PolicyModel:
    """The model with its output head, on one device.

    The constructor tests on two short sequences that packed neighbours do not attend to each other;
    if they do, each sample gets its own row. It also tests two branches of a shared prefix; if that
    fails, `prefix_sharing` is None. `adapters` is None without `model.lora`.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype | None = None,
        separate_media: bool = False,
        balances_experts: bool = False,
        prepare: Prepare | None = None,
        is_sharded: bool = False,
    ) -> None:
        """Load from a folder; nothing is fetched.

        Args:
            path: A folder in Hugging Face layout.
            config: The attention implementation, the adapters, and the dtype unless another is
                given.
            device: Where the weights go.
            dtype: Of the weights, for tests in float64.
            separate_media: Encode each media item separately, at a shape that does not depend on
                other items.
            balances_experts: Compute the load-balancing loss of each sample.
            prepare: Called with the model, its adapters, its routers and its weights.
            is_sharded: Whether `prepare` shards: then the model is built on `meta`, and the
                constructor and all forward passes are collective.
        Raises:
            ConfigError: The folder is missing or holds no causal language model, its logits
                are not a linear head's, its routing can't be replayed as configured, it has no
                experts to balance, or it lacks a module that gets adapters.
        """
        self.device = device
        self.dtype = dtype or getattr(torch, config.dtype)
        self._attention = config.attention
        self.family = read_family(path, config.media, separately=separate_media)
        weights: FolderWeights | None = None
        settings: dict[str, Any] = {"attention": config.attention, "loader": self.family.loader}
        if is_sharded:
            self.module, weights = build_causal_lm(path, dtype=self.dtype, **settings)
        else:
            self.module = load_causal_lm(path, dtype=self.dtype, device=device, **settings)
        self.adapters = Adapters.for_model(self.module, config, family=self.family, path=path)
        routers = self._find_routers(path, config, balances_experts=balances_experts)
        if prepare is not None:
            prepare(self.module, self.family, self.adapters, routers, weights)
        self.vocab_size = len(self.module.get_input_embeddings().get_parameter("weight"))
        self._head: nn.Module = self.module.get_output_embeddings()
        if routers is not None:
            self._require_known_rule(routers)
        self._routers = routers if config.replays_routing else None
        self._balanced = routers if balances_experts else None
        self._require_linear_head(path)
        self.shares_rows = isolates_neighbours(self._probe_positions)
        self.cell_cost = self._cell_cost()
        least = MIN_TOKENS_CPU if device.type == "cpu" else MIN_TOKENS
        self.prefix_sharing = (
            PrefixSharing(self.family.layout, least) if self._isolates_branches() else None
        )

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""
        return None if self._routers is None else self._routers.shape

    def token_logprobs(
        self,
        batch: PackedBatch,
        *,
        entropy_gradient: bool = False,
        ids: NDArray[np.int64] | None = None,
        num_top: int = 0,
    ) -> TokenLogprobs:
        """Run a micro-batch; return the tempered log-probabilities of its loss tokens.

        Only the hidden states that predict a loss token go through the head, so prompts cost no
        logits.

        Args:
            batch: From `packing.pack`, with this model's `vocab_size`, `experts`, `shares_rows` and
                at most its `prefix_sharing`.
            entropy_gradient: Compute entropies with gradient.
            ids: Token ids whose log-probabilities are also returned, [loss_tokens, ids]; with a
                gradient.
            num_top: Use so many of the most probable ids: of the ids that are not among `ids`,
                and after them.
        """
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = call_with_weights(
            self.module, self._compute_logprobs, batch, entropy_gradient, ids, num_top
        )
        return TokenLogprobs(*result)

    def idle_output(self) -> Tensor:
        """Run a micro-batch without samples, on a rank that has none left while others run theirs;
        return a number that does not depend on the weights, to be added to the loss.
        """
        ids, positions = build_probe([0], vocab_size=self.vocab_size, device=self.device)
        output: Tensor = call_with_weights(
            self.module, lambda: self._head(self._hidden(ids, positions)).sum() * 0.0
        )
        return output

    def _compute_logprobs(
        self,
        batch: PackedBatch,
        entropy_gradient: bool,
        ids: NDArray[np.int64] | None,
        num_top: int,
    ) -> tuple[Tensor, ...]:
        if self._goes_by_sequence(batch):
            batch = in_one_row(batch)
        input_ids, position_ids, positions, targets, temperatures = (
            torch.from_numpy(array).to(self.device)
            for array in (
                batch.input_ids,
                batch.position_ids,
                batch.loss_positions,
                batch.targets,
                batch.temperatures,
            )
        )
        with self._replay_routing(batch.experts), self._record_routing() as routed:
            hidden = (
                self._hidden(input_ids, position_ids, batch.tree, batch.media)
                .flatten(0, 1)
                .index_select(0, positions)
            )
        requested_ids = torch.from_numpy(
            np.zeros((len(batch.targets), 0), np.int64) if ids is None else ids
        ).to(self.device)
        inputs = HeadInputs(hidden, targets, temperatures, requested_ids)
        chunk = count_chunk_tokens(self.vocab_size)
        scores = apply_head(
            self._head, inputs, chunk=chunk, entropy_gradient=entropy_gradient, num_top=num_top
        )
        return *scores, self._imbalance(routed, batch)

    def _goes_by_sequence(self, batch: PackedBatch) -> bool:
        """Return whether a GPU has less work when long rows become sequences of a tree: it has fast
        kernels where no mask is needed.
        """
        num_rows, length = batch.input_ids.shape
        return (
            self.device.type == "cuda"
            and self.prefix_sharing is not None
            and batch.tree is None
            and batch.media is None
            and length >= MIN_LONG_ROW
            and int((batch.position_ids.ravel()[batch.cells] == 0).sum()) > num_rows
        )

    def _imbalance(
        self, routed: Sequence[RoutedLayer], batch: PackedBatch
    ) -> Float[Tensor, " balanced_tokens"]:
        if not routed:
            return torch.zeros(0, device=self.device)
        cells, num_tokens, num_loss_tokens = (
            torch.from_numpy(array).to(self.device)
            for array in (batch.cells, batch.num_path_tokens, batch.num_path_loss_tokens)
        )
        by_path = imbalance(routed, cells=cells, num_tokens=num_tokens)
        return by_path.repeat_interleave(num_loss_tokens)

    def _replay_routing(self, experts: ReplayedExperts | None) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self._routers is None or experts is None
            else self._routers.replay(experts.experts, experts.is_replayed)
        )

    def _record_routing(self) -> AbstractContextManager[list[RoutedLayer]]:
        return nullcontext([]) if self._balanced is None else self._balanced.recording()

    def _find_routers(
        self, path: Path, config: ModelConfig, *, balances_experts: bool
    ) -> Routers | None:
        language = self.family.language_model(self.module)
        if config.replays_routing:
            return Routers(language, path=path)
        if balances_experts:
            key = "algorithm.load_balancing_coefficient"
            return Routers(language, path=path, wanted_by=key)
        return None

    def _require_known_rule(self, routers: Routers) -> None:
        routers.require_known_rule(
            lambda: call_with_weights(
                self.module,
                self._hidden,
                *build_probe([0, 1, 2, 3, 4], vocab_size=self.vocab_size, device=self.device),
            )
        )

    def _hidden(
        self,
        input_ids: Int[Tensor, "rows length"],
        position_ids: Int[Tensor, "rows length"],
        tree: PrefixTree | None = None,
        media: MediaInputs | None = None,
    ) -> Float[Tensor, "rows length hidden"]:
        # No cache, and no mask: with either, transformers 5 lets packed neighbours attend to each
        # other. A whole mask, even of one cell, keeps it from making one for a row with a tree.
        along_tree = {}
        if tree is not None:
            length = input_ids.shape[1]
            along_tree = {ARGUMENT: TreeAttention(tree, [(0, length)], device=self.device)}
        return self.family.hidden_states(
            self.module,
            input_ids,
            position_ids,
            media,
            attention_mask=None
            if tree is None
            else torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device),
            use_cache=False,
            **along_tree,
        )

    def replace_weights(self, tensors: Mapping[str, Tensor], *, base_digest: bytes = b"") -> None:
        """Load other weights of the same model, in Hugging Face names, or other adapters of it; on
        an error the old ones stay.

        Args:
            tensors: By name.
            base_digest: Of the adapters' base model; empty for whole weights.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape, or the base model is
                another one; the text names it.
        """
        replace_version(self.module, self.adapters, tensors, base_digest=base_digest)

    @torch.no_grad()
    def _require_linear_head(self, path: Path) -> None:
        ids, positions = build_probe(
            [0, 1, 2, 3, 4], vocab_size=self.vocab_size, device=self.device
        )
        whole, ours = call_with_weights(
            self.module,
            lambda: (
                self.module.forward(input_ids=ids, position_ids=positions, use_cache=False).logits,
                self._head(self._hidden(ids, positions)),
            ),
        )
        if not torch.allclose(ours, whole, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"the model in {path} computes its logits by more than a linear head (scaling, "
                "soft caps), which the torch backend does not support"
            )

    @torch.no_grad()
    def _isolates_branches(self) -> bool:
        if (reason := self._why_not_shared()) is not None:
            log.info("prefixes.not_shared", reason=reason)
            return False
        positions, trees, alone = BRANCHES
        ids, position_ids = build_probe(positions, vocab_size=self.vocab_size, device=self.device)
        layout_output, leaking_output = (
            self._probe_logprobs(ids, position_ids, PrefixTree(np.array(ends), np.array(forks)))[
                alone
            ]
            for ends, forks in trees
        )
        return is_isolated(
            "prefixes",
            alone_output=self._probe_logprobs(ids[:, alone], position_ids[:, alone]),
            layout_output=layout_output,
            leaking_output=leaking_output,
        )

    def _why_not_shared(self) -> str | None:
        """Return why the model can't attend along a tree, if that is known without a test."""
        if self._attention != "sdpa":
            return f"model.attention = {self._attention!r}; only 'sdpa' attends along prefix trees"
        if others := attention_kinds(self.module) - {"full_attention"}:
            return f"layers of {', '.join(sorted(others))} don't attend to all earlier tokens alone"
        return None

    def _probe_positions(self, positions: Sequence[int]) -> Float[Tensor, "tokens vocabulary"]:
        return self._probe_logprobs(
            *build_probe(positions, vocab_size=self.vocab_size, device=self.device)
        )

    def _probe_logprobs(
        self, ids: Tensor, position_ids: Tensor, tree: PrefixTree | None = None
    ) -> Float[Tensor, "tokens vocabulary"]:
        """Run one row; the log-probabilities are taken in at least float32, whose steps are far
        finer than those of bfloat16 logits.
        """
        logits: Tensor = call_with_weights(
            self.module, lambda: self._head(self._hidden(ids, position_ids, tree))[0]
        )
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _cell_cost(self) -> float:
        """Return the multiplications of a pair of tokens in all layers' attention, relative to
        those of a token in all layers' matrices.
        """
        config, base = self.module.config.get_text_config(), self.family.language_model(self.module)
        head_width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        num_weights = (
            sum(parameter.numel() for parameter in base.parameters())
            - self.module.get_input_embeddings().get_parameter("weight").numel()
        )
        return float(
            2 * config.num_hidden_layers * config.num_attention_heads * head_width / num_weights
        )
