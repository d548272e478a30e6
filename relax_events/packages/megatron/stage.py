"""One rank's part of the policy: hidden states of a micro-batch from one pipeline stage to the
next, and on the last one the log-probabilities of its loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from relax_events.api.events import ExpertShape
from relax_events.api.training import Coordinates, LoRAConfig, Topology, TrainerConfig
from relax_events.packages.megatron.adapter_layout import AdapterLayout
from relax_events.packages.megatron.adapters import add_adapters
from relax_events.packages.megatron.balancing import ExpertBalance, add_over_stages
from relax_events.packages.megatron.building import build_config, build_model
from relax_events.packages.megatron.folder_tensors import FolderTensors
from relax_events.packages.megatron.layout import TOWERS, Shard, cut, full_shapes
from relax_events.packages.megatron.modules import encode_tree
from relax_events.packages.megatron.routing import RoutingReplay
from relax_events.packages.megatron.row import Row, lay_out_row
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.towers import (
    OwnFeatures,
    Towers,
    add_deep_features,
    encode_own,
)
from relax_events.packages.megatron.vocabulary import HeadRows, sum_over_ranks, vocabulary_logprobs
from relax_events.training.backend.chunked_head import ChunkedHead, count_chunk_tokens
from relax_events.training.backend.out_of_memory import PassMemory
from relax_events.training.backend.policy_model import TokenLogprobs
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.shared_prefixes import PrefixSharing

LossFunction = Callable[[tuple[Tensor, ...]], Tensor]
"""Takes what the stage computes at the loss tokens: a `TokenLogprobs`, or a critic's values."""


class Work(NamedTuple):
    """A micro-batch to run; without `batch` a row of padding, where other ranks have one.

    Attributes:
        batch: The micro-batch.
        loss: Returns the loss, on the last pipeline stage. Without gradients, its result is unused.
        entropy_gradient: Compute entropies with gradient.
        ids: Token ids whose log-probabilities are also computed, [loss_tokens, ids].
        path_weights: Of each path in the loss, where experts are balanced.
    """

    batch: PackedBatch | None
    loss: LossFunction
    entropy_gradient: bool = False
    ids: NDArray[np.int64] | None = None
    path_weights: NDArray[np.floating] | None = None


