"""Names the pass of a model that ran out of memory, so that it can be run again in smaller ones, or
without the path that is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from relax_events.errors import OutOfMemory
from relax_events.events.parts import TOO_LARGE
from relax_events.training.batch.packing import PackedBatch

T = TypeVar("T")
OUT_OF_HOST_MEMORY = "can't allocate memory"
"""What torch says on the CPU."""
REMEDY_OF_TRAINING = ", or set trainer.activation_checkpointing"


class PassMemory:
    """Watches passes. A single path that is not longer than one that ran before in the same way,
    forward alone or backward, too, is not to blame for missing memory: its error is raised as it
    is.
    """

    def __init__(self) -> None:
        self._longest_run = self._longest_trained = 0

    def run(self, batch: PackedBatch, call: Callable[[], T], *, is_trained: bool = False) -> T:
        """Return what a pass returns.

        Args:
            batch: Of the pass.
            call: Runs it.
            is_trained: Whether it runs backward, too.
        Raises:
            OutOfMemory: It did not fit. The error holds none of its tensors.
        """
        return self.run_all([batch], call, find_running=lambda: batch, is_trained=is_trained)

    def run_all(
        self,
        batches: Iterable[PackedBatch],
        call: Callable[[], T],
        *,
        find_running: Callable[[], PackedBatch | None],
        is_trained: bool = False,
    ) -> T:
        """Return what a call returns that runs several passes; see `run`.

        Args:
            batches: Of the passes.
            call: Runs them.
            find_running: Returns the one that runs; None where it is padding.
            is_trained: Whether they run backward, too.
        """
        try:
            result = call()
        except (MemoryError, RuntimeError) as error:
            is_out = isinstance(error, MemoryError | torch.OutOfMemoryError)
            batch = find_running()
            if (not is_out and OUT_OF_HOST_MEMORY not in str(error)) or batch is None:
                raise
            longest, num_paths = int(batch.num_path_tokens.max()), len(batch.num_path_tokens)
            before = self._longest_trained if is_trained else self._longest_run
            if num_paths == 1 and longest <= before:
                raise
            problem = str(error)
        else:
            longest = max((int(one.num_path_tokens.max()) for one in batches), default=0)
            self._longest_run = max(self._longest_run, longest)
            if is_trained:
                self._longest_trained = max(self._longest_trained, longest)
            return result
        # out of the block, since the error holds the tensors
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        num_cells = longest if num_paths == 1 else batch.input_ids.size
        sample_id = batch.path_sample_ids[0]
        what = (
            f"a path of sample {sample_id}, {longest} tokens, does not fit the device alone; lower "
            f"engine.max_context_tokens{REMEDY_OF_TRAINING if is_trained else ''}; "
            "run.max_failed_prompt_groups bounds how many prompt groups in a row may end so"
            if num_paths == 1
            else f"{num_paths} paths from sample {sample_id} on, {num_cells} cells, don't fit the "
            "device together; lower trainer.max_tokens_per_micro_batch"
        )
        raise OutOfMemory(
            f"{TOO_LARGE}: {what} ({problem})",
            sample_id=sample_id,
            num_paths=num_paths,
            num_cells=num_cells,
        )
