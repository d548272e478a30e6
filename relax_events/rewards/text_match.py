"""Rewards that compare a completion with the reference answer as text or as a number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FINAL_ANSWER_MARK = "####"


def exact_match(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 for the reference answer, surrounding white space aside, else 0."""
    return float(completion.strip() == answer.strip())


def gsm8k(completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float:
    """Give 1 for the right final number, else 0.

    The final number stands after `####`, and where there is none it is the last number of the text; `1,000.0` equals `1000`.
    """
    wanted, given = final_number(answer), final_number(completion)
    return float(wanted is not None and wanted == given)


def final_number(text: str) -> Decimal | None:
    """Find the first number after the last `####`, or else the last number."""
    _, mark, tail = text.rpartition(FINAL_ANSWER_MARK)
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))
