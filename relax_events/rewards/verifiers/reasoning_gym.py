"""Rewards by the verifier that belongs to a generated problem."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from relax_events.data.sources import create_task, import_reasoning_gym
from relax_events.rewards.registry import reward

METADATA = {
    "task": "name of the reasoning-gym task",
    "options": "its options",
    "entry": "what its generator made",
}


@reward(
    source="github.com/open-thought/reasoning-gym",
    metadata=METADATA,
    packages=("reasoning-gym",),
    prepare=import_reasoning_gym,
)
def reasoning_gym(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Score a completion by the `score_answer` of the reasoning-gym task that made the problem;
    many tasks give partial credit.

    Raises:
        ValueError: The sample's metadata does not come from a `reasoning_gym:` source.
    """
    if missing := METADATA.keys() - metadata.keys():
        raise ValueError(
            f"the sample's metadata lacks {', '.join(sorted(missing))}; this reward needs "
            "data.source = 'reasoning_gym:<task>'"
        )
    task = _task(metadata["task"], orjson.dumps(metadata["options"], option=orjson.OPT_SORT_KEYS))
    return float(task.score_answer(completion.strip(), metadata["entry"]))


@lru_cache(maxsize=16)
def _task(name: str, options: bytes) -> Any:
    return create_task(name, options=orjson.loads(options))
