"""How to compute so that a sample's bits don't depend on what runs beside it: measured on the model and machine at hand.

Matrix kernels may sum in another order for another number of rows, or for another place among them. What holds is found
by running the same probe row among others: on one CPU thread any multiple of eight rows gives the same bits; in float32 on
several threads not even a row's place is without effect; other devices may be anywhere between.
"""

from __future__ import annotations

from enum import StrEnum

import structlog
import torch
from torch import Tensor

from relax_events.engines.causal_model import CausalModel
from relax_events.engines.experts import ROW_BLOCK
from relax_events.engines.kv_cache import RowCache

log = structlog.get_logger()
PROBE_LENGTH = 16
PROBE_SHOWN = (32, 48, 128, 1024)
"""Lengths, padding included, that attention is shown."""
PROBE_SEED = 20_260_101


class Invariance(StrEnum):
    """What leaves a row's bits alone."""

    ANY_ROWS = "any_rows"
    """The number of rows may vary."""
    FIXED_ROWS = "fixed_rows"
    """The number of rows must be fixed, so each step is padded to the most, and each prompt is prefilled alone."""
    ABSENT = "absent"
    """Nothing; samples are drawn from the right distribution, but a rerun may round otherwise."""


@torch.inference_mode()
def measure_invariance(model: CausalModel, *, max_rows: int) -> Invariance:
    """Find out how rows must be computed.

    Args:
        model: At its place of work, with the threads that it will have.
        max_rows: Samples that run side by side, a multiple of `ROW_BLOCK`.
    """
    counts = sorted({ROW_BLOCK, 2 * ROW_BLOCK, 5 * ROW_BLOCK, max_rows // 2 // ROW_BLOCK * ROW_BLOCK, max_rows} - {0})
    varied = [_probe_rows(model, num_rows=count) for count in counts if count <= max_rows]
    alone = _probe_rows(model, num_rows=ROW_BLOCK, num_prompts=1)
    fixed = [_probe_rows(model, num_rows=max_rows, num_prompts=1, num_tokens=length) for length in PROBE_SHOWN]
    if all(torch.equal(row, alone[0]) for rows in (*varied, *fixed) for row in rows):
        result = Invariance.ANY_ROWS
    elif all(torch.equal(row, fixed[0][0]) for rows in fixed for row in rows):
        result = Invariance.FIXED_ROWS
    else:
        result = Invariance.ABSENT
    log.info("batch_invariance.measured", invariance=result.value, device=str(model.device), threads=torch.get_num_threads(), max_rows=max_rows)
    return result


def _probe_rows(model: CausalModel, *, num_rows: int, num_prompts: int | None = None, num_tokens: int = PROBE_SHOWN[0]) -> list[Tensor]:
    """Prefill and decode the probe among other rows; give the logits after both, at several places.

    Args:
        model: Computes.
        num_rows: Of the decoding step.
        num_prompts: Of the prefill: 1, or by default one for each row.
        num_tokens: That attention is shown.
    """
    num_prompts = num_prompts or num_rows
    generator = torch.Generator().manual_seed(PROBE_SEED + num_rows)
    tokens = torch.randint(model.vocab_size, (num_prompts, PROBE_LENGTH), generator=generator)
    places = sorted({0, num_rows // 2, num_rows - 1})
    sources = [row % num_prompts for row in range(num_rows)]
    tokens[[sources[place] for place in places]] = torch.arange(PROBE_LENGTH) * 7 % model.vocab_size
    tokens = tokens.to(model.device)
    prefilled, prompts = model.prefill(tokens, torch.full((num_prompts,), PROBE_LENGTH - 1, device=model.device))
    cache = RowCache(max_rows=num_rows, max_tokens=num_tokens)
    cache.fill(range(num_rows), prompts, sources=sources, num_tokens=PROBE_LENGTH)
    positions = torch.full((num_rows,), PROBE_LENGTH, device=model.device)
    decoded = model.decode(tokens[sources, 0], positions, cache, num_tokens=num_tokens)
    return [torch.cat([prefilled[sources[place]], decoded[place]]) for place in places]
