"""The header of an environment's reply fits a frame of the pipe to the worker."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from relax_events.environments.interfaces.server_bounds import (
    MAX_DEPTH,
    check_depth,
    read_object,
)
from relax_events.environments.reply import Reply
from relax_events.environments.reply_encoding import encode_replies, encode_reply
from relax_events.errors import EpisodeFailed, PoisonSample

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("a" * 97, "a text of 108 bytes as JSON; it must be at most 100 bytes"),
        ("a" * 1000, "a text of 1000 bytes"),
        ("\0" * 30, "a text of 191 bytes as JSON"),
        ("\ud800", "a text that is not Unicode"),
        (Reply("a", role="r" * 65), "a role of 65 characters"),
        (Reply("a", {"image": [b"x"] * 65}), "65 media files; at most 64"),
        (Reply("a", {"image": [b"x" * 11]}), "image of 11 bytes"),
        (Reply("a", {"image": ["x" * 31]}), "image as a text of 31 characters"),
        (Reply("a", {"image": [5]}), "int as image"),
    ],
)
def test_reply_beyond_a_bound_is_an_error(reply: Any, expected: str) -> None:
    header, contents = encode_reply(reply, 10, 100)
    assert expected in header["error"]
    assert contents == ()


def test_reply_within_the_bounds_is_encoded() -> None:
    header, contents = encode_reply(Reply("a" * 80, {"image": [b"x" * 10, "data:,"]}), 10, 100)
    assert header["reply"]["kinds"] == [("image", True), ("image", False)]
    assert list(contents) == [b"x" * 10, b"data:,"]


def test_replies_to_one_turn_are_bounded_together() -> None:
    header, _ = encode_replies(["a" * 50], max_item_bytes=10, max_reply_bytes=200)
    assert len(orjson.dumps(header)) < 300
    with pytest.raises(PoisonSample, match=r"as JSON; it must be at most 200 bytes"):
        encode_replies(["a" * 50] * 4, max_item_bytes=10, max_reply_bytes=200)
    with pytest.raises(PoisonSample, match="66 media files"):
        encode_replies(
            [Reply("", {"image": [b"x"] * 33})] * 2, max_item_bytes=10, max_reply_bytes=200
        )
    with pytest.raises(PoisonSample, match="returned int"):
        encode_replies([5], max_item_bytes=10, max_reply_bytes=200)


def test_message_of_a_server_is_an_object_of_bounded_depth() -> None:
    assert read_object('{"a": [1]}', source="s") == {"a": [1]}
    for text in ("", "[", "[]", "5", "null", '{"a": NaN}', "[" * 2000):
        with pytest.raises(EpisodeFailed, match="s sent"):
            read_object(text, source="s")
    nested: Any = 1
    for _ in range(MAX_DEPTH):
        nested = {"a": [nested, 2]}
    with pytest.raises(EpisodeFailed, match=f"more than {MAX_DEPTH} levels"):
        check_depth(nested, source="s")
