"""One rank's part of a critic: that of a policy, but on the last pipeline stage a value for each
loss token.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from relax_events.packages.megatron.row import Row
from relax_events.packages.megatron.stage import ModelStage, Work
from relax_events.packages.megatron.vocabulary import sum_over_ranks


class ValueStage(ModelStage):
    """See the module's docstring. Its outputs are the values of all loss tokens."""

    def _outputs(self, work: Work, row: Row, hidden: Tensor) -> tuple[Tensor]:
        """Return the value at each loss token. Each rank applies the head to its own tokens, and
        gathers numbers, not hidden states.
        """
        assert work.batch is not None
        values: Tensor = self._last.value_head(hidden[:, 0])
        if self._tensor.size() > 1:
            # all ranks compute the same loss, so each takes its own part of the gradient
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        positions, kept = (
            torch.from_numpy(indices).to(self.device)
            for indices in (row.loss_positions, row.loss_tokens)
        )
        part = values.index_select(0, positions)
        if self._context.size() == 1:
            return (part,)
        whole = part.new_zeros(len(work.batch.targets)).index_add(0, kept, part)
        return (sum_over_ranks(whole, self._context),)
