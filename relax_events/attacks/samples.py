"""Samples that each reward scores right or wrong, with places for a hostile text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from relax_events.config import DataConfig
from relax_events.data.sources import open_source

PAYLOAD = "PAYLOAD"
"""Stands for a hostile text in a row."""
FORMED = "<think>a</think><answer>{}</answer>"
Sample = dict[str, Any]
IGNORE_TEXTS = frozenset({"environment"})
"""Rewards that give the environment's rewards for any completion."""
TASKS = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting"),
    *("countdown", "puzzle24", "simple_integration", "polynomial_multiplication"),
    *("intermediate_integration", "bitwise_arithmetic", "spell_backward"),
)
"""Tasks of reasoning-gym: their verifiers evaluate a text, but for one that compares."""


def make_sample(completion: str, answer: str = "87", metadata: Any = None, **more: Any) -> Sample:
    """Return a sample as a reward gets it."""
    return {"completion": completion, "answer": answer, "metadata": metadata or {}, **more}


def _followed(instruction: str, **arguments: Any) -> dict[str, Any]:
    return {"instruction_id_list": [instruction], "kwargs": [arguments]}


def _answers(form: str, right: str = "87", wrong: str = "86") -> tuple[Sample, Sample]:
    return make_sample(form.format(right), right), make_sample(form.format(wrong), right)


_ZEBRA = _followed("keywords:existence", keywords=["zebra"])
_INSTRUCTED = make_sample("a zebra", metadata=_ZEBRA), make_sample("a", metadata=_ZEBRA)
HONEST: Mapping[str, tuple[Sample, Sample]] = {
    "exact_match": _answers("{}"),
    "squad_exact_match": _answers("<answer>{}</answer>"),
    "f1": _answers("<answer>{}</answer>"),
    "gsm8k": _answers("#### {}"),
    "math": _answers(r"\boxed{{{}}}"),
    "deepscaler": _answers(r"</think>\boxed{{{}}}"),
    "dapo_math": _answers("Answer: {}"),
    "geo3k": _answers(r"<think>a</think> \boxed{{{}}}"),
    "openr1_multimodal": _answers(FORMED),
    "gpqa": _answers("Answer: {}", "B", "A"),
    "multiple_choice": _answers("<answer>{}</answer>", "B", "A"),
    "ifeval": _INSTRUCTED,
    "ifbench": _INSTRUCTED,
    "environment": (
        make_sample("a", environment_rewards=[1.0]),
        make_sample("a", environment_rewards=[0.0]),
    ),
    "nim": (
        make_sample("1", metadata={"options": {"stones": 1}}),
        make_sample("1", metadata={"options": {"stones": 2}}),
    ),
    "deepeyes": _answers("<answer>{}</answer>"),
}
"""For each reward a right and a wrong sample; samples of `reasoning_gym` are generated."""
_INSTRUCTIONS = [
    _followed(PAYLOAD),
    _followed("keywords:existence", keywords=[PAYLOAD]),
    _followed("keywords:frequency", keyword=PAYLOAD, frequency=1, relation="at least"),
    _followed("startend:end_checker", end_phrase=PAYLOAD),
    _followed("language:response_language", language=PAYLOAD),
]
ROWS: Mapping[str, list[Any]] = {
    "gpqa": [{"correct_letter": PAYLOAD}, {"choices": [PAYLOAD, "b"]}],
    "ifeval": _INSTRUCTIONS,
    "ifbench": _INSTRUCTIONS,
    "nim": [{"options": {"stones": PAYLOAD}}],
}
"""For some rewards metadata that `PAYLOAD` marks for a hostile text."""


def generate_samples(task: str) -> tuple[Sample, Sample, list[Any]]:
    """Return a right and a wrong sample of a reasoning-gym task, and metadata with `PAYLOAD`."""
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", num_problems=1), seed=3).row(0)
    metadata = orjson.loads(row.metadata)
    entry = metadata["entry"]
    rows = [
        {**metadata, "entry": {**entry, "answer": PAYLOAD}},
        {**metadata, "entry": _replace_texts(entry)},
    ]
    right = make_sample(entry["answer"], "", metadata)
    return right, make_sample("wrong", "", metadata), rows


def _replace_texts(value: Any) -> Any:
    return _map_texts(value, lambda _: PAYLOAD)


def fill(value: Any, payload: str) -> Any:
    """Replace `PAYLOAD` in metadata by a hostile text."""
    return _map_texts(value, lambda text: payload if text == PAYLOAD else text)


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(part, change) for part in value]
    if isinstance(value, dict):
        return {key: _map_texts(part, change) for key, part in value.items()}
    return value


def fits_a_record(text: str) -> bool:
    """Return whether a text can be in a record; one with a lone surrogate can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
