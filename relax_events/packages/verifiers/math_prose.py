"""Find the mathematics in prose: the clause that states an answer, and the runs of formulas and
numbers in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

MAX_CLAUSE_CHARACTERS = 300
STATED = re.compile(
    r"answers?(?:\s+(?:to|for|of)\s+(?:the|this|part|question|problem)\b[^.\n]{0,60}?)?"
    r"(?:\s+(?:is|are|equals|must\s+be|should\s+be|will\s+be|becomes)\b"
    r"|\s+(?P<hedge>could|might|may|can|would)\s+be\b|\W{0,4}[:=\uff1a])(?:\s*is\b)?[\s:=*\uff1a]*"
    r"|(?:\u7b54\u6848|\u7ed3\u679c)(?:\u662f|\u4e3a|\u7b49\u4e8e|[:=\uff1a]|\s)+",
    re.IGNORECASE,
)
"""The words before an answer: "answer is", "answer:", and the same in Chinese."""
RETRACTION = re.compile(
    r"\W*(?:actually|wait|sorry|oops|correction|scratch\s+that|hold\s+on|no(?=[,.!]))\b",
    re.IGNORECASE,
)
"""The first words of a sentence that takes the answer before it back."""
DISPLAY = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]", re.DOTALL)
SPAN = re.compile(
    r"\\begin\{.+?\\end\{[^{}]*\}|\$\$.+?\$\$|\$(?!\s)(?:[^$\n]*?[^\s$\\])?\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]",
    re.DOTALL,
)
"""A formula between its marks; `$5 and $6` are two amounts."""
FORMULA = re.compile(rf"{SPAN.pattern}|\{{[^{{}}]*\}}", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+|\u3002\s*")
EDGES = '*_` \t\n"'
HEDGE = re.compile(
    r"\b(?:not|never|no\s+longer|neither|nor|maybe|perhaps|possibly|probably|likely|(?:could|might|may)\s+be|unknown"
    r"|unclear|unsure|undetermined|either|between|guess|if|wrong|incorrect|one\s+of)\b|n['\u2019]t\b"
    r"|\u4e0d|\u53ef\u80fd|\u4e5f\u8bb8|\u6216|\u5982\u679c",
    re.IGNORECASE,
)
"""Words that deny an answer, or leave it open."""
CHANGE_BEFORE = re.compile(
    r"\b(?:twice|double|triple|half|root|times|than|at\s+(?:least|most)|up\s+to|to\s+the|power)"
    r"(?:\s+(?:of|as|the|power))*$",
    re.IGNORECASE,
)
CHANGE_AFTER = re.compile(
    r"(?:squared|cubed|factorial|mod|modulo|choose|to\s+the\s+(?:power|\w+th)|(?:maybe|perhaps|possibly|probably|or))\b"
    r"|(?:(?:less|more|fewer)\s+than|times)\s+(?:[\d$\\]|[a-zA-Z]\b)"
    r"|(?:\w+\s+)?(?:is|are|was)(?:\s+(?:wrong|incorrect|false|not\s+(?:right|correct|the|it|an?))|n['\u2019]t)\b",
    re.IGNORECASE,
)
"""Words that change the number next to them, or deny it."""
NUM_CLOSE_WORDS = 4
EQUATION = re.compile(r"(?<![<>!])=")
SYMBOL = re.compile(r"(?<!\\)\b(?!(?<=\d )x(?= [\d(]))[a-zA-Z]\b")
LISTED = re.compile(r"[,;]\s|\b(?:and|or)\b|\\(?:le|ge|ne|lt|gt)|[<>]")
CONCLUSION = re.compile(
    r"[,;:]|\b(?:so|therefore|thus|hence|then|but|is|are|was|were)\b(?!')", re.IGNORECASE
)
"""Where a new clause starts, which the words before it do not deny."""
LEAD_IN = re.compile(
    r"^(?:(?:that|simply|just|exactly|therefore|thus|indeed|clearly|given\s+by|equal\s+to|equals"
    r"|approximately|about|roughly|\\approx|\\boxed)\s+)+",
    re.IGNORECASE,
)
EXPLANATION = re.compile(
    r"[,;:]?\s+(?:which|because|since|as|so|where|for|with|by|i\.e|that\s+is|not|rather\s+than"
    r"|instead\s+of|obtained|using|after|from|hence|therefore|thus)\b"
    r"|,\s+(?:a|an|the|and\s+(?:this|that|it|we|so|hence|therefore|thus))\b"
    r"|\s+\((?=[A-Za-z]{2})|(?<=[a-z]{4})(?<!sqrt)(?<!(?:sin|cos|tan)h)\s+\("
    r"|,\s+(?:it|this|that|there|they|we)\b|(?:;|\s[-\u2013\u2014]+)\s+(?!or\b|and\b)(?=[A-Za-z]{2})",
    re.IGNORECASE,
)
"""Where the explanation of an answer starts, which is no part of it."""
PREDICATE = re.compile(r"\s(?:is|are|equals|be)\s(?!.*\s(?:is|are|equals|be)\s)", re.DOTALL)
JOINERS = ("and", "or", "&", "\u548c", "\u6216", "\u6216\u8005")
CHINESE = re.compile(r"([\u3001-\u303f\u3400-\u9fff\uff0c\uff1a\uff1b]+)")
COMMAND = re.compile(r"\\[a-zA-Z]+|\b(?:sin|cos|tan|log|ln|sqrt|pi|exp|mod)\b")
WORD = re.compile(r"[^\W\d_]{2,}")
MATHEMATICS = re.compile(r"[\d\\=+\-*/^<>|(){}\[\]]")
WITHOUT_VALUE = re.compile(r"[^\w\\]*")
AMOUNT = re.compile(r"[-+$]*[\d.,]+[a-zA-Z]{1,4}")
RATE = re.compile(r"(?<=\d)/[A-Za-z]+$")
LABEL = re.compile(r"(?<=[A-Za-z]{2}):(?=\S)")
STOPS = ".;:!?"


@dataclass(frozen=True, slots=True)
class Run:
    """Formulas and numbers that stand side by side, "and", "or" and commas among them.

    `before` and `after` are the words around it, up to the next run.
    """

    text: str
    before: str
    after: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the words around it deny it, doubt it, or join it to others."""
        close = " ".join(CONCLUSION.split(self.before)[-1].split()[-NUM_CLOSE_WORDS:])
        before = [] if self._is_equation else self.before.lower().split()
        return bool(
            (len(before) > 1 and before[-1] in JOINERS)
            or HEDGE.search(close)
            or CHANGE_BEFORE.search(close)
            or CHANGE_AFTER.match(self.after)
        )

    @property
    def values(self) -> list[str]:
        """The whole run, and the last side of an equation."""
        last = LISTED.split(self.text)[-1]
        is_arithmetic = "=" in last and not SYMBOL.search(last.rpartition("=")[0])
        is_side = self._is_equation or is_arithmetic
        return [self.text, last.rpartition("=")[2]] if is_side else [self.text]

    @property
    def _is_equation(self) -> bool:
        return EQUATION.search(self.text) is not None and not LISTED.search(self.text)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences and lines; a displayed formula is one line."""
    joined = DISPLAY.sub(lambda match: " ".join(match[0].split()), text)
    return [part for part in SENTENCE_END.split(joined) if part and part.strip()]


def stated_clauses(text: str) -> Iterator[tuple[str, bool]]:
    """Yield what stands behind each "answer is" of a text, the last first, and whether it is
    hedged or denied.
    """
    for mark in reversed(list(STATED.finditer(text))):
        sentence = text[: mark.start()].rpartition("\n")[2]
        before = CONCLUSION.split(SENTENCE_END.split(sentence)[-1])[-1]
        sentences = split_sentences(text[mark.end() : mark.end() + MAX_CLAUSE_CHARACTERS])
        clause = strip_edges(sentences[0]) if sentences else ""
        if clause:
            _, value = _split_head(clause)
            yield clause, bool(mark["hedge"] or HEDGE.search(before) or HEDGE.search(value))


def is_retracted(text: str) -> bool:
    """Return whether a sentence behind the last "answer is" of a text takes it back."""
    *_, end = [len(text), *(mark.end() for mark in STATED.finditer(text))]
    return any(map(RETRACTION.match, split_sentences(text[end:])[1:]))


def clause_values(clause: str) -> Iterator[str]:
    """Yield the texts that can be the value of a clause: the whole, the part before its
    explanation, and the only formula or number in that part, or behind its last "is".
    """
    yield clause
    subject, value = _split_head(clause)
    if any(map(str.isdigit, subject)):
        return
    yield value
    runs = find_runs(value)
    if len(runs) == 1 and not runs[0].is_open:
        yield from runs[0].values


def _split_head(clause: str) -> tuple[str, str]:
    """Split a clause, without its explanation, at its last "is" into subject and value."""
    clause = LEAD_IN.sub("", clause)
    hidden = FORMULA.sub(lambda match: "\0" * len(match[0]), clause)
    end = match.start() if (match := EXPLANATION.search(hidden)) else len(clause)
    head = strip_edges(clause[:end])
    match = PREDICATE.search(f" {head}")
    subject, value = (head[: match.start()], head[match.end() - 1 :]) if match else ("", head)
    return subject, strip_edges(LEAD_IN.sub("", value))


def strip_edges(text: str) -> str:
    """Remove blanks, quotes and marks of emphasis around a text, and commas and stops behind it."""
    return text.lstrip(EDGES).rstrip(EDGES + ",.")


def is_formula(text: str) -> bool:
    """Return whether a text is one formula or number, without other words."""
    words = _mark_words(text)
    return bool(words) and all(number == 1 for number, _ in words)


def find_runs(sentence: str) -> list[Run]:
    """Return the runs of a sentence, in order."""
    runs: list[Run] = []
    words: list[str] = []
    for is_mathematics, group in groupby(_mark_words(sentence), itemgetter(0)):
        text = " ".join(word for _, word in group).strip(", ")
        if is_mathematics and MATHEMATICS.search(text) and not WITHOUT_VALUE.fullmatch(text):
            runs.append(Run(text, " ".join(words)))
            words = []
        else:
            words.append(text)
            runs[-1:] = [replace(run, after=" ".join(words)) for run in runs[-1:]]
    return runs


def _mark_words(sentence: str) -> list[tuple[int, str]]:
    """Return the words of a sentence, each with the number of its run, 0 outside of runs."""
    words = _split_words(sentence)
    kinds = [_is_mathematics(word.strip(EDGES)) for word in words]
    marked: list[tuple[int, str]] = []
    number = 1
    for index, word in enumerate(words):
        text = word.strip(EDGES)
        is_between = (
            word.lower() in JOINERS
            and index > 0
            and kinds[index - 1]
            and any(kinds[index + 1 : index + 2])
        )
        is_inside = kinds[index] or is_between
        marked.append((number if is_inside else 0, text.rstrip(STOPS) if is_inside else word))
        number += text.endswith(tuple(STOPS)) or not is_inside
    return marked


def _split_words(sentence: str) -> list[str]:
    """Split a sentence at blanks that stand in no formula and in no braces."""
    kept = SPAN.sub(lambda match: match[0].replace(" ", "\0").replace("\n", "\0"), sentence)
    depth, characters = 0, []
    for character in CHINESE.sub(r" \1 ", LABEL.sub(": ", kept)):
        depth += (character == "{") - (character == "}" and depth > 0)
        characters.append("\0" if depth and character == " " else character)
    return [word.replace("\0", " ") for word in "".join(characters).split()]


def _is_mathematics(word: str) -> bool:
    bare = RATE.sub("", word.strip("$,.;:!?"))
    if SPAN.fullmatch(word.strip(",.;:!?")) or AMOUNT.fullmatch(bare) or r"\begin{" in bare:
        return True
    if len(bare) == 1 and bare.isascii() and bare.isalpha():
        return bare not in "aAI"
    if WORD.search(COMMAND.sub(" ", re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}", "", bare))):
        return False
    return MATHEMATICS.search(bare) is not None
