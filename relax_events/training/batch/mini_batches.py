"""Buffers a whole train batch and trains it in several optimizer steps: mini-batches, over one or
more passes.

    samples, as they arrive ──▶ prompt groups of all ranks ──▶ for each pass: shuffle, split into
    mini-batches ──▶ micro-batches of this rank

The mini-batches depend on `run.seed`, the train step, the pass and the ids of the prompt groups
alone. So recovery, a replay and any number of ranks have the same mini-batches in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import orjson
from jaxtyping import Int64

from relax_events.config import TrainerConfig
from relax_events.events.types import SampleReady
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.ranks import GatheringRanks


def split_into_mini_batches(
    prompt_group_ids: Iterable[str],
    *,
    num_mini_batches: int,
    seed: int,
    train_step: int,
    epoch: int,
) -> list[list[str]]:
    """Shuffle the prompt groups of a train batch and split them into non-empty mini-batches of
    nearly equal size.

    The order is that of a hash, which does not depend on the release of a random generator.

    Args:
        prompt_group_ids: Of all ranks, in any order.
        num_mini_batches: At most; as many as there are prompt groups where these are fewer.
        seed: Of the run.
        train_step: Train step of the batch.
        epoch: Index of the pass, from 0.
    """

    def sort_key(prompt_group_id: str) -> tuple[bytes, str]:
        return blake2b(
            f"{seed} {train_step} {epoch} {prompt_group_id}".encode(), digest_size=8
        ).digest(), prompt_group_id

    order = sorted(set(prompt_group_ids), key=sort_key)
    number = min(num_mini_batches, len(order))
    return [order[first::number] for first in range(number)]


class MiniBatchBuffer:
    """See the module's docstring. A rank's share of it."""

    def __init__(
        self,
        trainer: TrainerConfig,
        *,
        seed: int,
        ranks: GatheringRanks,
        whole_prompt_groups: bool = False,
    ) -> None:
        """Start empty.

        Args:
            trainer: How many passes, mini-batches, and tokens of a micro-batch.
            seed: Of the run.
            ranks: All that train the batch together.
            whole_prompt_groups: Whether all samples of a prompt group must be in one micro-batch.
        """
        self._trainer, self._seed, self._ranks, self._whole_prompt_groups = (
            trainer,
            seed,
            ranks,
            whole_prompt_groups,
        )
        self.clear()

    def clear(self) -> None:
        """Clear the batch."""
        self._groups: dict[str, list[SampleReady]] = defaultdict(list)
        self._trainable: set[str] = set()

    def add(
        self, samples: Sequence[SampleReady], num_loss_tokens: Int64[np.ndarray, " samples"]
    ) -> None:
        """Add samples.

        Args:
            samples: In any order.
            num_loss_tokens: Of each of them that the loss takes. A prompt group without any is
                in no mini-batch.
        """
        for sample, number in zip(samples, num_loss_tokens.tolist(), strict=True):
            self._groups[sample.prompt_group_id].append(sample)
            if number:
                self._trainable.add(sample.prompt_group_id)

    def mini_batches(self, train_step: int) -> Iterator[tuple[int, list[list[SampleReady]]]]:
        """Yield each mini-batch with its pass, as the micro-batches of this rank; none if no rank
        has a loss token. The start is collective.
        """
        rows = self._ranks.all_gather_bytes(orjson.dumps(sorted(self._trainable)))
        all_group_ids = [prompt_group_id for row in rows for prompt_group_id in orjson.loads(row)]
        for epoch in range(self._trainer.num_epochs):
            number = self._trainer.num_mini_batches
            for mini_batch in split_into_mini_batches(
                all_group_ids,
                num_mini_batches=number,
                seed=self._seed,
                train_step=train_step,
                epoch=epoch,
            ):
                yield epoch, self._micro_batches(mini_batch)

    def _micro_batches(self, prompt_group_ids: Sequence[str]) -> list[list[SampleReady]]:
        batcher = MicroBatcher(
            max_tokens=self._trainer.max_tokens_per_micro_batch,
            whole_prompt_groups=self._whole_prompt_groups,
        )
        mine = [
            self._groups[prompt_group_id]
            for prompt_group_id in prompt_group_ids
            if prompt_group_id in self._trainable
        ]
        closed = [
            list(micro_batch)
            for group in mine
            for micro_batch in batcher.feed(
                sorted(group, key=lambda sample: sample.key.sample_index)
            )
        ]
        return closed + [rest for rest in [batcher.flush()] if rest]
