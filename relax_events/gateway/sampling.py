"""How a call samples its tokens, in the words that all APIs share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from relax_events.config import SamplingConfig

SEED_BITS = 63


class CallSampling(BaseModel):
    """Temperature 0, like `top_p` 0, takes the most probable token; `top_k` 0 and -1 keep all. A
    seed fixes the tokens.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values that have no effect."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        """Drop nulls, and refuse a field that would change the tokens."""
        if not isinstance(data, dict):
            return data
        for key, values in cls.NEUTRAL.items():
            if key in data and data[key] not in values:
                raise ValueError(f"{key} = {data[key]!r} is not supported here; leave it out")
        return {key: value for key, value in data.items() if value is not None}

    def build_config(self, max_new_tokens: int) -> SamplingConfig:
        """Return the engine's settings for at most so many tokens."""
        is_greedy = not self.temperature or not self.top_p
        return SamplingConfig(
            temperature=self.temperature or 1.0,
            top_p=1.0 if is_greedy else self.top_p,
            top_k=1 if is_greedy else max(0, self.top_k),
            max_new_tokens=max_new_tokens,
        )

    def choose_seed(self) -> int:
        """Return the seed, a random one where the call has none."""
        return secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**SEED_BITS
