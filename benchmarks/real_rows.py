"""Write rows of short word problems of addition: `python -m benchmarks.real_rows FOLDER` writes
`train.jsonl` and `heldout.jsonl`.

SmolLM2-135M answers about one in five. The two files have no pair of numbers in common, so a policy
that memorizes the sums of the training rows does not get the held-out ones right.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_HELD_OUT = 128
PROMPT = (
    "Question: Eve has 3 keys and buys 4 more. How many keys does Eve have now?\n"
    "Answer: 3 + 4 = 7\n\n"
    "Question: {name} has {a} {things} and buys {b} more. "
    "How many {things} does {name} have now?\nAnswer:"
)
NAMES = ("Anna", "Ben", "Tom", "Mia", "Omar", "Lily", "Jack", "Nina")
THINGS = ("apples", "books", "coins", "pens", "cups", "eggs", "hats", "maps")


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training rows and the held-out rows, always the same ones."""
    shuffler = random.Random(0)
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    shuffler.shuffle(pairs)
    return _lay_out(pairs[16:], shuffler), _lay_out(pairs[:16], shuffler)[:NUM_HELD_OUT]


def _lay_out(pairs: Sequence[tuple[int, int]], shuffler: random.Random) -> list[dict[str, str]]:
    """Return a row for each pair, name and thing, in random order."""
    rows = [
        {"prompt": PROMPT.format(name=name, things=things, a=a, b=b), "answer": str(a + b)}
        for (a, b), name, things in itertools.product(pairs, NAMES, THINGS)
    ]
    shuffler.shuffle(rows)
    return rows


def write_rows(folder: Path) -> None:
    """Write both files as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), make_rows(), strict=True):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
