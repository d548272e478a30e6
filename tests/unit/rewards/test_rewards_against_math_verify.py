"""The reward `math` compared with bare math-verify: every boxed answer against every reference, all
found in the same way.
"""

from __future__ import annotations

import itertools
import logging

import pytest

from relax_events.packages.verifiers.math_answers import math

math_verify = pytest.importorskip("math_verify")
TEXTS = [
    *(r"\frac{1}{2}", "0.5", "1/2", r"50\%", "1/3", "0.333"),
    *("1,000", "1000", r"10^3", r"\sqrt{4}", "2", "- 3", "-3"),
    *("x+1", "1+x", "(x+1)^2", "x^2+2x+1", "x=2", "x<2", "2>x"),
    *("(1,2)", "(2,1)", r"\{1,2\}", r"\{2,1\}", "[0,1)", "(0,1)"),
    *(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", r"\text{yes}", r"5\text{ cm}", "5", r"\infty"),
]


def test_boxed_answers_are_compared_as_by_math_verify(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)  # it warns of each call without a timeout
    parsed = {text: math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in TEXTS}
    pairs = list(itertools.product(TEXTS, TEXTS))
    theirs = {
        pair: float(math_verify.verify(parsed[pair[0]], parsed[pair[1]], timeout_seconds=None))
        for pair in pairs
    }
    ours = {
        (wanted, given): math(rf"\boxed{{{given}}}", answer=wanted, metadata={}, prompt="")
        for wanted, given in pairs
    }
    assert len(TEXTS) < sum(theirs.values()) < len(pairs) / 4
    assert ours == theirs
