"""Builds the input of the loss: a micro-batch packed for the model, with the per-token values of
its samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from relax_events.algorithms.distillation import TokenSet
from relax_events.algorithms.objective import ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.training.backend.policy_model import TokenLogprobs
from relax_events.training.batch.packing import (
    PackedBatch,
    gather_loss_values,
    gather_staleness,
    pack_in_passes,
    require_whole_prompt_groups,
)
from relax_events.training.batch.row_layout import TokenSets
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.batch.step_statistics import (
    Whitening,
    compute_reward_scaling,
    compute_whitening,
)
from relax_events.training.batch.truncation import mask_excluded
from relax_events.training.ranks import GatheringRanks


@dataclass(frozen=True, slots=True)
class LossBatch:
    """`values` hold `advantages` and, where the algorithm needs them, `rollout`, `old`, `ref`,
    `teacher` and `staleness`: one number for each loss token.

    `rewards` are of the samples that have loss tokens. `token_sets` are set where the loss
    compares policy and teacher over several token ids.
    """

    batch: PackedBatch
    values: Mapping[str, NDArray[np.floating]]
    sample_ids: list[str]
    rewards: NDArray[np.float64]
    token_sets: TokenSets | None = None

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[SampleReady],
        *,
        algorithm: AlgorithmConfig,
        max_cells: int,
        vocab_size: int,
        share_rows: bool,
        sharing: PrefixSharing | None = None,
        experts: ExpertShape | None = None,
        trainer_version: int = 0,
    ) -> LossBatch:
        """Pack samples of a step that trains `trainer_version`; see `pack_in_passes` for the
        arguments.

        Raises:
            PoisonSample: A sample can't be trained on; the text names it.
        """
        samples = mask_excluded(samples, algorithm=algorithm)
        if algorithm.needs_whole_groups:
            require_whole_prompt_groups(samples)
        batch = pack_in_passes(
            samples,
            max_cells=max_cells,
            vocab_size=vocab_size,
            share_rows=share_rows,
            sharing=sharing,
            experts=experts,
        )
        values = {
            name: gather_loss_values(samples, field)
            for name, field in _per_token_fields(algorithm).items()
        }
        if algorithm.max_token_staleness is not None:
            values["staleness"] = gather_staleness(samples, trainer_version=trainer_version)
        sets = (
            TokenSets.from_samples(
                samples, num_ids=algorithm.num_compared_tokens, vocab_size=vocab_size
            )
            if algorithm.has_topk_loss
            else None
        )
        rewards = np.array([sample.reward for sample in samples], np.float64)[
            batch.num_loss_tokens > 0
        ]
        return cls(batch, values, [sample.sample_id for sample in samples], rewards, sets)

    def whiten(self, whitening: Whitening) -> LossBatch:
        """Return a copy with advantages whitened by the statistics of the whole step."""
        advantages = whitening.apply(self.values["advantages"].astype(np.float64))
        return replace(self, values={**self.values, "advantages": advantages})

    def with_old_logprobs(self, logprobs: NDArray[np.floating]) -> LossBatch:
        """Return a copy with old log-probabilities that the trainer computed."""
        return replace(self, values={**self.values, "old": logprobs})

    def without_model_inputs(self) -> LossBatch:
        """Return a copy without the large inputs that only the model needs: media, routed experts
        and passes.
        """
        batch = replace(self.batch, media=None, experts=None, parts=())
        return replace(self, batch=batch, token_sets=None)

    def values_by_sample(self) -> dict[str, dict[str, NDArray[np.floating]]]:
        """Return the values of each sample's loss tokens."""
        ends = np.cumsum(self.batch.num_loss_tokens)[:-1]
        columns = {name: np.split(values, ends) for name, values in self.values.items()}
        return {
            sample_id: {name: parts[at] for name, parts in columns.items()}
            for at, sample_id in enumerate(self.sample_ids)
        }

    def with_values(self, by_sample: Mapping[str, Mapping[str, NDArray[np.floating]]]) -> LossBatch:
        """Return a copy with the values that its samples had in other micro-batches."""
        names = by_sample[self.sample_ids[0]]
        return replace(
            self,
            values={
                name: np.concatenate([by_sample[sample_id][name] for sample_id in self.sample_ids])
                for name in names
            },
        )

    def objective_inputs(self, result: TokenLogprobs, *, cutoff: float | None) -> ObjectiveInputs:
        """Build the objective's inputs, on the device and in the dtype of the model's result.

        Args:
            result: The model's, for `batch`.
            cutoff: Largest squared log-ratio that is trained, if there is a bound.
        """
        logprobs = result.logprobs
        stacked = (
            torch.from_numpy(np.stack(list(self.values.values())))
            .to(logprobs.device)
            .to(logprobs.dtype)
        )
        tensors = dict(zip(self.values, stacked, strict=True))
        return ObjectiveInputs(
            logprobs=logprobs,
            entropies=result.entropies,
            rollout_logprobs=tensors.get("rollout", logprobs.detach()),
            old_logprobs=tensors.get("old"),
            ref_logprobs=tensors.get("ref"),
            advantages=tensors["advantages"],
            num_loss_tokens=torch.from_numpy(self.batch.num_loss_tokens).to(logprobs.device),
            second_moment_cutoff=cutoff,
            teacher_logprobs=tensors.get("teacher"),
            token_set=self._token_set(result),
            staleness=tensors.get("staleness"),
            imbalance=result.imbalance.to(logprobs.dtype) if len(result.imbalance) else None,
        )

    def _token_set(self, result: TokenLogprobs) -> TokenSet | None:
        if self.token_sets is None:
            return None
        return TokenSet(
            result.id_logprobs,
            torch.from_numpy(self.token_sets.teacher_logprobs).to(result.id_logprobs),
        )


def whiten_step(
    loss_batches: Sequence[LossBatch], *, algorithm: AlgorithmConfig, ranks: GatheringRanks
) -> list[LossBatch]:
    """Whiten the advantages of a step as the algorithm requires. Collective.

    Args:
        loss_batches: All of this rank.
        algorithm: Whether and how to whiten.
        ranks: All of them.
    """
    if algorithm.whiten_advantages == "none":
        return list(loss_batches)
    settings = {} if algorithm.std_correction is None else {"correction": algorithm.std_correction}
    if algorithm.whiten_advantages == "rewards":
        whitening = compute_reward_scaling(
            [loss_batch.rewards for loss_batch in loss_batches], ranks=ranks, **settings
        )
    else:
        whitening = compute_whitening(
            [
                (loss_batch.values["advantages"], loss_batch.batch.num_loss_tokens)
                for loss_batch in loss_batches
            ],
            over=algorithm.whiten_advantages,
            ranks=ranks,
            **settings,
        )
    return [loss_batch.whiten(whitening) for loss_batch in loss_batches]


def _per_token_fields(algorithm: AlgorithmConfig) -> dict[str, str]:
    """Name the per-token arrays of a sample that the objective needs."""
    fields = {"advantages": "advantages"}
    if algorithm.has_rewards:
        fields["rollout"] = "rollout_logprobs"
    if algorithm.old_logprobs != "trainer":
        fields["old"] = f"{algorithm.old_logprobs}_logprobs"
    if algorithm.distills:
        fields["teacher"] = "teacher_logprobs"
    return fields | ({"ref": "ref_logprobs"} if algorithm.has_reference_in_loss else {})
