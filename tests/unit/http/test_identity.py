"""Who makes a request, by its head."""

from __future__ import annotations

import pytest

from relax_events.http.identity import BodyBound, Identity, RequestHead, identify_by_token

CALLER = Identity(name="token")


def head(path: str = "/", method: str = "GET", **headers: str) -> RequestHead:
    """Return a request's head."""
    return RequestHead(method, path, "", headers)


@pytest.mark.parametrize(
    ("authorization", "is_known"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),
        ("Bearer  secret", False),
        ("Bearer secret ", False),
        ("Bearer Secret", False),
        ("Bearer \xe4", False),
        ("Basic secret", False),
        ("secret", False),
        ("", False),
    ],
)
def test_token_is_that_of_the_header(authorization: str, is_known: bool) -> None:
    identify = identify_by_token("secret", CALLER)
    assert (identify(head(authorization=authorization)) is CALLER) == is_known


def test_bound_holds_the_longest_text_of_a_context_in_its_longest_form() -> None:
    text = "\x1f" * (100 * 3)
    bound = BodyBound.of_text(100, longest_token_bytes=3)
    assert len(('{"text": "' + "\\u001f" * len(text) + '"}').encode()) <= bound.num_bytes
    assert bound.num_bytes < 2 * 100 * 3 * 6 + 65_536
