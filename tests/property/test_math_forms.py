"""A reference answer is right in every form that it can be written in, no part of an expression is
its value, and a contradiction behind an answer never raises a reward.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.packages.verifiers.math_answers import math
from relax_events.packages.verifiers.text_answers import gsm8k

pytestmark = pytest.mark.property
FRAME_TEXTS = [
    r"\boxed{%s}",
    r"So $\boxed{%s}$.",
    r"\[\boxed{%s}\]",
    r"\fbox{%s}",
    r"\boxed{%s.}",
    r"\boxed{ %s }",
    r"\boxed{$%s$}",
    r"\boxed{\displaystyle %s}",
    "The answer is $%s$.",
    "The final answer is: $%s$",
    "**Answer:** $%s$",
    "The answer is\n$$%s$$",
    "The answer is\n\\[\n%s\n\\]",
    r"Answer: \(%s\)",
    "The answer is $%s$, which was to be shown.",
    "So we get $%s$.",
    "\u7b54\u6848\u662f $%s$\u3002",
    "Final Answer: The final answer is $%s$. I hope it is correct.",
]
FRAMES = st.sampled_from(FRAME_TEXTS)
UNITS = st.sampled_from(
    [
        "",
        r"\text{ cm}",
        r"\text{ apples}",
        r"\ \mathrm{km}",
        r"\,\text{m}^2",
        r"\text{ square units}",
    ]
)
SYMBOLS = st.sampled_from("xyzn")
SMALL = st.integers(1, 99)
SIGNS = st.sampled_from(["-", "\u2212", "\uff0d"])
FEW, MANY = (
    settings(max_examples=60, derandomize=True),
    settings(max_examples=200, derandomize=True),
)


def score(completion: str, reference: str) -> float:
    return math(completion, answer=reference, metadata={}, prompt="")


def frame(text: str, value: str) -> str:
    return text.replace("%s", value)


@st.composite
def write_integers(draw: st.DrawFn) -> tuple[str, str]:
    number = draw(st.integers(-(10**12), 10**12))
    size, sign = abs(number), draw(SIGNS) if number < 0 else ""
    grouped = f"{size:,}"
    forms = [str(size), grouped, grouped.replace(",", "{,}"), grouped.replace(",", r",\!")]
    forms += [f"{size}.0", f"{size}.", f"{grouped}.00", grouped.replace(",", r"\,")]
    return str(number), sign + draw(st.sampled_from(forms)) + draw(UNITS)


@st.composite
def write_fractions(draw: st.DrawFn) -> tuple[str, str]:
    below = draw(st.integers(2, 60))
    above = draw(st.integers(1, 600).filter(lambda number: number % below))
    sign = draw(st.sampled_from(["", "-"]))
    command = draw(st.sampled_from([r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"]))
    whole, rest = divmod(above, below)
    scale = draw(st.integers(1, 5))
    forms = [f"{command}{{{above * scale}}}{{{below * scale}}}", f"{above}/{below}"]
    forms.append(f"{above} / {below}")
    if whole:
        forms += [f"{whole} {rest}/{below}", f"{whole}{command}{{{rest}}}{{{below}}}"]
        forms += [rf"{whole}\ {command}{{{rest}}}{{{below}}}"]
    elif rest < 10 and below < 10:
        forms.append(f"{command}{rest}{below}")
    value = Fraction(above, below)
    decimal = f"{float(value):.10f}".rstrip("0")
    if Fraction(decimal) == value:
        forms.append(decimal)
    return sign + forms[0], sign + draw(st.sampled_from(forms)) + draw(UNITS)


@st.composite
def write_expressions(draw: st.DrawFn) -> tuple[str, str]:
    symbol, first, second = draw(SYMBOLS), draw(SMALL), draw(st.integers(2, 9))
    return draw(
        st.sampled_from(
            [
                (f"{first}{symbol}+{second}", f"{second}+{first}{symbol}"),
                (f"({symbol}+{first})^2", f"{symbol}^2+{2 * first}{symbol}+{first**2}"),
                (rf"\frac{{{symbol}}}{{{second}}}", rf"\dfrac{{1}}{{{second}}}{symbol}"),
                (rf"{first}\sqrt{{{second}}}", rf"\sqrt{{{first**2 * second}}}"),
                (rf"{first}\pi", rf"\pi\cdot{first}"),
                (f"{symbol}^{{-{second}}}", rf"\frac{{1}}{{{symbol}^{{{second}}}}}"),
                (f"{first}", f"{symbol}={first}"),
                (f"{symbol}={first}", f"{first}"),
                (f"{symbol}={first}", f"{symbol} = {first}"),
                (f"{first}{symbol}", rf"{first}{symbol}\text{{ for all real }} {symbol}"),
                (
                    f"{first}{symbol}",
                    rf"{first}{symbol}, \text{{ where }} {symbol} \in \mathbb{{R}}",
                ),
                (f"2^{{-{first}}}", rf"\frac{{1}}{{2^{{{first}}}}}"),
            ]
        )
    )


@st.composite
def write_collections(draw: st.DrawFn) -> tuple[str, str]:
    parts = draw(st.lists(st.integers(-50, 50), min_size=2, max_size=4, unique=True))
    order = draw(st.permutations(parts))
    text, other = ", ".join(map(str, parts)), ", ".join(map(str, order))
    low, high = sorted(parts)[:2]
    closing = draw(st.sampled_from([")", "]"]))
    return draw(
        st.sampled_from(
            [
                (rf"\{{{text}\}}", rf"\{{{other}\}}"),
                (rf"\{{{text}\}}", rf"\left\{{{other}\right\}}"),
                (text, other),
                (rf"{parts[0]} \text{{ and }} {parts[1]}", rf"{parts[1]}, {parts[0]}"),
                (f"({low}, {high}{closing}", rf"\left({low},{high}\right{closing}"),
                (f"[{low}, {high}{closing}", rf"x \in [{low}, {high}{closing}"),
                (f"({text})", rf"\left( {text} \right)"),
            ]
        )
    )


WRITTEN = st.one_of(write_integers(), write_fractions(), write_expressions(), write_collections())


@given(WRITTEN, FRAMES)
@MANY
def test_reference_is_right_in_every_form(written: tuple[str, str], text: str) -> None:
    reference, form = written
    assert score(frame(text, form), reference) == 1.0


@given(WRITTEN, FRAMES)
@FEW
def test_reference_is_right_against_itself(written: tuple[str, str], text: str) -> None:
    assert score(frame(text, written[1]), written[1]) == 1.0
    assert score(frame(text, written[0]), written[0]) == 1.0


PARTS = [
    "{a}+{b}x",
    r"{a}\sqrt{{{b}}}",
    r"\frac{{{a}}}{{{c}}}",
    "{a}, {d}",
    r"{a} \text{{ or }} {d}",
    "({a}, {d})",
    r"\{{{a}, {d}\}}",
    "[{a}, {d}]",
    "{a}x",
    "{a}^{c}",
    r"x^{{{a}}}",
    "x > {a}",
    r"x \neq {a}",
    "{a}:{c}",
    "{a}/{c}",
    "{a} {b}/{c}",
    r"{a}\frac{{{b}}}{{{c}}}",
    "{a}_9",
    r"\log_{{{a}}} {c}",
    "{a}i",
    r"{a}\pi",
    "-{a}",
    "{a}.{b}",
    "{a}e",
    r"{a} \pm {b}",
    "{a} {d}",
    r"\text{{not }} {a}",
    r"{a}\text{{ is wrong}}",
    "{a}bc",
    "{a}t",
]


@given(st.sampled_from(PARTS), st.integers(2, 8), FRAMES)
@MANY
def test_no_part_of_an_expression_is_its_value(form: str, part: int, text: str) -> None:
    expression = form.format(a=part, b=3, c=17, d=part + 1)
    assert score(frame(text, expression), str(part)) == 0.0


CONTRADICTIONS = [" or $%s$", ", $%s$", " and $%s$", " or maybe $%s$", ", not $%s$", " (or $%s$?)"]
CONTRADICTIONS += [" or possibly %s", " or %s", ", perhaps %s", r" or \boxed{%s}"]


@given(
    st.integers(2, 400),
    st.integers(2, 400),
    st.sampled_from([text for text in FRAME_TEXTS if "I hope" not in text]),
    st.sampled_from(CONTRADICTIONS),
)
@MANY
def test_contradiction_never_raises_a_reward(
    right: int, stated: int, text: str, contradiction: str
) -> None:
    completion = frame(text, str(stated)).rstrip(".\u3002\n")
    before = score(completion, str(right))
    assert score(completion + frame(contradiction, str(right)), str(right)) <= before


@given(st.integers(2, 400), st.sampled_from(["%s", "so %s", "The answer is %s"]))
@FEW
def test_denied_or_doubted_number_is_not_chosen(number: int, text: str) -> None:
    for words in ("not", "probably not", "either 1 or", "perhaps", "between 1 and"):
        assert score(frame(text, f"{words} {number}"), str(number)) == 0.0


@given(
    st.integers(0, 10**9),
    SIGNS,
    st.sampled_from(["", "\u6240\u4ee5\u662f", "= ", "it is ", "#### "]),
)
@FEW
def test_gsm8k_reads_every_minus_sign(number: int, sign: str, before: str) -> None:
    def grade(completion: str, answer: str) -> Any:
        return gsm8k(completion, answer=answer, metadata={}, prompt="")

    completion = f"{before}{sign}{number}"
    assert grade(completion, f"-{number}") == 1.0
    assert grade(completion, f"{number}") == float(number == 0)
    assert grade(f"\u4e00\u5171\u6709{number:,}\u4e2a", str(number)) == 1.0
    assert grade(f"1{sign}{number}", str(number)) == 1.0


@given(st.integers(4, 10), st.integers(4, 10), st.integers(1000, 3333))
@FEW
def test_numbers_are_equal_only_in_the_same_base(one: int, other: int, digits: int) -> None:
    text = str(digits % 1000 % 4 + 10 * (digits % 3) + 100)
    forms = [f"{text}_{{{one}}}", f"({text})_{{{one}}}", f"{text}_{{({one})}}"]
    for form in forms:
        assert score(rf"\boxed{{{form}}}", f"{text}_{{{other}}}") == float(one == other)
        assert score(rf"\boxed{{{form}}}", text) == float(one == 10)


@given(st.integers(2, 3000), st.integers(2, 3000), st.sampled_from(["e", r"\pi", "3"]))
@FEW
def test_small_exact_values_are_compared_exactly(one: int, other: int, base: str) -> None:
    for form in (r"%s^{-N}", r"\frac{1}{%s^{N}}", r"\frac{%s}{N!}", r"\frac{x}{%s^{N}}"):
        pair = [frame(form, base).replace("N", str(number)) for number in (one, other)]
        assert score(rf"\boxed{{{pair[0]}}}", pair[1]) == float(one == other)


@given(st.integers(1, 99), st.integers(1, 30), st.integers(1, 30))
@FEW
def test_mixed_number_is_a_whole_and_a_proper_fraction(whole: int, above: int, below: int) -> None:
    for form in (f"{whole} {above}/{below}", rf"{whole}\frac{{{above}}}{{{below}}}"):
        value = Fraction(whole) + Fraction(above, below)
        reference = f"{value.numerator}/{value.denominator}"
        assert score(rf"\boxed{{{form}}}", reference) == float(above < below)
        if Fraction(f"{whole}{above}/{below}") != value:
            assert score(rf"\boxed{{{form}}}", f"{whole}{above}/{below}") == 0.0
