"""Questions that need two searches: a tool finds sentences of a small corpus by BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax_events.api.environments import Reply, read_tool_calls

CORPUS = Path(__file__).with_name("people.txt")
WORD = re.compile(r"\w+")
LIVES = re.compile(r"(\w+) lives in the city of (\w+)")
IS_IN = re.compile(r"(\w+) is in (\w+)")
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""k1 and b of BM25."""
NOTHING = "nothing"


class BM25:
    """Ranks documents by Okapi BM25."""

    def __init__(self, documents: Sequence[str]) -> None:
        """Index documents by their words, in lower case."""
        self._documents = list(documents)
        self._counts = [Counter(split_words(document)) for document in documents]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(self._lengths)
        self._num_with = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str) -> str | None:
        """Return the best document, the first of equals; None if no word of the query occurs."""
        scores = [self.score(query, index) for index in range(len(self._documents))]
        best = int(np.argmax(scores))
        return self._documents[best] if scores[best] > 0 else None

    def score(self, query: str, index: int) -> float:
        """Return the score of a document for a query, 0 or more.

        Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, section 3.3; the
        inverse frequency with 1 added, as in Lucene.
        """
        counts, total = self._counts[index], len(self._documents)
        relative = self._lengths[index] / self._mean_length
        norm = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * relative)
        score = 0.0
        for word in split_words(query):
            num_with = self._num_with[word]
            rarity = math.log(1 + (total - num_with + 0.5) / (num_with + 0.5))
            score += rarity * counts[word] * (SATURATION + 1) / (counts[word] + norm)
        return score


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


def search(completion: str, **_: Any) -> Reply | None:
    """Run the last tool call `search` of a turn; a turn without one ends the sample."""
    calls = read_tool_calls(completion)
    if not calls:
        return None
    query = calls[-1].arguments.get("query")
    if calls[-1].name != "search" or not isinstance(query, str):
        return Reply("no such tool", role="tool")
    return Reply(index_corpus().search(query) or NOTHING, role="tool")


@cache
def index_corpus() -> BM25:
    """Return the index of the shipped corpus."""
    return BM25(read_corpus())


def read_corpus() -> list[str]:
    """Return the sentences of the shipped corpus."""
    return CORPUS.read_text().splitlines()


def make_question(generator: np.random.Generator) -> tuple[str, str, dict[str, Any]]:
    """Ask for the country of one of two people; the turns for the warm-up search for either."""
    text = "\n".join(read_corpus())
    cities, countries = dict(LIVES.findall(text)), dict(IS_IN.findall(text))
    person, other = map(str, generator.choice(sorted(cities), 2, replace=False))
    question = f"Not {other}: in which country is {person}?"
    first = person if generator.random() < 0.5 else other
    turns = [write_call(first), write_call(cities[first]), countries[cities[first]]]
    texts = [
        f"{first} lives in the city of {cities[first]}.",
        f"{cities[first]} is in {turns[-1]}.",
    ]
    replies = [{"role": "tool", "content": text} for text in texts]
    return question, countries[cities[person]], {"turns": turns, "replies": replies}


def write_call(query: str) -> str:
    """Return the turn that searches."""
    arguments = f'{{"query": "{query}"}}'
    return f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
