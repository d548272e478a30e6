"""No name and no sentence uses a word that readers from RL, Kafka or Python have to translate."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUFFIXES = {".py", ".md", ".toml", ".avsc", ".yml", ".yaml", ".sh", ""}
SKIPPED = re.compile(
    r"^(docs/glossary\.md|requirements/|tests/data/|LICENSE)|/released/|vocabulary\.py$"
)
REPLACED = {
    r"\bin vain\b": "without progress, failed attempt",
    r"\b(taken|takes|take) (it |them |samples )?up\b|_taken?_up\b": "resume",
    r"\bgo(es)? on\b": "continue, resume",
    r"(?<!\.)\b(told|tells?|telling)\b|_told\b|_tells?_": "notify, report, send, log",
    r"(?<![Hh]eart)(?<![a-z])[Bb]eats?\b|\bWorkerBeat\b|_beats?\b": "heartbeat",
    r"\b[Ss]eats?\b|_seats?\b": "batch slot, index",
    r"\b([Dd]esk|[Ss]tation|[Ee]rrand|[Jj]ourneys?)\b|(Desk|Station|Errand|Journeys)\b": "service, runner, task, in-flight request",
    r"\bstrangers?('s)?\b": "unknown producer, untrusted input",
    r"\bguests?\b|_guest\b": "external",
    r"\b([Ww]hoever|[Nn]obody(?! --group| *$)|[Ss]omebody)\b": "name the noun",
    r"\b(amiss|anew|unfit|mend(ed|s)?|learnt|spelt|heed(ed|s)?)\b": "unhealthy, again, invalid, fix, learned",
    r"\b[Bb]eside\b": "next to, compared with",
    r"(?<!<)(?<!</)\b[Ff]igures?\b|_figures?\b": "metrics",
    r"\bdrawn\b|_drawn\b": "sampled, generated",
    r"\b[Pp]ictures?\b|_pictures?\b": "image",
    r"\b[Ss]ounds\b|_sounds\b": "audio",
    r"(?<!In )\bPlace\b|(?<!\bin)_places?\b": "TopicPartition, position, offset, index",
    r"\b[Ww]orking off\b|\bwork(s|ed)? off\b": "process, drain",
    r"(?<![Dd]ead[ _-])(?<!dead)(?<!case )(?<!ascii )\bletters\b": "dead letters",
}
"""Patterns of words that are no longer used, each with the standard terms."""


def texts() -> list[tuple[str, int, str]]:
    """Return every line of the repository's text files, with its file and number."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = [
        name
        for name in listed
        if not SKIPPED.search(name) and Path(name).suffix in SUFFIXES and (ROOT / name).is_file()
    ]
    return [
        (name, number, line)
        for name in files
        for number, line in enumerate((ROOT / name).read_text(errors="ignore").splitlines(), 1)
    ]


LINES = texts()
NAME_BOUNDARY = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")
"""Where a name is split into its words, so that a word is noticed within `MAX_WORD` or `WordList`."""


def split_names(line: str) -> str:
    """Return a line with a space between the words of each name."""
    return NAME_BOUNDARY.sub(" ", line)


SPLIT_LINES = [split_names(line) for _, _, line in LINES]


@pytest.mark.parametrize(
    "line", ["max_told = 1", "self._told(x)", "class Was_told:", "hasToldAll()"]
)
def test_word_is_noticed_within_a_name(line: str) -> None:
    assert re.search(r"\b[Tt]old\b", split_names(line))


@pytest.mark.parametrize("pattern", REPLACED, ids=list(REPLACED.values()))
def test_replaced_word_is_not_used(pattern: str) -> None:
    word = re.compile(pattern)
    used = [
        f"{name}:{number}: {line.strip()[:90]}"
        for (name, number, line), split_line in zip(LINES, SPLIT_LINES, strict=True)
        if word.search(line) or word.search(split_line)
    ]
    assert not used, f"{len(used)} lines; say: {REPLACED[pattern]}\n" + "\n".join(used[:40])
