"""Read which choice a text makes, by one grammar of marks, lead-ins, denials and hedges.

The text becomes tokens: words, signs, and the marks of Markdown, LaTeX, HTML and quotations, which
are skipped. A word of one character is a label, except the article "A" and the pronoun "I". Labels
joined by "or", "and" or a comma are one list. The words around a list say its standing: the text
states it, hedges it, denies it, or only mentions it. So each case, bracket, emphasis, lead-in,
language and tail goes with each other.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from relax_events.packages.verifiers.choice_words import (
    CALLS_RIGHT,
    CALLS_WRONG,
    CJK,
    CJK_DENIAL,
    CJK_HEDGE,
    CJK_JOIN,
    CJK_LEAD,
    CJK_RIGHT,
    DOUBTFUL,
    ENDS_OF_CALLS,
    NO_NOUNS,
    NO_VERBS_OF_I,
    OR,
    ROLES,
    Role,
)

TOKEN = re.compile(
    rf"""
    (?P<box>\\(?:boxed|fbox)\b)
    |(?P<tag><answer>)
    |(?P<end></answer>)
    |(?P<mark>\\(?:text[a-z]*|math[a-z]+|bf|rm|it|emph|underline|left|right|q?quad)(?![A-Za-z])
        |\\[^A-Za-z\s]|</?(?:b|i|em|strong|u|p|br|span|mark|h\d)\s?/?>
        |[*_`"'\u2018-\u201f\u00ab\u00bb$~(){{}}\[\]<>\#\u3008-\u3011\u3014-\u301b])
    |(?P<word>(?:[A-Za-z]\.){{2,}}[A-Za-z]?\b|\d+(?:[.,]\d+)+
        |(?:(?![{CJK}_])\w)(?:(?:(?![{CJK}])[\w'\u2019-])*(?:(?![{CJK}_])\w))?)
    |(?P<cjk>[{CJK}]+)
    |(?P<stop>[.!?;\u3002]+)
    |(?P<comma>[,\u3001])
    |(?P<newline>\n\s*)
    |(?P<sign>\S)
    """,
    re.VERBOSE | re.IGNORECASE,
)
CLOSING = re.compile(r"[.:)\]}>*_`\"'\u2019\u201d\u00bb$\u3009\u300b\u300d\u300f\u3011]|\\[)\]]|</")
COPULA_SIGNS = {":", "=", "\u2192", "\u21d2"}
LINE_SIGNS = {"-", "\u2013", "\u2014", "|", "\u2022"}
VARIABLE_SIGNS = set("=+^%\u2264\u2265\u2248\u00d7\u00b7\u2208")
MAX_STEPS, MAX_JOIN_STEPS, MAX_LABELS_AS_WORD = 14, 4, 4


@dataclass(frozen=True, slots=True)
class Token:
    """A word or a sign; a mark, a full stop or a colon behind a letter sets it apart."""

    kind: str
    text: str
    start: int
    end: int
    role: Role | None
    is_marked: bool


class Standing(Enum):
    """What a text says of a list of labels, what counts first in front."""

    DENIED = "is not"
    SUPPOSED = "if it is, or is it"
    HEDGED = "may be, or is one of several"
    STATED = "the answer is"
    CALLED_RIGHT = "is the right one"
    MENTIONED = "stands in the text"


ANSWERS = (Standing.STATED, Standing.CALLED_RIGHT)
NO_ANSWERS = (Standing.DENIED, Standing.SUPPOSED)


@dataclass(frozen=True)
class LabelList:
    """Labels that are joined, mostly one; `first` and `last` are indices of tokens."""

    labels: frozenset[str]
    first: int
    last: int
    standing: Standing
    is_marked: bool
    starts_line: bool
    is_line: bool


@dataclass(frozen=True)
class Choice:
    """The label that a text chooses, or None. If `is_open` it neither chooses nor hedges, so that
    other words of it may name a choice.
    """

    label: str | None
    is_open: bool
    denied: frozenset[str]


def read_choice(text: str, *, num_choices: int = 0) -> Choice:
    """Return the label that a text chooses; one beyond a number of choices is no label.

    The last stated label counts. Without one a last line of one label counts, else a label that is
    called right, begins a line or is set apart, if all such labels are the same. A later hedge that
    names another label, and a later denial of this one, take the choice back.
    """
    return _Reading(read_tokens(text), string.ascii_uppercase[: num_choices or None]).choice


def read_tokens(text: str) -> list[Token]:
    """Return the tokens of a text without its marks; full-width characters count as usual ones."""
    normalized = unicodedata.normalize("NFKC", text)
    return [
        _make_token(match, normalized)
        for match in TOKEN.finditer(normalized)
        if match.lastgroup != "mark"
    ]


def _make_token(match: re.Match[str], text: str) -> Token:
    start, end = match.span()
    return Token(
        match.lastgroup or "",
        match[0],
        start,
        end,
        role=_find_role(match[0].lower().replace("\u2019", "'")),
        is_marked=end - start == 1 and CLOSING.match(text, end) is not None,
    )


def _find_role(word: str) -> Role | None:
    """Return the role of a word, of the part behind its elided article, or before its "'s"."""
    if word.endswith("n't"):
        return Role.DENIAL
    article, _, name = word.partition("'")
    return ROLES.get(word) or ROLES.get(name) or (ROLES.get(article) if name == "s" else None)


class _Reading:
    """The tokens of one text, and what they say about labels."""

    def __init__(self, tokens: Sequence[Token], alphabet: str) -> None:
        self._tokens, self._alphabet = tokens, alphabet
        self._denied_until = -MAX_STEPS

    @cached_property
    def choice(self) -> Choice:
        lists = list(self._read_lists())
        chosen = self._choose(lists)
        denied = {label for one in lists if one.standing is Standing.DENIED for label in one.labels}
        is_hedged = any(one.standing is Standing.HEDGED for one in lists)
        is_one = chosen is not None and len(chosen.labels) == 1
        if chosen is None or not is_one or any(_takes_back(one, chosen) for one in lists):
            return Choice(None, chosen is None and not is_hedged, frozenset(denied))
        return Choice(min(chosen.labels), is_open=False, denied=frozenset(denied))

    def _choose(self, lists: Sequence[LabelList]) -> LabelList | None:
        stated = [one for one in lists if one.standing is Standing.STATED]
        lines = [one for one in lists if one.starts_line and one.standing not in NO_ANSWERS]
        alone = [one for one in lines if one.is_line]
        is_last_line = bool(alone) and alone[-1].last + 2 >= len(self._tokens)
        if len(alone) == 1 and (is_last_line or not stated):
            return alone[0]
        if stated:
            return stated[-1]
        called_right = [one for one in lists if one.standing is Standing.CALLED_RIGHT]
        set_apart = [one for one in lists if one.is_marked and one.standing is Standing.MENTIONED]
        for candidates in (called_right, lines, set_apart):
            if candidates:
                return candidates[-1] if len({one.labels for one in candidates}) == 1 else None
        return None

    def _read_lists(self) -> Iterator[LabelList]:
        index = 0
        while index < len(self._tokens):
            labels, last = self._read_labels(index)
            if labels:
                one = self._make_list(labels, index, last)
                self._denied_until = last if one.standing is Standing.DENIED else -MAX_STEPS
                yield one
            index = last + 1

    def _make_list(self, labels: frozenset[str], first: int, last: int) -> LabelList:
        starts, ends = self._starts_line(first), self._ends_line(last)
        token = self._tokens[first]
        follows_name = first > 0 and self._tokens[first - 1].role is Role.NAMED
        is_marked = token.is_marked or follows_name
        return LabelList(
            labels,
            first,
            last,
            self._find_standing(labels, first, last),
            is_marked,
            starts and (is_marked or self._ends_clause(last)),
            starts and ends,
        )

    def _read_labels(self, index: int) -> tuple[frozenset[str], int]:
        """Return the labels of the list that begins at a token, and the index of its last token."""
        labels = self._label_at(index)
        last = index
        while labels and (following := self._find_joined(last)) is not None:
            labels |= self._label_at(following)
            last = following
        return labels, last

    def _find_joined(self, index: int) -> int | None:
        """Return the index of the next label of a list; one behind a comma must end a clause."""
        is_joined = has_comma = False
        for at in range(index + 1, min(index + 1 + MAX_JOIN_STEPS, len(self._tokens))):
            token = self._tokens[at]
            if (is_joined or has_comma) and self._label_at(at):
                return at if is_joined or self._ends_item(at) else None
            has_comma |= token.kind == "comma"
            is_joined |= self._joins(at)
            if not (self._joins(at) or token.kind == "comma" or token.role in SKIPPED_IN_LISTS):
                return None
        return None

    def _joins(self, index: int) -> bool:
        token = self._tokens[index]
        if token.text in LINE_SIGNS:
            around = self._tokens[index - 1 : index + 2]
            return (
                len(around) == 3 and around[0].end == token.start and token.end == around[2].start
            )
        is_or = token.text.lower() in OR
        return (
            token.text in ("/", "&")
            or is_or
            or token.role is Role.JOIN
            or (token.kind == "cjk" and CJK_JOIN.match(token.text) is not None)
        )

    def _ends_item(self, index: int) -> bool:
        return self._ends_clause(index) or self._joins(index + 1)

    def _ends_clause(self, index: int) -> bool:
        following = self._tokens[index + 1 : index + 2]
        return not following or following[0].kind in ("stop", "comma", "newline", "end")

    def _starts_line(self, index: int) -> bool:
        while index > 0 and self._tokens[index - 1].text in LINE_SIGNS:
            index -= 1
        named = index > 0 and self._tokens[index - 1].role is Role.NAMED
        index -= named
        return index == 0 or self._tokens[index - 1].kind == "newline"

    def _ends_line(self, index: int) -> bool:
        following = [one.kind for one in self._tokens[index + 1 : index + 3]]
        return (
            not following
            or following[0] == "newline"
            or (following[0] == "stop" and following[1:] in ([], ["newline"]))
        )

    def _label_at(self, index: int) -> frozenset[str]:
        """Return the label that a token is; the several labels of a word such as BC; or none."""
        token = self._tokens[index]
        if token.kind != "word" or not token.text.isascii() or not self._read_labels_in(token):
            return frozenset()
        if len(token.text) == 1 and not self._is_label(index):
            return frozenset()
        return self._read_labels_in(token)

    def _read_labels_in(self, token: Token) -> frozenset[str]:
        labels = frozenset(token.text.upper())
        is_label = len(token.text) == 1 or (
            1 < len(token.text) == len(labels) <= MAX_LABELS_AS_WORD and token.text.isupper()
        )
        return labels if is_label and labels <= set(self._alphabet) else frozenset()

    def _is_label(self, index: int) -> bool:
        """Tell a label from a variable and, if no marks set it apart, an article or a pronoun."""
        token = self._tokens[index]
        following = self._tokens[index + 1] if index + 1 < len(self._tokens) else None
        if following is None or following.text in VARIABLE_SIGNS:
            return following is None
        if token.is_marked or following.kind != "word":
            return True
        if token.text in "iI":
            return following.text.lower() in NO_VERBS_OF_I
        is_capital = token.text.isupper() and token.text != "A"
        return is_capital or following.text.lower() in NO_NOUNS

    def _find_standing(self, labels: frozenset[str], first: int, last: int) -> Standing:
        standings = {self._read_before(first, last), self._read_behind(last)}
        strongest = next(one for one in Standing if one in standings)
        is_asked = self._is_question(last)
        if strongest is Standing.MENTIONED:
            return Standing.SUPPOSED if is_asked else strongest
        is_open = strongest in ANSWERS and (len(labels) > 1 or is_asked)
        return Standing.HEDGED if is_open else strongest

    def _is_question(self, index: int) -> bool:
        for token in self._tokens[index + 1 : index + 1 + MAX_STEPS]:
            if token.kind in ("stop", "newline"):
                return "?" in token.text
        return False

    def _read_before(self, first: int, last: int) -> Standing:
        """Return what the words before a list say, from the nearest on."""
        has_copula = has_comma = is_hedged = False
        if self._is_opinion(first, last):
            return Standing.CALLED_RIGHT
        for index in range(first - 1, max(first - 1 - MAX_STEPS, -1), -1):
            token = self._tokens[index]
            if len(token.text) == 1 and self._label_at(index):
                break
            match token.kind, token.role:
                case ("box" | "tag", _):
                    return Standing.HEDGED if is_hedged else Standing.STATED
                case ("cjk", _):
                    standing = _read_cjk_before(token.text)
                    if has_comma and standing is not Standing.STATED:
                        standing = Standing.MENTIONED
                    return Standing.HEDGED if is_hedged else standing
                case ("stop" | "end", _):
                    break
                case ("comma" | "newline", _):
                    has_comma = True
                case ("sign", _) if token.text in COPULA_SIGNS | LINE_SIGNS:
                    has_copula |= token.text in COPULA_SIGNS
                case (_, Role.DENIAL | Role.HEDGE) if has_comma:
                    break
                case (_, Role.DENIAL):
                    return Standing.DENIED
                case (_, Role.CONDITION):
                    return Standing.SUPPOSED
                case (_, Role.HEDGE):
                    is_hedged = True
                case (_, Role.COPULA):
                    has_copula = True
                case (_, Role.LEAD):
                    return self._read_clause(index, is_hedged=is_hedged)
                case (_, Role.NAMED | Role.RIGHT) if has_copula:
                    return self._read_clause(index, is_hedged=is_hedged)
                case (_, Role.CONTRAST) if index - self._denied_until <= 2:
                    return Standing.STATED
                case (_, Role.CONCLUSION) if self._ends_clause(last):
                    return Standing.HEDGED if is_hedged else Standing.STATED
                case (_, Role.NAMED | Role.CONCLUSION | Role.MODAL | Role.OPINION | Role.FILLER):
                    pass
                case _:
                    break
        return Standing.HEDGED if is_hedged else Standing.MENTIONED

    def _is_opinion(self, first: int, last: int) -> bool:
        """Tell whether a clause says what its author thinks, and then a list, and no more."""
        start = first
        while start > 0 and self._tokens[start - 1].role in (Role.OPINION, Role.MODAL):
            start -= 1
        ends = last + 1 == len(self._tokens) or self._tokens[last + 1].kind in ("stop", "newline")
        begins = start == 0 or self._tokens[start - 1].kind in ("stop", "comma", "newline")
        return start < first and begins and ends

    def _read_clause(self, lead: int, *, is_hedged: bool) -> Standing:
        """Return what the clause before a lead-in makes of it."""
        for token in reversed(self._tokens[max(lead - MAX_STEPS, 0) : lead]):
            if token.kind in ("stop", "comma", "newline", "end", "tag"):
                break
            if token.role in (Role.DENIAL, Role.WRONG):
                return Standing.DENIED
            if token.role is Role.CONDITION:
                return Standing.SUPPOSED
            is_hedged |= token.role is Role.HEDGE
        return Standing.HEDGED if is_hedged else Standing.STATED

    def _read_behind(self, last: int) -> Standing:
        """Return what the words behind a list say."""
        is_hedged = False
        for index, token in enumerate(self._tokens[last + 1 : last + 1 + MAX_STEPS]):
            word = token.text.lower()
            if token.kind == "cjk" and index == 0:
                return _read_cjk_behind(token.text)
            begins_verb = token.role in VERBS or word == "cannot" or word.endswith("n't")
            if token.role is None or token.kind != "word" or (index == 0 and not begins_verb):
                break
            if word in CALLS_WRONG or word.endswith("n't"):
                return Standing.DENIED
            is_hedged |= token.role is Role.HEDGE or word in DOUBTFUL
            if word in CALLS_RIGHT and self._ends_call(last + 1 + index):
                return Standing.HEDGED if is_hedged else Standing.CALLED_RIGHT
        return Standing.MENTIONED

    def _ends_call(self, index: int) -> bool:
        """Tell "is right" and "is right because" from "is right about something"."""
        following = self._tokens[index + 1 : index + 2]
        return not following or (
            following[0].kind != "word"
            or following[0].role in (Role.NAMED, Role.LEAD)
            or following[0].text.lower() in ENDS_OF_CALLS
        )


SKIPPED_IN_LISTS = (Role.NAMED, Role.HEDGE, Role.OPINION, Role.FILLER)
VERBS = (Role.COPULA, Role.MODAL, Role.HEDGE)


def _read_cjk_before(run: str) -> Standing:
    if CJK_DENIAL.search(run):
        return Standing.DENIED
    is_stated = CJK_LEAD.search(run) is not None
    if CJK_HEDGE.search(run):
        return Standing.HEDGED
    return Standing.STATED if is_stated else Standing.MENTIONED


def _read_cjk_behind(run: str) -> Standing:
    if CJK_RIGHT.match(run):
        return Standing.CALLED_RIGHT
    return Standing.DENIED if CJK_DENIAL.search(run[:6]) else Standing.MENTIONED


def _takes_back(later: LabelList, chosen: LabelList) -> bool:
    if later.first <= chosen.first:
        return False
    if later.standing is Standing.DENIED:
        return bool(later.labels & chosen.labels)
    return (
        later.standing in (Standing.HEDGED, Standing.CALLED_RIGHT) and later.labels != chosen.labels
    )
