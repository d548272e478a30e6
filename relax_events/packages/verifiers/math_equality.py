"""Compare two mathematical answers: as text, as numbers, or by a computer algebra system."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from relax_events.api.rewards import EnvironmentProblem, RewardError
from relax_events.packages.verifiers.answer_extraction import MAX_ANSWER_CHARACTERS
from relax_events.packages.verifiers.math_numbers import (
    TEXT,
    are_equal_numbers,
    holds_no_number,
    read_based,
    read_number,
    split_unit,
    to_algebra,
    unify_characters,
    write_latex,
)
from relax_events.packages.verifiers.math_plain_syntax import plain_expression

MAX_DEPTH = 30
MAX_BITS = 10_000_000
MAX_EXPONENT = 1000
"""Of a power of a sum with symbols, which sympy writes out to compare it."""
NUM_DIGITS = 100
"""To which values without decimals are worked out, where they aren't rational."""
NO_SPACE = re.compile(r"\\!\s*")
LISTED = re.compile(r",\s")
BLANK = re.compile(r"(?:(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|[\s~])+")
NOISE = re.compile(
    r"\\(?:left|right|displaystyle|bigg?[lr]?|Bigg?[lr]?|bf|rm)(?![a-zA-Z])"
    r"|\\[!$]|(?<!\\)\\[()\[\]]|[$]"
)
LEADING = re.compile(
    rf"(?:=|\\approx(?![a-zA-Z])|{TEXT}\{{ ?(?:approximately|about"
    r"|(?:the )?(?:final |correct )?answer(?: is)? ?:?) ?\}) ?",
    re.IGNORECASE,
)
REPEATING = re.compile(r"(?<=[\d.])\\bar(?![a-zA-Z])|(?<=\d\.)(?=\(\d+\)$)")
COLOR = re.compile(r"\\(?:textcolor|color)\s*\{\w*\}")
DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])")
FRACTION = re.compile(r"\\[dtc]?frac(?![a-zA-Z])")
SHORT_FRACTION = re.compile(r"\\frac ?(?:\{ ?([^{} ]*) ?\}|(\d)) ?(?:\{ ?([^{} ]*) ?\}|(\d))")
GROUPED_BY_BLANKS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d/])(?! ?/)")
NUMBER_IN_TEXT = re.compile(rf"{TEXT}\s?\{{([^{{}}]*(?<![\w^])\d[^{{}}]*)\}}")
WRAPPED = re.compile(rf"{TEXT}\s?\{{([^{{}}]*)\}}")
UPRIGHT_LETTER = re.compile(r"\\mathrm\{([a-zA-Z])\}")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
DECIMAL_COMMA = re.compile(r"([-+]?(?:\d+(?=,(?:\d\d?|\d{4,})$)|0)),(\d+)")
GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
NEEDLESS_BLANK = re.compile(r"(?<!\d) | (?!\d)")
WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
LONG_WORD = re.compile(r"\\text|[^\W\d_]{4}|[^\W\d_]\s+[^\W\d_]")
"""A shorter word can be a product of symbols."""
QUALIFIER = re.compile(
    rf"[,;]? ?(?:{TEXT}\{{[,; ]*(?:for|where|with|such that|given that|provided|assuming)\b"
    r"[^{}]*\}|(?<![\w\\])(?:for|where|with|such that|given that|provided|assuming)(?![\w}])"
    r"|\\forall)"
    r"|[,;] ?(?=[a-zA-Z] ?\\in(?![a-zA-Z]))"
)
CHOICE_LABEL = re.compile(rf"{TEXT}\{{ ?\([A-H]\) ?\}} ?(?=\S)")
NO_QUALIFIER = re.compile(
    r"\b(?:or|but|(?<!equality )(?:if|when)|otherwise|else|not|for|where|with)\b|;|\\\\"
)


