"""Texts of models and unknown producers: printed, rendered, exported, rewarded."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import orjson

from relax_events.confinement.prints import BURST_BYTES, PrintBudget
from relax_events.errors import RewardError
from relax_events.packages.verifiers import text_answers
from relax_events.packages.verifiers.answer_extraction import last_box, references, short_answer
from relax_events.printable import printable
from tests.fuzz.inputs import mutated
from tests.fuzz.target import Target

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(data: bytes) -> None:
    """Show a text on a terminal and as JSON."""
    text = data.decode(errors="replace")
    assert not CONTROL.search(printable(text))
    orjson.dumps(text)


def budget(data: bytes) -> None:
    """Print within a budget: the output never exceeds it, however the text is split."""
    printed = PrintBudget(now=0.0)
    pieces = [data[at : at + 97] for at in range(0, len(data), 97)]
    assert sum(
        len(printed.limit(piece, now=1.0)) for piece in pieces
    ) <= BURST_BYTES + 2_000 + 80 * len(pieces)


REWARDS: list[Any] = [
    text_answers.exact_match,
    text_answers.gsm8k,
    text_answers.squad_exact_match,
    text_answers.f1,
    text_answers.gpqa,
    text_answers.multiple_choice,
]


def rewarded(data: bytes) -> None:
    """Reward a completion by every function that looks at its text alone."""
    completion, _, answer = data.decode(errors="replace").partition("\x01")
    for reward in REWARDS:
        with suppress(ValueError):  # an invalid answer of the row is rejected with a reason
            found = reward(
                completion, answer=answer or "4", metadata={"choices": ["a", "b"]}, prompt="?"
            )
            assert 0.0 <= found <= 1.0
    for read in (
        lambda: last_box(completion),
        lambda: short_answer(completion),
        lambda: references(answer),
    ):
        with suppress(ValueError, RewardError):  # an answer that is too long, or none
            read()


COMPLETIONS = [
    b"<think>a</think><answer>4</answer>\x014",
    rb"so \boxed{\frac{1}{2}} #### 1,000.0" + b'\x01["4", "four"]',
    "The answer is (B). ####-3.5e10 \u0663".encode(),
]
TEXTS = [b"plain <b>bold</b> & \x1b[2J", "\u202e\u2066\ud7ff<script>".encode(), b"a\r\n" * 30]

TARGETS = [
    Target("shown-text", mutated(TEXTS), shown),
    Target("printed-text", mutated([b"line\n" * 20, b"x" * 5000]), budget),
    Target("rewarded-text", mutated(COMPLETIONS), rewarded),
]
