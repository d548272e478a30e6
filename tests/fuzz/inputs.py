"""Inputs: valid ones that are changed, by bytes or in the tree of a JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

MAX_BYTES = 50_000
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -0.0, 0.5)
TEXTS = (
    "",
    "a",
    "\x00",
    "\x1b]0;x\x07",
    "../..",
    "%2e%2e/",
    "/etc/passwd",
    "\u202e",
    "\ud83d",
    "x" * 5000,
    "1" * 5000,
    "null",
    "{}",
    "NaN",
    "-1",
    "0x10",
)
PIECES = (
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff\x0f",
    b"\x80" * 10 + b"\x01",
    b"[",
    b"{",
    b'"',
    b"\\",
    b"\n",
    b"\r\n",
    b"\n\n",
    b"data: ",
    b"9" * 30,
    b"-",
    b"e9",
)
SEEDS = st.integers(0, 2**48)


def mutated(seeds: Sequence[bytes], *, most: int = 8) -> st.SearchStrategy[bytes]:
    """Return seeds with up to so many changes to their bytes."""
    return st.builds(
        _mutated,
        st.sampled_from(list(seeds)),
        st.lists(SEEDS, max_size=most),
        st.just(tuple(seeds)),
    )


def _mutated(seed: bytes, changes: list[int], seeds: tuple[bytes, ...]) -> bytes:
    data = bytearray(seed)
    for number in changes:
        random = Random(number)
        random.choice(BYTE_CHANGES)(data, random, seeds)
        del data[MAX_BYTES:]
    return bytes(data)


def _span(data: bytearray, random: Random) -> slice:
    begin = random.randrange(len(data) + 1)
    return slice(begin, min(len(data), begin + random.choice((1, 2, 4, 8, 64, 1024))))


def _flip(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(
            (0, 1, 0x7F, 0x80, 0xFF, random.randrange(256))
        )


def _insert(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice((random.choice(PIECES), random.randbytes(random.randrange(1, 16))))


def _overwrite(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    span = _span(data, random)
    data[span] = (random.choice(PIECES) * 4)[: span.stop - span.start]


def _delete(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    del data[_span(data, random)]


def _repeat(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    span = _span(data, random)
    piece = bytes(data[span])
    data[span] = piece * min(random.choice((2, 16, 300, 20_000)), MAX_BYTES // max(1, len(piece)))


def _cut(data: bytearray, random: Random, _: tuple[bytes, ...]) -> None:
    del data[random.randrange(len(data) + 1) :]


def _splice(data: bytearray, random: Random, seeds: tuple[bytes, ...]) -> None:
    other = random.choice(seeds)
    data[_span(data, random)] = other[random.randrange(len(other) + 1) :]


BYTE_CHANGES: list[Callable[[bytearray, Random, tuple[bytes, ...]], None]] = [
    _flip,
    _set,
    _insert,
    _overwrite,
    _delete,
    _repeat,
    _cut,
    _splice,
]


def documents(
    seeds: Sequence[Any], *, odd: Sequence[Any] = (), most: int = 6
) -> st.SearchStrategy[Any]:
    """Return JSON trees with up to so many changed nodes; `odd` are values that are put into them
    besides numbers and texts."""
    texts = [json.dumps(seed) for seed in seeds]
    return st.builds(
        lambda text, changes: _changed(json.loads(text), changes, tuple(odd)),
        st.sampled_from(texts),
        st.lists(SEEDS, max_size=most),
    )


def as_json(tree: Any) -> bytes:
    """Encode a tree as an unknown client may send it, lone surrogates included."""
    return json.dumps(tree).encode()


def json_bytes(seeds: Sequence[Any], *, odd: Sequence[Any] = ()) -> st.SearchStrategy[bytes]:
    """Return JSON texts: trees that were changed, and texts of which bytes were."""
    return documents(seeds, odd=odd).map(as_json) | mutated([as_json(seed) for seed in seeds])


def _changed(tree: Any, changes: list[int], odd: tuple[Any, ...]) -> Any:
    holder = [tree]
    for number in changes:
        text = json.dumps(holder)
        if len(text) > MAX_BYTES // 2:
            break
        holder = json.loads(text)  # so that no part is shared
        random = Random(number)
        positions = list(_positions(holder))
        container, key = random.choice(positions)
        what = random.randrange(6)
        if what == 0 and container is not holder:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[random.choice((*TEXTS, *map(str, container)))] = container[key]
        elif what == 2:
            container[key] = [container[key]] * random.choice((0, 1, 2, 20))
        elif what == 3:
            for _ in range(random.choice((1, 3, 200))):
                container[key] = random.choice(([container[key]], {"a": container[key]}))
        else:
            container[key] = random.choice(
                (*NUMBERS, *TEXTS, None, True, False, [], {}, *odd, *odd)
            )
    return holder[0]


def _positions(node: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    keys = (
        list(node)
        if isinstance(node, dict)
        else list(range(len(node)))
        if isinstance(node, list)
        else []
    )
    found = [(node, key) for key in keys]
    return found + [
        position for key in keys[:50] if depth < 30 for position in _positions(node[key], depth + 1)
    ]
