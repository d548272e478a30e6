"""Which models servers are sent media for: those that were held beside the trainer, each with all that it reads (`tests/engines`)."""

from __future__ import annotations

SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe")
"""As `config.json` names them; they read pictures and clips, and the last two hear as well."""
ON_GPUS = "whose linear attention SGLang computes by kernels for GPUs, where nobody has held it beside the trainer"
UNSEEN = {"qwen3_5": ON_GPUS, "qwen3_5_moe": ON_GPUS}
"""Why families that read media are not among them."""
