"""The 25 instructions of IFEval, each a function from a response and its arguments to whether it
was followed.

Where the published program splits text with NLTK's models we use plain rules: sentences end at `.`,
`!` or `?` before white space, abbreviations aside.
Source: Instruction-Following Evaluation for Large Language Models (arXiv 2311.07911), table 1, and
its published definitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from relax_events.api.rewards import EnvironmentProblem

Check = Callable[..., bool]
INSTRUCTIONS: dict[str, Check] = {}
WORD, ALPHANUMERIC = re.compile(r"\w+"), re.compile(r"[^\W_]")
CLITIC = re.compile(r"(?<=\w)(n't|'(?:s|m|d|ll|re|ve))\b|(?<=\bcan)(?=not\b)", re.IGNORECASE)
ATTACHED = r"(?:[/\\|+=~^\u2026]|(?<!-)-(?!-))"
TOKEN = re.compile(
    rf"'(?:s|m|d|ll|re|ve)\b|{ATTACHED}*+\w++(?:(?:{ATTACHED}++|['.]|[,:](?=\d))\w++)*+{ATTACHED}*+"
    rf"|{ATTACHED}++|\.\.++|--++|[^\w\s]",
    re.IGNORECASE,
)
CLOSERS = r"""["')\]}*\u201d\u2019\u00bb]*+"""
SENTENCE_END = re.compile(
    rf"(?<![.!?])(?!\.\.++{CLOSERS}\s++[^\w\s]*+[a-z\d])[.!?]++{CLOSERS}(?=\s|$)"
)
"""Dots before a small letter or a digit end no sentence."""
UNENDING = re.compile(r"\b(?i:mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e)\.$")
ABBREVIATION = re.compile(
    r"(?:\b(?i:etc|jr|sr|inc|ltd|co|corp|gen|col|lt|sen|rep|jan|feb|aug|sept|oct|nov|dec)"
    r"|(?<![^\s(\[\"*\u201c])(?:[A-Za-z]\.)*[A-Za-z])\.$"
)
NUMBERED = re.compile(r"\b(?i:no|fig)\.$")
NEXT_WORD = re.compile(r"\s++[^\w\s]*+(\w{1,12})")
ITALIC, BOLD = re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*")
BULLET = re.compile(r"[ \t\r\f\v]*+(?:\*(?!\*)|-)")
STOP_WORDS = frozenset(
    (  # noqa: SIM905 a word a line would be a page
        "i me my myself we our ours ourselves you your yours yourself yourselves he him his "
        "himself she her hers herself it its itself they them "
        "their theirs themselves what which who whom this that these those am is are was "
        "were be been being have has had having do does did doing "
        "a an the and but if or because as until while of at by for with about against "
        "between into through during before after above below to "
        "from up down in out on off over under again further then once here there when where "
        "why how all any both each few more most other some "
        "such no nor not only own same so than too very s t can will just don should now d "
        "ll m o re ve y ain aren couldn didn doesn hadn hasn "
        "haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn"
    ).split()
)
"""NLTK's English stop words without an apostrophe: they are compared with runs of alphabetic
characters."""
FENCE, FENCE_LANGUAGE = "```", "json"
CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FIRST_WORD_EDGES = "'\""


def instruction(name: str) -> Callable[[Check], Check]:
    """Put a check into the table under the name that datasets use."""

    def register(check: Check) -> Check:
        INSTRUCTIONS[name] = check
        return check

    return register


def import_langdetect() -> Any:
    """Import langdetect, and make it give the same answer each time.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        import langdetect
    except ImportError as error:
        raise EnvironmentProblem(
            f"this reward needs the package langdetect ({error}); install relax-events[rewards]"
        ) from None
    langdetect.DetectorFactory.seed = 0
    return langdetect


def compares(count: int, relation: str | None, threshold: int) -> bool:
    """Compare by the name of a relation: `less than`, else `at least`."""
    if relation not in ("less than", "at least", None):
        raise ValueError(f"a relation must be 'less than' or 'at least', got {relation!r}")
    return count < threshold if relation == "less than" else count >= threshold


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, each with its end marks and what closes behind them: quotation
    marks, brackets, emphasis. A rest without an end mark is a sentence too; marks alone are none.
    """
    starts = [
        0,
        *(mark.end() for mark in SENTENCE_END.finditer(text) if not _abbreviates(text, mark.end())),
    ]
    pieces = (
        text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)
    )
    return [piece for piece in pieces if ALPHANUMERIC.search(piece)]


