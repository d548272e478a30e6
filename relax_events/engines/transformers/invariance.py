"""How to compute rows side by side so that they disturb each other's rounding least: measured on
the model and machine at hand.

Matrix kernels may sum in another order for another number of rows, or for another place among them.
The measurement runs the same
probe row among others: on one CPU thread any multiple of eight rows mostly gives the same bits, or
    any above a small number; in float32 on
several threads not even a row's place is without effect; other devices may be anywhere between.

A few probes are no proof: a kernel may round otherwise for numbers, lengths or places that were not
    probed. And a sample that is read again
(after an abort, in another engine, under new weights) is computed by other kernels than those that
drew it, which the measurement does not look at. So only the cost of a step may rest on it: how many
rows a step is padded to, and whether prompts are read together. No promise and no decision about
data rests on it. Bits are equal where one computation is repeated: see `max_running_samples` of
one.
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
PROBE_SHOWN = (32, 48, 128, 1024)
"""Lengths, padding included, that attention is shown."""
PROBE_PROMPTS = (2, 8, 40)
PROBE_SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class RowRule:
    """How many rows to compute at a time."""

    agrees: bool
    """Whether the probe row came out the same at every length and place that was tried, with
    `max_rows` rows."""
    min_rows: int
    """Decoding steps are padded to at least as many rows: from there on their number made no
    difference to the probe row."""
    prefills_together: bool
    """Whether several prompts are prefilled at a time."""


@torch.inference_mode()
def measure_invariance(model: CausalModel, *, max_rows: int) -> RowRule:
    """Find out how rows are best computed; see the module's docstring for what may rest on the
    answer.

    Args:
        model: At its place of work, with the threads that it will have.
        max_rows: Samples that run side by side, a multiple of the model's `row_block`.
    """
    at_most = [_probe_rows(model, num_rows=max_rows, num_tokens=length) for length in PROBE_SHOWN]
    expected = at_most[0][0]

    def is_same(rows: Sequence[Tensor]) -> bool:
        return all(torch.equal(row, expected) for row in rows)

    if all(map(is_same, at_most)):
        together = all(
            is_same(_probe_rows(model, num_rows=max_rows, num_prompts=count))
            for count in PROBE_PROMPTS
            if count <= max_rows
        )
        counts = takewhile(
            lambda count: is_same(_probe_rows(model, num_rows=count)),
            _counts_below(max_rows, model.row_block),
        )
        rule = RowRule(
            agrees=True, min_rows=min(counts, default=max_rows), prefills_together=together
        )
    else:
        rule = RowRule(agrees=False, min_rows=model.row_block, prefills_together=True)
    log.info(
        "batch_invariance.measured",
        **asdict(rule),
        device=str(model.device),
        threads=torch.get_num_threads(),
        max_rows=max_rows,
    )
    return rule


def _counts_below(max_rows: int, block: int) -> list[int]:
    """Return the numbers of rows that are tried, largest first: halves, and one that is no power of
    two.
    """
    halves = (max_rows >> shift for shift in range(1, max_rows.bit_length()))
    return sorted(
        {count // block * block for count in (*halves, 5 * block) if block <= count < max_rows},
        reverse=True,
    )


def _probe_rows(
    model: CausalModel, *, num_rows: int, num_prompts: int = 1, num_tokens: int = PROBE_SHOWN[0]
) -> list[Tensor]:
    """Prefill and decode the probe among other rows; give the logits after both, at several places.

    Args:
        model: Computes.
        num_rows: Of the decoding step.
        num_prompts: Of the prefill.
        num_tokens: That attention is shown.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED + num_rows)
    tokens = torch.randint(model.vocab_size, (num_prompts, PROBE_LENGTH), generator=generator)
    places = sorted({0, num_rows // 2, num_rows - 1})
    sources = [row % num_prompts for row in range(num_rows)]
    tokens[[sources[place] for place in places]] = torch.arange(PROBE_LENGTH) * 7 % model.vocab_size
    tokens = tokens.to(model.device)
    prefilled, prompts = model.prefill(
        tokens, torch.full((num_prompts,), PROBE_LENGTH - 1, device=model.device)
    )
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
    return [torch.cat([prefilled[sources[place]], decoded[place]]) for place in places]
