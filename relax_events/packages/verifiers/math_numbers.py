"""Read a number as it is written: one token with its sign, whole part, fraction, base and unit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from unicodedata import normalize

MAX_INTEGER_DIGITS = 4000
"""Python's `int` refuses more than 4,300 digits by default."""
SYMBOLS = "\u00d7\u00f7\u00b7\u22c5\u2264\u2265\u2260\u03c0\u221e\u222a\u00b0\u2126\u03a9"
COMMANDS = (
    *(r"\times ", r"\div ", r"\cdot ", r"\cdot ", r"\le ", r"\ge ", r"\neq ", r"\pi ", r"\infty "),
    *(r"\cup ", r"^\circ ", r"\Omega ", r"\Omega "),
)
FRACTION_CODES = (*range(0x00BC, 0x00BF), *range(0x2150, 0x215F))
"""Of the characters from one quarter to seven eighths."""
CHARACTERS = {
    **{
        code: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", chr(code)).split("\u2044"))
        for code in FRACTION_CODES
    },
    **dict.fromkeys(map(ord, "\u2044\u2215"), "/"),
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(map(ord, "\u2212\ufe63\u207b"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " "),
    **dict(zip(map(ord, SYMBOLS), COMMANDS, strict=True)),
}
"""Characters that stand for one ASCII character or LaTeX command. U+FF0D is a minus sign of full
width.
"""
RAISED_DIGITS = re.compile("\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
LOWERED_DIGITS = re.compile("[\u2080-\u2089]+")
DASH_SIGN = re.compile(r"(?<![0-9A-Za-z)\]}%])[\u2010-\u2014](?=\s?[\d.$\\])")
"""Another dash is a minus sign only before a number and after none: `5\u20137` is a range."""
UNIT_TABLE = """
length 1/1000 mm millimeter millimetre
length 1/100 cm centimeter centimetre
length 1 m meter metre
length 1000 km kilometer kilometre
length 127/5000 in inch inche
length 381/1250 ft foot feet
length 1143/1250 yd yard
length 201168/125 mi mile
mass 1/1000 mg milligram
mass 1 g gram
mass 1000 kg kilogram
time 1 s sec second
time 60 min minute
time 3600 h hr hour
time 86400 day
money 1/100 cent
money 1 dollar
"""
UNIT_SIZES = {
    name: (kind, Fraction(size))
    for kind, size, *names in map(str.split, UNIT_TABLE.strip().splitlines())
    for name in names
}
"""Units that are converted. Any other word behind a number is a unit that equals all others."""
NO_UNITS = re.compile(
    "not?|nor|or|and|but|is|isn|are|aren|was|wasn|were|be|been|can|cannot|could|may|might|maybe"
    "|perhaps|possibly|probably|wrong|incorrect|right|correct|if|when|unless|otherwise|else|than"
    "|either|neither|between|to|plus|minus|times|divided|over|squared|cubed"
    "|negative|twice|half|least|most|less|more|fewer|percent|pi|sqrt|mod|factorial|so|for|where|with"
)
"""Words behind a number that are no unit: what they say changes the number or denies it."""
GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])"
PROSE_GROUPED = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?!\d)"
"""Thousands, and the groups of India: 1,00,000."""
WHOLE = rf"(?:{GROUPED}|\d+)"
DECIMAL = rf"(?:{WHOLE}(?:\.\d*)?|\.\d+)"
TEXT = r"\\(?:text(?:normal|rm|bf|it)?|mbox|math(?:rm|bf|it)|boldsymbol|underline)(?![a-zA-Z])"
LETTERS = r"[^\W\d_]"
SHORT_UNIT = (
    r"(?:mm|cm|km|mg|kg|ft|in|yd|mi|min|hrs?|sec|mph|lbs?|oz|sq|cu|deg|rad|day|pcs|men|of|per|the)"
)
RAISED = r"(?:\^\{?\d\}?)?"
TEXT_UNIT = rf"\ ?{TEXT}\ ?\{{(?:[^{{}}\d]|\^\d|\^\{{-?\d\}})*\}}{RAISED}"
UNIT = rf"""(?:
    {TEXT_UNIT}
    |\ (?:{LETTERS}{{4,}}|{SHORT_UNIT}|[mgshlL])(?![\w(=])\.?{RAISED}
    |(?<=\d){SHORT_UNIT}(?![\w(]){RAISED}
    |(?<=\d)(?:[\u3400-\u9fff]+|m(?=\^)){RAISED}
    |\ ?(?:[\u20ac\u00a3\u00a5\u20b9]|\\Omega(?![a-zA-Z(])\ ?)
    |\ ?/\ ?(?:{LETTERS}+|{TEXT_UNIT}){RAISED}
)"""
UNIT_TAIL = re.compile(rf"(?:{UNIT})+$", re.VERBOSE)
EXPRESSION_UNIT = re.compile(rf"(?:{TEXT_UNIT})+$")
OPEN_END = re.compile(r"(?:[-+*/=<>^_({\[,:&|]|\\(?:le|ge|leq|geq|neq|in|times|cdot|to))\s*$")
POWER = re.compile(r"\^\{?(\d)\}?")
WORDS = re.compile(rf"{LETTERS}+")
FRACTION = r"\\frac\{(?P<above>-?DEC)\}\{(?P<below>-?DEC)\}".replace("DEC", DECIMAL)
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\ ?(?:\\\$|[\u20ac\u00a3\u00a5\u20b9])?\ ?(?:
    (?:(?P<whole>{WHOLE})\ ?)?{FRACTION}
    |(?:(?P<plain_whole>{WHOLE})\ )?(?P<plain_above>{WHOLE})\ ?/\ ?(?P<plain_below>{WHOLE})
    |(?P<decimal>{DECIMAL})(?:\\overline[{{(](?P<repeated>\d+)[}})])?
     (?:[eE](?P<short_power>[-+]?\d{{1,3}})
       |\ ?(?:\\times|\\cdot|\*)\ ?10\ ?\^\ ?(?:\{{(?P<power>-?\d{{1,3}})\}}|(?P<digit>\d)))?
    )(?P<percent>\ ?\\?%)?\.?""",
    re.VERBOSE,
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
PERCENT = re.compile(rf"(?<=\d)\s*(?:{TEXT}\s?\{{\s*percent\s*\}}|percent(?![a-zA-Z]))")
ROOT = re.compile(r"\u221a\s?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|(?=\{))")
SCALED = re.compile(
    rf"(?<=\d)(?P<close>\$)?\s*(?P<open>{TEXT}\{{\s*)?"
    rf"(?P<scale>{'|'.join(SCALES)})(?![a-zA-Z])(?(open)(?P<rest>[^{{}}]*)\}})"
)
BASE_NAMES = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen"),
)
BASE_WORDS = dict(zip(BASE_NAMES, range(2, 17), strict=True))
BASED = re.compile(
    rf"(?<![\w.}}])(?:\(([0-9][0-9A-Fa-f]*)\)|([0-9][0-9A-F]*))\ ?_\ ?"
    rf"(?:\{{\ ?\(?(?:{TEXT}\{{\ ?)?(?:base\ )?\}}?\ ?(\d+|[a-z]{{3,}})\ ?\}}?\)?\ ?\}}"
    r"|([2-9]))(?!\w)"
)
MIXED = re.compile(
    rf"(?<![\w.^}}])({WHOLE})(?:\ ?\\frac\{{(\d+)\}}\{{(\d+)\}}|\ (\d+)\ ?/\ ?(\d+))(?![\d.])"
)
REPEATED = re.compile(r"(?<![\w.])(\d*\.\d*)\\overline\{(\d{1,30})\}")
NUMBER_IN_PROSE = re.compile(
    r"""(?<!\d)(?<!\d\.)(?<!\bm)(?<!\b[ck]m)(?<![\^_])(?<![\^_]\{)
    (?:(?:(?<=[=:(#])|^)\s*(?P<loose>[-+])\s*|(?<![0-9A-Za-z_)\]}%])(?P<close>[-+]))?
    (?:\\?\$|[\u20ac\u00a3\u00a5\u20b9])?\s?
    (?:(?P<whole>\d+)\ (?=\d+/\d))?
    (?P<above>G(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)
    (?:/(?P<below>\d+(?:\.\d+)?)(?![\d/])|[eE](?P<power>[-+]?\d{1,3})(?!\w))?""".replace(
        "G", PROSE_GROUPED
    ),
    re.VERBOSE,
)
PROSE_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
TWO_NUMBERS = re.compile(r"(?<![_^])\d \.?\d")


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a text writes.

    `places` are its decimal places, None for a number without a decimal point, which is exact.
    """

    value: Fraction
    places: int | None = None
    unit: str = ""
    is_percent: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is written as an integer."""
        return self.places is None and self.value.denominator == 1


def write_latex(text: str) -> str:
    r"""Write "5 million" as `5e6`, "5 percent" as `5\%`, and roots as `\sqrt`."""
    return SCALED.sub(_write_scale, PERCENT.sub(r"\\%", ROOT.sub(_write_root, text)))


def _write_root(match: re.Match[str]) -> str:
    content = match[1] or match[2]
    return r"\sqrt" if content is None else rf"\sqrt{{{content}}}"


def _write_scale(match: re.Match[str]) -> str:
    rest = rf"\text{{{match['rest']}}}" if (match["rest"] or "").strip() else ""
    return f"e{SCALES[match['scale']]}{rest}{match['close'] or ''}"


def unify_characters(text: str) -> str:
    """Replace characters of full width, minus signs and mathematical characters by the ASCII
    character or LaTeX command that they stand for.
    """
    if text.isascii():
        return text
    text = RAISED_DIGITS.sub(lambda match: f"^{{{_write_digits(match[0])}}}", text)
    text = LOWERED_DIGITS.sub(lambda match: f"_{{{_write_digits(match[0])}}}", text)
    return DASH_SIGN.sub("-", text.translate(CHARACTERS))


def _write_digits(text: str) -> str:
    return normalize("NFKC", text).replace("\u2212", "-")


@lru_cache(maxsize=4096)
def read_number(text: str) -> Number | None:
    """Read a text that is one number, with its unit; None for any other text.

    A whole number before a fraction is a mixed number if the fraction is proper; else the text is
    no number. The text must be tidy, as `math_equality.tidy` makes it.
    """
    body, unit = split_unit(text)
    if (match := NUMBER.fullmatch(body)) is None:
        return None
    parts = match.groupdict()
    value = _read_fraction(parts) if parts["decimal"] is None else _read_decimal(parts)
    if value is None:
        return None
    return Number(
        -value if parts["sign"] == "-" else value,
        _count_decimals(parts),
        unit,
        parts["percent"] is not None,
    )


def split_unit(text: str) -> tuple[str, str]:
    """Split a text into a value and its unit; the unit is empty if there is none."""
    match = UNIT_TAIL.search(text[-200:]) if any(map(str.isdigit, text[:40])) else None
    body = text[: len(text) - len(match[0])] if match else text
    if match is None or NUMBER.fullmatch(body) is None:
        match = EXPRESSION_UNIT.search(text[-200:])
        body = text[: len(text) - len(match[0])] if match else text
    if match is None or not body or OPEN_END.search(body) or not _is_unit(match[0]):
        return text, ""
    return body.rstrip(), match[0].strip()


def _is_unit(text: str) -> bool:
    words = [word.casefold() for word in WORDS.findall(re.sub(TEXT, "", text))]
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in UNIT_SIZES and words[0] != "l":
        return False
    return not any(map(NO_UNITS.fullmatch, words))


def _read_fraction(parts: dict[str, str | None]) -> Fraction | None:
    above, below = (
        _read_plain(parts[name] or parts[f"plain_{name}"]) for name in ("above", "below")
    )
    whole = parts["whole"] or parts["plain_whole"]
    if below == 0:
        return None
    if whole is None:
        return above / below
    return _read_plain(whole) + above / below if 0 <= above < below else None


def _read_decimal(parts: dict[str, str | None]) -> Fraction:
    decimal, repeated = parts["decimal"] or "", parts["repeated"]
    value = _read_plain(decimal)
    if repeated is not None:
        num_decimals = len(decimal.partition(".")[2])
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**num_decimals)
    return value * Fraction(10) ** _read_power(parts)


def _read_power(parts: dict[str, str | None]) -> int:
    return int(parts["short_power"] or parts["power"] or parts["digit"] or 0)


def _read_plain(text: str | None) -> Fraction:
    digits = (text or "").replace(",", "")
    return Fraction(Decimal(digits) if len(digits) > MAX_INTEGER_DIGITS else digits)


def _count_decimals(parts: dict[str, str | None]) -> int | None:
    _, point, digits = (parts["decimal"] or "").partition(".")
    return len(digits) - _read_power(parts) if point and parts["repeated"] is None else None


def are_equal_numbers(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal: exactly where both are exact, else within the
    tolerance of decimals; of two percentages or units that differ, as quantities.
    """
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        hundredth = Number(percent.value / 100, percent.places and percent.places + 2)
        return any(_agree(one, plain) for one in (Number(percent.value, percent.places), hundredth))
    unit, other_unit = _read_unit(one.unit), _read_unit(other.unit)
    if unit is None or other_unit is None or unit == other_unit:
        return _agree(one, other)
    return unit[0] == other_unit[0] and _agree(
        Number(one.value * unit[1], one.places), Number(other.value * other_unit[1], other.places)
    )


def _read_unit(unit: str) -> tuple[tuple[str, int], Fraction] | None:
    """Return what a unit measures, with its power, and its size; None for another word."""
    match = POWER.search(unit)
    power = int(match[1]) if match else 1
    words = [word.casefold() for word in WORDS.findall(re.sub(TEXT, "", unit))]
    if len(words) == 2 and words[0] in ("square", "sq", "cubic", "cu"):
        power, words = (3 if words[0].startswith("cu") else 2), words[1:]
    name = words[0] if len(words) == 1 else ""
    kind, size = UNIT_SIZES.get(name) or UNIT_SIZES.get(name.removesuffix("s")) or ("", Fraction(0))
    return ((kind, power), size**power) if kind else None


def _agree(one: Number, other: Number) -> bool:
    if one.value == other.value or (one.places is None and other.places is None):
        return one.value == other.value
    error, size = abs(one.value - other.value), max(abs(one.value), abs(other.value))
    if one.is_whole or other.is_whole:
        return error <= size / 10**6 and error < Fraction(1, 2 * 10**6)
    return error <= size / 10**6 or any(
        number.places is not None
        and number.places >= 6
        and error < Fraction(1, 10**number.places) <= size / 10**4
        for number in (one, other)
    )


def read_based(text: str) -> tuple[str, int] | None:
    """Read a text that is one number with its base below it: its digits and the base."""
    match = BASED.fullmatch(text.replace(",", ""))
    return _read_based(match) if match else None


def _read_based(match: re.Match[str]) -> tuple[str, int] | None:
    digits, base_text = (match[1] or match[2]).upper(), match[3] or match[4]
    base = int(base_text) if base_text.isdigit() else BASE_WORDS.get(base_text, 0)
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits):
        return None
    return digits.lstrip("0") or "0", base


def to_algebra(text: str) -> str:
    """Write the numbers of a tidy expression as an algebra system reads them: mixed numbers as
    sums, repeating decimals as fractions, and each number of another base as a symbol.
    """
    text = BASED.sub(_name_based, text)
    text = MIXED.sub(_add_mixed, text)
    return REPEATED.sub(_write_repeated, text)


def _name_based(match: re.Match[str]) -> str:
    number = _read_based(match)
    if number is None:
        return match[0]
    digits, base = number
    return digits if base == 10 else rf"N_{{{digits}b{base}}}"


def _add_mixed(match: re.Match[str]) -> str:
    whole, above, below, plain_above, plain_below = match.groups()
    above, below = above or plain_above, below or plain_below
    if int(above) >= int(below):
        return match[0]
    return rf"({whole}+\frac{{{above}}}{{{below}}})"


def _write_repeated(match: re.Match[str]) -> str:
    value = _read_decimal({"decimal": match[1], "repeated": match[2], **NO_POWER})
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


NO_POWER: dict[str, str | None] = dict.fromkeys(("short_power", "power", "digit"))


def holds_no_number(text: str) -> bool:
    """Return whether numbers stand side by side without an operator, so that the text, as
    `to_algebra` returns it, writes no number.
    """
    return TWO_NUMBERS.search(text) is not None or MIXED.search(text) is not None


def find_numbers(text: str) -> Iterator[tuple[Fraction, str, str]]:
    """Yield each number in prose, with up to 20 characters before it and 60 behind it."""
    text = PROSE_FRACTION.sub(r" \1/\2", unify_characters(text))
    for match in NUMBER_IN_PROSE.finditer(text):
        is_base = text.startswith("^", match.end())  # of a power
        if not is_base and (value := _read_prose_number(match)) is not None:
            before = text[max(0, match.start() - 20) : match.start()]
            yield value, before, text[match.end() : match.end() + 60]


def _read_prose_number(match: re.Match[str]) -> Fraction | None:
    above, below = _read_plain(match["above"]), _read_plain(match["below"] or "1")
    if below == 0:
        return None
    value = _read_plain(match["whole"] or "0") + above / below * Fraction(10) ** int(
        match["power"] or 0
    )
    return -value if "-" in (match["loose"], match["close"]) else value
