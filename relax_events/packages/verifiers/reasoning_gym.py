"""Rewards by the verifier that belongs to a generated problem.

Verifiers of reasoning-gym evaluate answers, by `eval` and by sympy's parser. They get them within
`guard_texts`, where an answer that is more than a literal or arithmetic counts as unreadable.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from relax_events.api.prompts import create_task, import_reasoning_gym
from relax_events.api.rewards import RewardError, reward
from relax_events.packages.verifiers.text_guard import guard_texts

MAX_COMPLETION_CHARACTERS = 1 << 20
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
        RewardError: The completion is too long.
    """
    if missing := METADATA.keys() - metadata.keys():
        raise ValueError(
            f"the sample's metadata lacks {', '.join(sorted(missing))}; this reward needs "
            "data.source = 'reasoning_gym:<task>'"
        )
    kinds = {"task": str, "options": dict, "entry": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(metadata[key], kind)]:
        raise ValueError(
            f"the sample's metadata has {type(metadata[wrong[0]]).__name__} as {wrong[0]}, and a "
            f"'reasoning_gym:' source writes {kinds[wrong[0]].__name__}; set data.source to one"
        )
    if len(completion) > MAX_COMPLETION_CHARACTERS:
        raise RewardError(
            f"the completion has {len(completion)} characters, and reasoning_gym reads at most "
            f"{MAX_COMPLETION_CHARACTERS}; lower engine.sampling.max_new_tokens"
        )
    task = _task(metadata["task"], orjson.dumps(metadata["options"], option=orjson.OPT_SORT_KEYS))
    with guard_texts():
        return float(task.score_answer(completion.strip(), metadata["entry"]))


@lru_cache(maxsize=16)
def _task(name: str, options: bytes) -> Any:
    return create_task(name, options=orjson.loads(options))
