"""How many values a JSON text has, without parsing it."""

from __future__ import annotations

import re

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
SEPARATORS = (b",", b"[", b"{")
"""Before each value but the first stands such a separator, or the colon of a member behind it."""


def has_more_values(text: bytes, max_values: int) -> bool:
    """Return whether a JSON text has more values than a bound; a member of an object is one.

    The time is linear in the text. Text that is not JSON is counted alike.

    Args:
        text: The text, which need not be valid.
        max_values: The bound.
    """
    if _count_separators(text, 0, len(text)) < max_values:
        return False  # commas in strings are counted here: the usual text is done
    num_values, end = 1, 0
    for string in STRING.finditer(text):
        num_values += _count_separators(text, end, string.start())
        if num_values > max_values:
            return True
        end = string.end()
    return num_values + _count_separators(text, end, len(text)) > max_values


def _count_separators(text: bytes, start: int, end: int) -> int:
    return sum(text.count(one, start, end) for one in SEPARATORS)
