"""Which models servers are sent media for: those that were held beside the trainer, each with all that it reads (`tests/engines`)."""

from __future__ import annotations

SEEING = ("qwen3_vl",)
"""As `config.json` names them; they read pictures and clips."""