def are_equal(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference; both in LaTeX, program syntax, or words.

    The whole texts are compared first, then as numbers, then by math-verify, with its rules of
    sets, intervals, matrices and equations. If one of them alone has a qualifier behind its value,
    such as "for all real x", or the label of a choice before it, the value is compared.

    Raises:
        RewardError: The answer is too long, too deeply nested, or has too large a number to
            compare.
    """
    mine, other = normalize(answer), normalize(reference)
    if not mine or not other:
        return False
    if mine == other:
        return True
    check_comparable(mine)
    values = drop_qualifier(tidy(answer)), drop_qualifier(tidy(reference))
    if (values[0] is None) != (values[1] is None):
        return are_equal(values[0] or answer, values[1] or reference)
    if (same := _are_equal_tokens(tidy(answer), tidy(reference))) is not None:
        return same
    return _are_equal_expressions(answer, reference)


def _are_equal_tokens(mine: str, other: str) -> bool | None:
    """Compare two numbers or two answers in words; None if the texts are something else."""
    if (DECIMAL_COMMA.fullmatch(mine) is None) != (DECIMAL_COMMA.fullmatch(other) is None):
        mine, other = DECIMAL_COMMA.sub(r"\1.\2", mine), DECIMAL_COMMA.sub(r"\1.\2", other)
    numbers = read_number(mine), read_number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return are_equal_numbers(numbers[0], numbers[1])
    based = read_based(mine), read_based(other)
    if based[0] is not None and based[1] is not None:
        return based[0] == based[1]
    words = WRAPPED.sub(r"\1", mine).strip(" ."), WRAPPED.sub(r"\1", other).strip(" .")
    if any(map(WORDS.fullmatch, words)):
        if words[0].casefold() == words[1].casefold():
            return True
        if LONG_WORD.search(mine if WORDS.fullmatch(words[0]) else other):
            return False
    if any(holds_no_number(to_algebra(text)) for text in (mine, other)):
        return False
    return None


def drop_qualifier(text: str) -> str | None:
    """Return the value before the only qualifier of a tidy text, or behind the label of a choice;
    None if there is no such value.
    """
    if label := CHOICE_LABEL.match(text):
        return text[label.end() :]
    match = QUALIFIER.search(text)
    if match is None or not (value := text[: match.start()].strip()):
        return None
    condition = (match[0].partition("{")[2] or match[0]).lstrip(",; ")
    rest = WRAPPED.sub(r" \1 ", condition.partition(" ")[2] + text[match.end() :])
    return None if NO_QUALIFIER.search(rest) else value


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""Write an answer in one way, without a change of its meaning: one kind of blanks, minus signs
    and fractions, no `$`, `\left`, colors, degrees, full stop or separators of thousands.
    """
    text = NO_SPACE.sub("", unify_characters(text[: MAX_ANSWER_CHARACTERS + 1]))
    text = write_latex(text)
    text = DEGREES.sub(
        "", COLOR.sub("", NOISE.sub("", text.replace("{,}", ",").replace("{:}", ":")))
    )
    text = NUMBER_IN_TEXT.sub(r" \1 ", FRACTION.sub(r"\\frac", text))
    text = SHORT_FRACTION.sub(_write_fraction, BLANK.sub(" ", text))
    text = GROUPED_BY_BLANKS.sub(lambda match: match[0].replace(" ", ""), text.strip())
    text = REPEATING.sub(
        r"\\overline", text[match.end() :] if (match := LEADING.match(text)) else text
    )
    text = text.removesuffix(".").strip().removeprefix("+")
    return text[1:-1].strip() if re.fullmatch(r"\{[^{}]*\}", text) else text


def _write_fraction(match: re.Match[str]) -> str:
    return rf"\frac{{{match[1] or match[2] or ''}}}{{{match[3] or match[4] or ''}}}"


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    """Tidy an answer, and remove blanks except between digits and what is left of text commands."""
    is_list = LISTED.search(text) is not None
    text = NEEDLESS_BLANK.sub("", WRAPPED.sub(r"\1", tidy(text))).rstrip(".")
    if not is_list and GROUPED.fullmatch(text):
        text = THOUSANDS.sub("", text)
    return text.removeprefix("+")


def import_math_verify() -> Any:
    """Import math-verify, which takes seconds.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise EnvironmentProblem(
            f"this reward needs the package math-verify ({error}); install relax-events[rewards]"
        ) from None
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # It warns that the caller must enforce the time limit, which the pool does by killing.
    return math_verify


def warm_up() -> None:
    """Import math-verify and build its grammar tables, so that the first samples are not slow."""
    import_math_verify()
    _are_equal_expressions(r"\frac{x^{2}+1}{\sqrt{2}}", r"\left(1, \pi\right]")


@lru_cache(maxsize=4096)  # the samples of a prompt group give the same few answers
def _are_equal_expressions(answer: str, reference: str) -> bool:
    answer_parts, reference_parts = parse_expressions(answer), parse_expressions(reference)
    if not (answer_parts and reference_parts):
        return False
    pair = answer_parts[0], reference_parts[0]
    if "%" not in answer + reference and all(map(_is_value, pair)):
        return _are_equal_values(*pair)
    return _verify(reference_parts, answer_parts) and not _differ_in_numbers(*pair)


def _verify(reference: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    package = import_math_verify()
    try:
        return bool(
            package.verify(
                list(reference),
                list(answer),
                allow_set_relation_comp=True,
                timeout_seconds=None,
                raise_on_error=True,
            )
        )
    except (MemoryError, RecursionError):
        raise
    # The boundary to math-verify and sympy, which raise if they cannot compare, such as `x < 2`
    # with `x \\neq 2`.
    except Exception:
        return not {part for part in reference if isinstance(part, str)}.isdisjoint(
            part for part in answer if isinstance(part, str)
        )


def _are_equal_values(answer: Any, reference: Any) -> bool:
    """Compare two values without symbols: exactly where neither has decimals, else relative to
    their size.
    """
    from sympy import Float, Integer, nan, zoo

    answer, reference = answer.doit(), reference.doit()
    if answer in (nan, zoo) or reference in (nan, zoo):
        return False
    if answer == reference or (answer.is_Rational and reference.is_Rational):
        return bool(answer == reference)
    if not (answer.is_finite and reference.is_finite):
        return False
    is_exact = not (answer.has(Float) or reference.has(Float))
    difference = (answer - reference).evalf(NUM_DIGITS, maxn=4 * NUM_DIGITS)
    size = max(abs(answer.evalf(NUM_DIGITS)), abs(reference.evalf(NUM_DIGITS)), Integer(0))
    return bool(abs(difference) <= size / Integer(10) ** (NUM_DIGITS // 2 if is_exact else 6))


def _is_value(expression: Any) -> bool:
    return bool(getattr(expression, "is_number", False)) and not expression.is_Boolean


def _differ_in_numbers(answer: Any, reference: Any) -> bool:
    """Return whether two expressions that math-verify calls equal have parts that aren't: it
    rounds small values to zero.
    """
    mine, others = list(_split_parts(answer)), list(_split_parts(reference))
    if len(mine) != len(others) or not mine:
        return False
    try:
        values = [sorted(map(_evaluate, parts)) for parts in (mine, others)]
        return any(
            abs(one - other) > max(abs(one), abs(other)) * 1e-5
            for one, other in zip(*values, strict=True)
        )
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False  # a part is no real number at that point


def _split_parts(expression: Any) -> Iterator[Any]:
    from sympy import FiniteSet, Interval, MatrixBase, Tuple

    if isinstance(expression, FiniteSet | Tuple | Interval):
        for part in expression.args[:2] if isinstance(expression, Interval) else expression.args:
            yield from _split_parts(part)
    elif isinstance(expression, MatrixBase):
        yield from expression
    else:
        yield expression


def _evaluate(expression: Any) -> Any:
    """Return the value of an expression at a point that is the same for all expressions.

    Raises:
        TypeError: It has no value there.
    """
    from sympy import Rational

    symbols = sorted(expression.free_symbols, key=str)
    point = {symbol: Rational(8 + index, 7) for index, symbol in enumerate(symbols)}
    value = expression.subs(point).evalf(30)
    if not value.is_Number or not value.is_finite:
        raise TypeError("the expression has no real value at the point; compare it otherwise")
    return value


@lru_cache(maxsize=1024)
def parse_expressions(text: str) -> tuple[Any, ...]:
    """Parse an answer: its expression and its text.

    Raises:
        RewardError: As in `are_equal`.
    """
    check_comparable(text)  # of a reference too: a row is as foreign as a completion
    if (plain := plain_expression(unify_characters(text).strip("$ \n"))) is not None:
        return check_size((plain, text))
    package = import_math_verify()
    config = package.LatexExtractionConfig(boxed_match_priority=0)
    normalization = replace(config.normalization_config, units=False)
    return check_size(
        package.parse(
            rf"\boxed{{{to_math_verify_latex(text)}}}",
            (replace(config, normalization_config=normalization),),
            parsing_timeout=None,
            raise_on_error=True,
        )
    )


def to_math_verify_latex(text: str) -> str:
    r"""Write an answer for math-verify: tidy, without its unit, and with commands that its grammar
    has.
    """
    value = to_algebra(split_unit(tidy(text))[0])
    value = value.replace(r"\bmod", r"\mod").replace(r"\varnothing", r"\emptyset")
    return UPRIGHT_LETTER.sub(r"\1", value)


def check_size(expressions: Iterable[Any]) -> tuple[Any, ...]:
    """Check the size of the numbers in expressions, and return the expressions.

    Raises:
        RewardError: A number is too large to be evaluated.
    """
    kept = tuple(expressions)
    for expression in kept:
        _num_bits(expression)
    return kept


def check_comparable(text: str) -> None:
    """Raise a RewardError for an answer that is too long or nested too deeply to be compared."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise RewardError(f"the answer is longer than {MAX_ANSWER_CHARACTERS} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        # math-verify takes the error of its exhausted parser for an answer without mathematics.
        raise RewardError(f"the answer nests {deepest} brackets, at most {MAX_DEPTH} are compared")


def _num_bits(expression: Any) -> float:
    """Estimate the bits of the numbers in an expression without evaluating it.

    Raises:
        RewardError: More bits than any answer has. Python would evaluate a power of powers for
            hours without interruption.
    """
    parts: tuple[Any, ...] = getattr(expression, "args", ())
    below = [_num_bits(part) for part in parts]
    name = type(expression).__name__
    if name == "Pow" and type(parts[0]).__name__ == "Add" and parts[0].free_symbols:
        _check_exponent(parts[1])
    if getattr(expression, "is_Integer", False):
        bits = float(int(expression).bit_length())
    elif name == "Pow" and parts and not parts[1].free_symbols and not parts[0].free_symbols:
        bits = max(below[0], 1.0) * (2.0 ** min(below[1], 64.0) if below[1] else 1.0)
    elif name in ("factorial", "factorial2") and not expression.free_symbols:
        bits = 2.0 ** min(below[0], 64.0)
    else:
        bits = max(below, default=0.0)
    if bits > MAX_BITS:
        raise RewardError(f"the answer holds a number of more than {MAX_BITS} bits")
    return bits


def _check_exponent(exponent: Any) -> None:
    """Raise a RewardError for a power of a sum with more terms than any answer has."""
    if getattr(exponent, "is_Integer", False) and abs(int(exponent)) > MAX_EXPONENT:
        raise RewardError(
            f"the answer holds the power {exponent} of a sum, at most {MAX_EXPONENT} is compared"
        )