def _abbreviates(text: str, end: int) -> bool:
    """Return whether the dot before this index is that of an abbreviation within a sentence.

    It is behind a title always, behind "No" or "Fig" before a digit, and behind another
    abbreviation or one letter unless a function word with a capital follows.
    """
    before = text[max(end - 12, 0) : end]
    if UNENDING.search(before):
        return True
    follower = NEXT_WORD.match(text, end)
    word = follower[1] if follower else ""
    if NUMBERED.search(before):
        return word[:1].isdigit()
    return ABBREVIATION.search(before) is not None and not (
        word[:1].isupper() and word.lower() in STOP_WORDS
    )


def read_tokens(text: str) -> list[str]:
    """Return words and marks as NLTK does: a contraction such as "don't" is two words, and what
    hyphens, slashes or points join is one; a hyphen or a slash at its edge belongs to it.
    """
    return TOKEN.findall(CLITIC.sub(r" \1", text.replace("\u2019", "'")))


def count_sentences(text: str) -> int:
    """Count sentences."""
    return len(split_sentences(text))


@instruction("keywords:existence")
def keywords_existence(response: str, *, keywords: list[str]) -> bool:
    """All keywords occur."""
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


@instruction("keywords:frequency")
def keywords_frequency(
    response: str, *, keyword: str, frequency: int, relation: str | None = None
) -> bool:
    """A keyword occurs at least, or less than, so often."""
    return compares(
        len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency
    )


@instruction("keywords:forbidden_words")
def keywords_forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    """None of these words occurs."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words
    )


@instruction("keywords:letter_frequency")
def keywords_letter_frequency(
    response: str, *, letter: str, let_frequency: int, let_relation: str | None = None
) -> bool:
    """A letter occurs at least, or less than, so often, in either case."""
    if len(letter) != 1 or let_frequency < 0:
        raise ValueError(
            "instruction keywords:letter_frequency takes one letter and a number >= 0, got "
            f"{letter!r:.40} and {let_frequency}"
        )
    return compares(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def language_response_language(response: str, *, language: str) -> bool:
    """The response is in this language; a text that has none, such as numbers, passes."""
    package = import_langdetect()
    try:
        return bool(package.detect(response) == language)
    except package.LangDetectException:
        return True


@instruction("length_constraints:number_sentences")
def length_constraints_number_sentences(
    response: str, *, num_sentences: int, relation: str | None = None
) -> bool:
    """It has at least, or less than, so many sentences."""
    return compares(count_sentences(response), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def length_constraints_number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs stand between the marks `***`, none of them empty."""
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = [
        part for index, part in enumerate(parts) if part.strip() or index not in (0, len(parts) - 1)
    ]
    return len(inner) == num_paragraphs and all(part.strip() for part in inner)


@instruction("length_constraints:number_words")
def length_constraints_number_words(
    response: str, *, num_words: int, relation: str | None = None
) -> bool:
    """It has at least, or less than, so many words."""
    return compares(len(WORD.findall(response)), relation, num_words)


