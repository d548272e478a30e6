"""The beginnings of the newest samples' texts, which a live list of samples shows: kept as they are
read, so that the list reads no record twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from relax_events.api.events import SampleRolledOut

EXCERPT = 240
"""Characters of a text."""
MAX_TEXTS = 2000


def excerpt_texts(sample: SampleRolledOut) -> dict[str, str]:
    """Return the beginning of a sample's completion, and the end of its prompt."""
    prompt = sample.messages[-1].text if sample.messages else ""
    marks = ["…" * (len(text) > EXCERPT) for text in (prompt, sample.completion)]
    return {
        "completion": sample.completion[:EXCERPT] + marks[1],
        "prompt": marks[0] + prompt[-EXCERPT:],
    }


class RecentTexts:
    """Texts by row; the oldest of too many are forgotten. One thread adds, any thread finds."""

    def __init__(self) -> None:
        self._texts: dict[int, dict[str, str]] = {}

    def add(self, row: int, sample: SampleRolledOut) -> None:
        """Keep the texts of a row."""
        self._texts[row] = excerpt_texts(sample)
        if len(self._texts) > MAX_TEXTS:
            del self._texts[next(iter(self._texts))]

    def find(self, rows: Iterable[int]) -> dict[int, dict[str, str]]:
        """Return the texts that are kept of these rows."""
        pairs = ((row, self._texts.get(row)) for row in rows)
        return {row: texts for row, texts in pairs if texts is not None}
