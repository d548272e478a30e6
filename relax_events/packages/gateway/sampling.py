"""How a call samples its tokens, in the words that all APIs share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from relax_events.api.engines import SamplingConfig
from relax_events.api.events import format_json

SEED_BITS = 63
MIN_TEMPERATURE = 1e-5
"""Below it logits divided by it leave float32; the most probable token is taken, as by 0."""
MAX_SHOWN = 100
"""Characters of a refused field in its error; a repr has no lone surrogates, unlike the field."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
MAX_TOKEN_ID = 2**31
"""Exclusive; an engine keeps ids, and how many of them `top_k` keeps, in 32 bits."""


def require_characters(body: dict[str, Any]) -> None:
    """Refuse a body of which no answer could be sent, as Python's reader of JSON takes it.

    Raises:
        ValueError: A text has half of a surrogate pair, a number is NaN or infinite, or it is
            nested too deep.
    """
    try:
        format_json(body).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(
            f"a text has {half}, which is half of a character; send whole characters"
        ) from None


class CallSampling(BaseModel):
    """Temperature 0, like `top_p` 0, takes the most probable token; `top_k` 0 and -1 keep all. A
    seed fixes the tokens.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (1,),
        "best_of": (1,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_p": (0,),
        "min_tokens": (0,),
        "truncate_prompt_tokens": (-1,),
        "ignore_eos": (False,),
        "use_beam_search": (False,),
        "echo": (False,),
    }
    """Fields that are not supported, of the dialect or of other servers, with the values that have
    no effect."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Fields of the dialect's specification that change neither the tokens nor the prompt."""

    temperature: float = Field(default=1.0, ge=0, le=1e6)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=MAX_TOKEN_ID)
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        """Drop nulls, and refuse a field that would change the tokens, or that the specification of
        the dialect does not have.
        """
        if not isinstance(data, dict):
            return data
        require_characters(data)
        for key in sorted(data.keys() - cls.model_fields.keys() - cls.IGNORED):
            values = cls.NEUTRAL.get(key, ())
            if (value := _drop_nulls(data[key])) not in EMPTY and value not in values:
                name, shown = repr(key)[1:-1][:MAX_SHOWN], repr(data[key])[:MAX_SHOWN]
                raise ValueError(f"{name} = {shown} is not supported here; leave it out")
        return {key: value for key, value in data.items() if value is not None}

    def build_config(self, max_new_tokens: int) -> SamplingConfig:
        """Return the engine's settings for at most so many tokens."""
        is_greedy = self.temperature < MIN_TEMPERATURE or not self.top_p
        return SamplingConfig(
            temperature=1.0 if is_greedy else self.temperature,
            top_p=1.0 if is_greedy else self.top_p,
            top_k=1 if is_greedy else max(0, self.top_k),
            max_new_tokens=max_new_tokens,
        )

    def choose_seed(self) -> int:
        """Return the call's seed, or a random seed for a call without one."""
        return secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**SEED_BITS


def _drop_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if each is not None}