@instruction("length_constraints:nth_paragraph_first_word")
def length_constraints_nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """There are so many paragraphs, with an empty line between them, and the nth begins with this
    word, or these words. An empty paragraph is neither counted nor skipped over.
    """
    paragraphs = [part for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    expected = first_word.lower().split()
    words = paragraphs[nth_paragraph - 1].split()[: max(len(expected), 1)]
    return [re.split(r"[.,?!'\"]", word.lstrip(FIRST_WORD_EDGES))[0].lower() for word in words] == (
        expected
    )


@instruction("detectable_content:number_placeholders")
def detectable_content_number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets occur."""
    return sum(_num_bracketed(line) for line in response.split("\n")) >= num_placeholders


def _num_bracketed(line: str) -> int:
    num_found = start = 0
    while (start := line.find("[", start)) >= 0 and (end := line.find("]", start)) >= 0:
        num_found, start = num_found + 1, end
    return num_found


@instruction("detectable_content:postscript")
def detectable_content_postscript(response: str, *, postscript_marker: str) -> bool:
    """A postscript begins with this mark."""
    marker = postscript_marker.strip()
    pattern = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker))
    return re.search(pattern, response, re.IGNORECASE) is not None


@instruction("detectable_format:number_bullet_lists")
def detectable_format_number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Exactly so many lines are bullets, `* ` or `- `."""
    return sum(BULLET.match(line) is not None for line in response.split("\n")) == num_bullets


@instruction("detectable_format:constrained_response")
def detectable_format_constrained_response(response: str) -> bool:
    """One of the three permitted answers occurs."""
    return any(answer in response for answer in CONSTRAINED_RESPONSES)


@instruction("detectable_format:number_highlighted_sections")
def detectable_format_number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """At least so many parts are highlighted, as *this* or **this**.

    Both forms are counted independently, as in the published program: `***this***` counts twice.
    """
    parts = [*ITALIC.findall(response), *BOLD.findall(response)]
    return sum(bool(part.strip()) for part in parts) >= num_highlights


@instruction("detectable_format:multiple_sections")
def detectable_format_multiple_sections(
    response: str, *, section_spliter: str, num_sections: int
) -> bool:
    """At least so many sections begin with this word and a number."""
    return (
        len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response))
        >= num_sections
    )


@instruction("detectable_format:json_format")
def detectable_format_json_format(response: str) -> bool:
    """The whole response is JSON, a fence around it aside."""
    text = response.strip()
    if len(text) >= 2 * len(FENCE) and text.startswith(FENCE) and text.endswith(FENCE):
        text = text[len(FENCE) : -len(FENCE)]
        text = text[len(FENCE_LANGUAGE) :] if text.lower().startswith(FENCE_LANGUAGE) else text
    try:
        json.loads(text.strip())
    except (
        ValueError,
        RecursionError,
    ):  # a text nested deeper than Python reads is not taken for JSON
        return False
    return True


@instruction("detectable_format:title")
def detectable_format_title(response: str) -> bool:
    """A title stands in double angular brackets."""
    lines = (
        line[line.find("<<") : max(line.rfind(">>"), 0)]
        for line in response.split("\n")
        if "<<" in line
    )
    return any(title.lstrip("<").rstrip(">").strip() for title in lines)


@instruction("combination:two_responses")
def combination_two_responses(response: str) -> bool:
    """Two different responses, with six asterisks between them."""
    parts = response.split("******")
    kept = [
        part.strip()
        for index, part in enumerate(parts)
        if part.strip() or index not in (0, len(parts) - 1)
    ]
    return len(kept) == 2 and all(kept) and kept[0] != kept[1]


@instruction("combination:repeat_prompt")
def combination_repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """It begins with the prompt, word for word."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def startend_end_checker(response: str, *, end_phrase: str) -> bool:
    """It ends with this phrase, quotation marks aside."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def startend_quotation(response: str) -> bool:
    """It stands in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


@instruction("change_case:capital_word_frequency")
def change_case_capital_word_frequency(
    response: str, *, capital_frequency: int, capital_relation: str | None = None
) -> bool:
    """At least, or less than, so many words are all capitals."""
    return compares(
        sum(token.isupper() for token in read_tokens(response)),
        capital_relation,
        capital_frequency,
    )


@instruction("change_case:english_capital")
def change_case_english_capital(response: str) -> bool:
    """It is English, and has no small letter."""
    return response.isupper() and language_response_language(response, language="en")


@instruction("change_case:english_lowercase")
def change_case_english_lowercase(response: str) -> bool:
    """It is English, and has no capital letter."""
    return response.islower() and language_response_language(response, language="en")


@instruction("punctuation:no_comma")
def punctuation_no_comma(response: str) -> bool:
    """There is no comma."""
    return "," not in response
