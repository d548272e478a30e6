"""Measure on this model and machine how to pad a batch so that its rows change each other's
rounding least.

Matrix kernels may sum in another order for another number of rows, or another row index. The
measurement runs the same probe row among others. On one CPU thread any multiple of eight rows
mostly gives the same bits, or any multiple above a small number. In float32 on several threads even
the row index matters. Other devices may behave like either.

A few probes are not a proof: a kernel may round differently for batch sizes, lengths or indices
that were not probed. A sample that is prefilled again (after an abort, in another engine, under new
weights) is computed by other kernels than the first time; the measurement ignores this. So only the
cost of a step depends on the result: how many rows a step is padded to, and whether prompts are
prefilled together. No guarantee and no decision about data depends on it. Only
`max_running_samples = 1` makes bits reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

import structlog
import torch
from torch import Tensor

from relax_events.engines.transformers.causal_model import CausalModel
from relax_events.engines.transformers.kv_cache import RowCache

log = structlog.get_logger()
PROBE_LENGTH = 16
PROBE_ATTENTION_LENGTHS = (32, 48, 128, 1024)
"""Attention lengths to probe, padding included, up to the longest of the engine."""
MAX_PROBE_BYTES = 2**30
"""Of the probe's keys and values: 256 rows of 1,024 tokens take 12 GB in a model of 0.5 GB, and
39 GB in one of 8."""
PROBE_PROMPTS = (2, 8, 40)
PROBE_SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class PaddingRule:
    """The number of rows and prompts to compute at once."""

    agrees: bool
    """Whether the probe row had the same bits at every probed length and index, with `max_rows`
    rows, or with as many as fit into the probe's memory.
    """
    min_rows: int
    """Decoding steps are padded to at least this many rows: above it the number of rows did not
    change the probe row.
    """
    prefills_together: bool
    """Whether several prompts are prefilled at once."""


@torch.inference_mode()
def measure_invariance(
    model: CausalModel, *, max_rows: int, max_tokens: int, max_bytes: int = MAX_PROBE_BYTES
) -> PaddingRule:
    """Measure how to pad batches; see the module's docstring for what may depend on the result.

    Args:
        model: The model, on its device and with its final number of threads.
        max_rows: Maximum number of running samples, a multiple of the model's `row_block`.
        max_tokens: Longest context of a sample, at least 32.
        max_bytes: Bound of the probe's keys and values; fewer rows are probed where it is hit.
    """
    lengths = [length for length in PROBE_ATTENTION_LENGTHS if length <= max_tokens]
    max_rows = min(
        max_rows, _count_rows_that_fit(model, num_tokens=lengths[-1], max_bytes=max_bytes)
    )
    full_batches = [_probe_rows(model, num_rows=max_rows, num_tokens=length) for length in lengths]
    expected = full_batches[0][0]

    def is_same(rows: Sequence[Tensor]) -> bool:
        return all(torch.equal(row, expected) for row in rows)

    if all(map(is_same, full_batches)):
        together = all(
            is_same(_probe_rows(model, num_rows=max_rows, num_prompts=count))
            for count in PROBE_PROMPTS
            if count <= max_rows
        )
        counts = takewhile(
            lambda count: is_same(_probe_rows(model, num_rows=count)),
            _counts_below(max_rows, model.row_block),
        )
        rule = PaddingRule(
            agrees=True, min_rows=min(counts, default=max_rows), prefills_together=together
        )
    else:
        rule = PaddingRule(agrees=False, min_rows=model.row_block, prefills_together=True)
    log.info(
        "batch_invariance.measured",
        **asdict(rule),
        device=str(model.device),
        threads=torch.get_num_threads(),
        max_rows=max_rows,
    )
    return rule


def _count_rows_that_fit(model: CausalModel, *, num_tokens: int, max_bytes: int) -> int:
    """Return the rows of so many tokens whose cache fits the bound, at least one block."""
    block = model.row_block
    cache = RowCache(max_rows=block, max_tokens=num_tokens)
    _probe_rows(model, num_rows=block, num_tokens=num_tokens, cache=cache)
    return max(max_bytes // cache.num_bytes, 1) * block


def _counts_below(max_rows: int, block: int) -> list[int]:
    """Return the numbers of rows to probe, largest first: halves, and a number that is not a power
    of two.
    """
    halves = (max_rows >> shift for shift in range(1, max_rows.bit_length()))
    return sorted(
        {count // block * block for count in (*halves, 5 * block) if block <= count < max_rows},
        reverse=True,
    )


def _probe_rows(
    model: CausalModel,
    *,
    num_rows: int,
    num_prompts: int = 1,
    num_tokens: int = PROBE_ATTENTION_LENGTHS[0],
    cache: RowCache | None = None,
) -> list[Tensor]:
    """Prefill and decode the probe among other rows; return the logits after both, at several row
    indices.

    Args:
        model: The model to probe.
        num_rows: Rows of the decoding step.
        num_prompts: Prompts of the prefill.
        num_tokens: Attention length.
        cache: An empty cache of this size; None for a new one.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED + num_rows)
    tokens = torch.randint(model.vocab_size, (num_prompts, PROBE_LENGTH), generator=generator)
    probe_rows = sorted({0, num_rows // 2, num_rows - 1})
    sources = [row % num_prompts for row in range(num_rows)]
    tokens[[sources[row] for row in probe_rows]] = torch.arange(PROBE_LENGTH) * 7 % model.vocab_size
    tokens = tokens.to(model.device)
    prefilled, prompts = model.prefill(
        tokens, torch.full((num_prompts,), PROBE_LENGTH - 1, device=model.device)
    )
    if cache is None:
        cache = RowCache(max_rows=num_rows, max_tokens=num_tokens)
    cache.fill(range(num_rows), prompts, sources=sources, num_tokens=PROBE_LENGTH)
    positions = torch.full((num_rows,), PROBE_LENGTH, device=model.device)
    decoded = model.decode(
        tokens[sources, 0],
        positions,
        cache,
        num_tokens=num_tokens,
        shifts=torch.zeros_like(positions),
    )
    return [torch.cat([prefilled[sources[row]], decoded[row]]) for row in probe_rows]
