"""Values of JSON texts, counted without parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.http.guard import has_more_values

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=50
)


def count(value: Any) -> int:
    """Return how many places for a value a JSON text has: an empty container has one too."""
    if isinstance(value, list):
        return 1 + max(1, sum(map(count, value)))
    if isinstance(value, dict):
        return 1 + max(1, sum(map(count, value.values())))
    return 1


@given(VALUES, st.booleans())
def test_bound_is_that_of_the_values(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert not has_more_values(text, count(value))
    assert has_more_values(text, count(value) - 1)


@pytest.mark.parametrize("text", [b'"' * 99, b'"\\', b'["a', b"\\", b'{"a\\": [,', b""])
def test_text_that_is_no_json_is_counted_nevertheless(text: bytes) -> None:
    assert not has_more_values(text, 10)


def test_separators_in_strings_are_no_values() -> None:
    assert not has_more_values(json.dumps({"a": ",[{" * 1000}).encode(), 2)
    assert has_more_values(b'{"a": ' + b"[]," * 1000, 1000)
