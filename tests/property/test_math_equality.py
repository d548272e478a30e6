"""Equal numbers are equal in any notation."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from relax_events.packages.verifiers.answer_extraction import last_box
from relax_events.packages.verifiers.math_equality import are_equal

NUMBERS = st.fractions(max_denominator=40).filter(lambda number: abs(number) < 10**7)
FORMS = st.sampled_from(
    ["{0}/{1}", r"\frac{{{0}}}{{{1}}}", r"\dfrac {{{0}}} {{{1}}}", r"${0} / {1}$"]
)
SCALES = st.integers(1, 50)


def written(number: Fraction, form: str, scale: int) -> str:
    """Write a number, not in lowest terms."""
    sign, number = ("-" if number < 0 else ""), abs(number)
    text = form.format(number.numerator * scale, number.denominator * scale)
    return text.replace("$", f"${sign}", 1) if "$" in text else sign + text


@given(NUMBERS, NUMBERS, FORMS, FORMS, SCALES, SCALES)
def test_fractions_are_compared_by_value(
    one: Fraction, other: Fraction, form: str, other_form: str, scale: int, other_scale: int
) -> None:
    assert are_equal(written(one, form, scale), written(one, other_form, other_scale))
    assert are_equal(written(one, form, scale), written(other, other_form, other_scale)) == (
        one == other
    )


@given(st.integers(-(10**9), 10**9))
def test_integers_are_compared_without_their_commas(number: int) -> None:
    assert are_equal(f"{number:,}", str(number))
    assert are_equal(f"{number}.0", f"${number:,}$")
    assert not are_equal(f"{number:,}", str(number + 1))


@given(
    st.recursive(
        st.text("ab \\", max_size=4), lambda inner: st.builds("{{{}}}".format, inner), max_leaves=6
    ),
    st.text("ab{ ", max_size=5),
)
def test_last_box_returns_the_boxed_content(content: str, before: str) -> None:
    balanced = content.replace("\\", "")
    assert last_box(rf"{before} \boxed{{{balanced}}} so") == (balanced.strip() or None)