class ModelStage:
    """See the module's docstring. `run` is collective over all ranks that hold the model."""

    shares_rows = True
    prefix_sharing: PrefixSharing | None
    """None where experts are balanced: a token would count for several samples."""

    def __init__(
        self,
        sizes: DecoderSizes,
        topology: Topology,
        *,
        trainer: TrainerConfig,
        dtype: torch.dtype,
        device: torch.device,
        replays_routing: bool = False,
        balance_coefficient: float = 0.0,
        towers: Towers | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        """Build this rank's part without values; the process groups must exist."""
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.vocab_size = sizes.vocab_size
        self._topology = topology
        self._is_frozen = False
        self._memory = PassMemory()
        self._running: PackedBatch | None = None
        self.is_last = parallel_state.is_pipeline_last_stage()
        self._context = parallel_state.get_context_parallel_group()
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._recomputes = trainer.activation_checkpointing == "whole"
        config = build_config(
            sizes,
            topology,
            dtype=dtype,
            sequence_parallel=topology.tensor > 1,
            recompute=self._recomputes,
        )
        chunks = [build_model(sizes, config, chunk=chunk) for chunk in range(topology.chunks)]
        self._chunks, self._last = chunks, chunks[-1]
        self.module: nn.Module = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        layers = [list(chunk.decoder.layers) for chunk in chunks]
        self._towers: Towers | None = None
        if towers is not None and parallel_state.is_pipeline_first_stage():
            self._towers = towers
            chunks[0].add_module(TOWERS, towers)
            add_deep_features(layers[0][: sizes.num_deep])
        self._routing: RoutingReplay | None = None
        if replays_routing:
            tensor = (self._tensor.rank(), self._tensor.size())
            self._routing = RoutingReplay(chain.from_iterable(layers), tensor=tensor)
        self.prefix_sharing = None if balance_coefficient else sharing
        self._balance: ExpertBalance | None = None
        if balance_coefficient:
            self._balance = ExpertBalance(
                layers,
                coefficient=balance_coefficient,
                num_layers=sizes.num_layers,
                tensor=self._tensor,
                context=self._context,
            )
        parts = topology.context
        self._row_multiple = topology.tensor * (2 * parts if parts > 1 else 1)
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.int64).float() / sizes.head_dim
        self._frequencies = (1.0 / sizes.rope_theta**exponents).to(device)

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""
        if self._routing is None:
            return None
        return ExpertShape(self.sizes.num_layers, self.sizes.top_k, self.sizes.num_experts)

    @torch.no_grad()
    def load(self, path: Path, shards: Sequence[Shard]) -> None:
        """Read this rank's weights from a folder in Hugging Face layout.

        Raises:
            ConfigError: The folder lacks a tensor, or has it in another shape.
        """
        parameters = dict(self.module.named_parameters())
        tensors = FolderTensors(path, full_shapes(self.sizes))
        for shard in shards:
            parameter = parameters[shard.name]
            parameter.zero_()  # the rows of the padded vocabulary, and what is new
            for piece in () if shard.is_new else shard.pieces:
                values = tensors.read(piece.name, piece.source)
                cut(parameter, piece.target).copy_(
                    values[0] if len(piece.source) > len(piece.target) else values
                )

    def add_adapters(self, lora: LoRAConfig, topology: Topology, at: Coordinates) -> list[Shard]:
        """Add the adapters of `model.lora` without values, freeze the rest, and return this rank's
        adapters.
        """
        layout = AdapterLayout(lora)
        chunks = zip(self._chunks, layout.chunks(self.sizes, topology, at), strict=True)
        for chunk, parts in chunks:
            add_adapters(chunk, parts, sizes=self.sizes, lora=lora, tensor=self._tensor)
        self._is_frozen = True
        return list(layout(self.sizes, topology, at))

    def run(
        self,
        works: Sequence[Work],
        *,
        forward_only: bool = False,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Run micro-batches forward and backward, one forward and one backward pass in turn where
        there are pipeline stages (1F1B); interleaved where a stage holds several chunks.

        Args:
            works: The same on all ranks that hold the model together.
            forward_only: Compute no gradients.
            on_done: Called after each forward pass of a chunk.
        Raises:
            OutOfMemory: A pass did not fit the device.
        """
        if not works:
            return
        chunks = self._chunks
        if len(chunks) > 1:  # whose schedule takes as many as stages, or a multiple
            padding = [Work(None, lambda outputs: outputs[0])] * (
                -len(works) % self._topology.pipeline
            )
            works = [*works, *padding]

        def forward(todo: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            work = next(todo)
            self._running = work.batch
            row = lay_out_row(
                work.batch,
                multiple=self._row_multiple,
                parts=self._topology.context,
                index=self._context.rank(),
            )
            replayed = self._routing.replay(row, self.device) if self._routing else nullcontext()
            with replayed, self._balanced(work, row, chunk):
                hidden = self._hidden(row, chunk)
            if hidden.requires_grad:  # several passes run forward before one runs back
                hidden.register_hook(lambda gradient: setattr(self, "_running", work.batch))
            on_done()

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                return self._loss(work, row, output), torch.tensor(0, dtype=torch.int), {}

            return hidden, loss

        self.module.train(mode=not forward_only)
        if self._routing:
            self._routing.begin(is_recomputed=self._recomputes and not forward_only)
        if self._balance:
            self._balance.begin(is_recomputed=self._recomputes and not forward_only)
        schedule = partial(
            get_forward_backward_func(),
            forward_step_func=forward,
            data_iterator=[iter(works) for _ in chunks] if len(chunks) > 1 else iter(works),
            model=chunks,
            num_microbatches=len(works),
            seq_length=1,  # each micro-batch sends its own
            micro_batch_size=1,
            forward_only=forward_only,
        )
        with torch.set_grad_enabled(not forward_only):
            self._memory.run_all(
                [work.batch for work in works if work.batch is not None],
                schedule,
                find_running=lambda: self._running,
                is_trained=not forward_only,
            )

    def _balanced(self, work: Work, row: Row, chunk: Any) -> AbstractContextManager[None]:
        """Balance the experts of a micro-batch that is trained, if they are to be."""
        if self._balance is None or work.batch is None or work.path_weights is None:
            return nullcontext()
        return self._balance.balance(
            row,
            num_tokens=work.batch.num_path_tokens,
            weights=work.path_weights,
            device=self.device,
            chunk=chunk.vp_stage or 0,
        )

    def take_imbalances(self) -> Float[Tensor, " micro_batches"]:
        """Return the weighted load-balancing loss of each micro-batch that the last `run` trained,
        before its coefficient, over all layers; collective over the stages. Empty where experts are
        not balanced.
        """
        if self._balance is None or not self._balance.imbalances:
            return torch.zeros(0)
        group = parallel_state.get_pipeline_model_parallel_group()
        return add_over_stages(self._balance.imbalances, group)

    def _hidden(self, row: Row, chunk: Any) -> Float[Tensor, "tokens 1 hidden"]:
        tokens, positions = (
            torch.from_numpy(values).to(self.device)
            for values in (row.tokens[row.token_indices], row.positions[row.token_indices])
        )
        embedded = chunk.embedding(tokens[None], None) if chunk.pre_process else None
        features = None if embedded is None else self._own_features(row, len(embedded))
        if features is not None and embedded is not None:
            replaced = features.first[:, None].to(embedded.dtype)
            embedded = embedded.index_copy(0, features.positions, replaced)
        if embedded is not None and self._is_frozen and torch.is_grad_enabled():
            # a layer that is computed again has gradients only where its input has one
            embedded = embedded.detach().requires_grad_()
        angles = self._angles(row, positions)
        hidden: Tensor = chunk.decoder(
            hidden_states=embedded,
            attention_mask=encode_tree(row.tree),
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            # see add_deep_features
            context=features.deep if features is not None and len(features.deep) else None,
            context_mask=features.positions if features is not None else None,
        )
        return hidden

    def _own_features(self, row: Row, num_tokens: int) -> OwnFeatures | None:
        """Encode the media among the tokens of this rank's part of the sequence."""
        if self._towers is None:
            return None
        first = self._tensor.rank() * num_tokens if self._tensor.size() > 1 else 0
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._is_frozen):
            return encode_own(self._towers, row, first=first, end=first + num_tokens)

    def _angles(self, row: Row, positions: Tensor) -> Float[Tensor, "tokens half_head"]:
        """Return the rotary angles of this rank's tokens. Where positions have three parts, the
        frequencies of row and column alternate with those of time (interleaved M-RoPE).
        """
        if row.media is None:
            return positions[:, None].float() * self._frequencies
        rotary = torch.from_numpy(row.media.rotary[:, row.token_indices]).to(self.device)
        angles = rotary[..., None].float() * self._frequencies
        mixed = angles[0].clone()
        for part in (1, 2):
            mixed_in = slice(part, 3 * self.sizes.mrope_section[part], 3)
            mixed[:, mixed_in] = angles[part, :, mixed_in]
        return mixed

    def _loss(self, work: Work, row: Row, hidden: Tensor) -> Tensor:
        if work.batch is None:
            return hidden.sum() * 0.0
        return work.loss(self._outputs(work, row, hidden))

    def _outputs(self, work: Work, row: Row, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return what the loss is computed from."""
        return self._token_logprobs(work, row, hidden)

    def _token_logprobs(self, work: Work, row: Row, hidden: Tensor) -> TokenLogprobs:
        batch = work.batch
        assert batch is not None
        if self._tensor.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden)
        columns = (
            batch.targets[:, None]
            if work.ids is None
            else np.concatenate([batch.targets[:, None], work.ids], 1)
        )
        positions, ids, temperatures, kept = (
            torch.from_numpy(values).to(self.device)
            for values in (
                row.loss_positions,
                columns[row.loss_tokens],
                batch.temperatures[row.loss_tokens],
                row.loss_tokens,
            )
        )
        selected = hidden[:, 0].index_select(0, positions)
        logprobs, entropies = self._apply_head(selected, ids, temperatures, work.entropy_gradient)
        if self._context.size() > 1:
            part = torch.cat([logprobs, entropies[:, None]], 1)
            whole = part.new_zeros(len(batch.targets), part.shape[1]).index_add(0, kept, part)
            whole = sum_over_ranks(whole, self._context)
            logprobs, entropies = whole[:, :-1], whole[:, -1]
        return TokenLogprobs(
            logprobs[:, 0],
            entropies,
            torch.from_numpy(columns[:, 1:]),
            logprobs[:, 1:],
            imbalance=logprobs.new_zeros(0),
        )

    def _apply_head(
        self, hidden: Tensor, ids: Tensor, temperatures: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Apply the head; to large micro-batches in chunks, each computed again in the backward
        pass.
        """
        output = self._last.output_layer
        module = self._last.embedding.word_embeddings if output.weight is None else output
        weight = module.weight
        first = self._tensor.rank() * len(weight)
        rows = HeadRows(first, min(max(self.vocab_size - first, 0), len(weight)), self._tensor)
        chunk = count_chunk_tokens(len(weight))
        if len(hidden) <= chunk:
            return vocabulary_logprobs(
                lambda part: functional.linear(part, weight),
                hidden,
                ids,
                temperatures,
                rows,
                entropy_gradient,
            )
        head = ChunkedHead(module)
        parts = [
            checkpoint(
                vocabulary_logprobs,
                head,
                *piece,
                rows,
                entropy_gradient,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for piece in zip(
                *(values.split(chunk) for values in (hidden, ids, temperatures)), strict=True
            )
        ]
        logprobs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
        return logprobs, entropies
