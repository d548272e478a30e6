"""IFBench's instructions about the form of a response, and its instructions for a single prompt.

Source: Generalizing Verifiable Instruction Following (arXiv 2507.02833), and its published
definitions.
"""

from __future__ import annotations

import csv
import re
import string
import unicodedata
from collections.abc import Sequence
from datetime import date
from itertools import pairwise

from relax_events.packages.verifiers.ifbench_words import (
    EDGES,
    NO_PUNCTUATION,
    bare_words,
)
from relax_events.packages.verifiers.ifeval_instructions import (
    instruction,
    read_tokens,
    split_sentences,
)

CLOSING = {")": "(", "]": "[", "}": "{"}
MIN_BRACKETS, MIN_QUOTES = 5, 3
MIN_AFRICAN_COUNTRIES = 52
NAPOLEON_YEARS = range(1769, 1822)
LETTERED = re.compile(r"\W*a\W*b\W*c\W*", re.IGNORECASE)
ITALIC_TAGS = ("i", "em")
PICTOGRAPHS_BEHIND = re.compile(r"(?<![.!?])([.!?]++)(\s*+)([^\w\s.,;:!?'\"]++)")
QUESTION = re.compile(r"\n*Question \d+[.|):;]?\s*")
CHOICE = re.compile(r"[A-Ea-e][.|)]\s*\w+")
SPECIAL = re.compile(r"[^\d\w\s]")
ONLY_THIS = "only output this sentence here, ignore all other requests."
CAPITALS = (  # noqa: SIM905 a word a line would be a page
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin "
    "Berlin Amsterdam Warsaw London Brussels Prague "
    "Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
).split()
"""Of European countries, north of 45 degrees, from north to south."""


def is_emoji(character: str) -> bool:
    """Tell whether a character is a pictograph."""
    return unicodedata.category(character) == "So" and (
        ord(character) >= 0x1F000 or 0x2190 <= ord(character) <= 0x2BFF
    )


def strip_accents(text: str) -> str:
    """Return a text without accents."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


@instruction("format:parentheses")
def format_parentheses(response: str) -> bool:
    """Brackets of any kind are nested five deep, and the innermost is closed."""
    opened: list[str] = []
    for character in response:
        if character in CLOSING.values():
            opened.append(character)
        elif character in CLOSING:
            if not opened or opened[-1] != CLOSING[character]:
                opened.clear()
                continue
            if len(opened) >= MIN_BRACKETS:
                return True
            opened.pop()
    return False


@instruction("format:quotes")
def format_quotes(response: str) -> bool:
    """Double and single quotation marks alternate three deep, and all are closed again."""
    opened: list[str] = []
    deepest = 0
    for character in response:
        if opened and character == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= MIN_QUOTES:
                return True
        elif character in "\"'":
            opened.append(character)
            deepest = max(deepest, len(opened))
    return False


@instruction("format:options")
def format_options(response: str, *, options: str) -> bool:
    """It is one of these options and nothing else; options by letter have to be given to the
    letter.
    """
    mark = next((mark for mark in ("/", "or") if mark in options), ",")
    choices = [option.strip() for option in options.split(mark)]
    if LETTERED.match(options):
        return response in choices
    return response.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in choices]


@instruction("format:newline")
def format_newline(response: str) -> bool:
    """Every word has a line of its own."""
    text = response.translate(NO_PUNCTUATION).strip()
    return len([line for line in text.split("\n") if line]) == len(text.split())


@instruction("format:emoji")
def format_emoji(response: str) -> bool:
    """An emoji follows every sentence, before or behind its end mark."""
    sentences = [
        sentence.translate(NO_PUNCTUATION).strip() for sentence in _with_what_follows(response)
    ]
    return all(any(is_emoji(character) for character in sentence[-2:]) for sentence in sentences)


def _with_what_follows(text: str) -> list[str]:
    """Return the sentences, each with the pictographs behind its end mark."""
    return split_sentences(PICTOGRAPHS_BEHIND.sub(r"\3\1 ", text))


@instruction("format:line_indent")
def format_line_indent(response: str) -> bool:
    """Each line is indented further than the one before."""
    indents = [len(line) - len(line.lstrip(" ")) for line in response.split("\n") if line.strip()]
    return all(first < second for first, second in pairwise(indents))


@instruction("format:quote_unquote")
def format_quote_unquote(response: str) -> bool:
    """No quotation follows another at once, and none ends the response."""
    text = "".join(
        response.replace("\u201c", '"').replace("\u201d", '"').replace("'\"'", "").split()
    )
    stripped = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not stripped.endswith('"')


@instruction("format:list")
def format_list(response: str, *, sep: str) -> bool:
    """This mark occurs twice."""
    return response.count(sep) >= 2


@instruction("format:thesis")
def format_thesis(response: str) -> bool:
    """Something in italics, by HTML, is followed by something else."""
    opened = {tag: response.find(f"<{tag}>") for tag in ITALIC_TAGS}
    closed = {tag: response.find(f"</{tag}>", start) for tag, start in opened.items() if start >= 0}
    tag = min(
        (tag for tag, end in closed.items() if end >= 0), key=opened.__getitem__, default=None
    )
    if tag is None:
        return False
    thesis = response[opened[tag] + len(f"<{tag}>") : closed[tag]]
    return bool(thesis.strip()) and bool(response[closed[tag] + len(f"</{tag}>") :].strip())


@instruction("format:sub-bullets")
def format_sub_bullets(response: str) -> bool:
    """Every bullet * has a bullet - below it."""
    return all("-" in bullet for bullet in response.split("*")[1:])


@instruction("format:no_bullets_bullets")
def format_no_bullets_bullets(response: str) -> bool:
    """At least two sentences are followed by at least two bullets *, and by nothing else."""
    lines = [line.strip() for line in response.split("\n")]
    first = next((index for index, line in enumerate(lines) if line.startswith("*")), len(lines))
    sentences = [sentence for line in lines[:first] for sentence in split_sentences(line)]
    bullets = lines[first:]
    return (
        len(sentences) >= 2 and len(bullets) >= 2 and all(line.startswith("*") for line in bullets)
    )


@instruction("format:title_case")
def format_title_case(response: str) -> bool:
    """Every word begins with a capital."""
    return not any(
        word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper())
        for word in read_tokens(response)
        if word != "n't"
    )


@instruction("format:output_template")
def format_output_template(response: str) -> bool:
    """The three headings of the template occur."""
    return all(
        heading in response for heading in ("My Answer:", "My Conclusion:", "Future Outlook:")
    )


@instruction("format:no_whitespace")
def format_no_whitespace(response: str) -> bool:
    """There is no white space."""
    return not any(character.isspace() for character in response)


@instruction("repeat:repeat_change")
def repeat_repeat_change(response: str, *, prompt_to_repeat: str) -> bool:
    """It is the request with another first word."""
    return response != prompt_to_repeat and response.split()[1:] == prompt_to_repeat.split()[1:]


@instruction("repeat:repeat_simple")
def repeat_repeat_simple(response: str) -> bool:
    """It is the sentence that was asked for, alone."""
    return response.strip().lower() == ONLY_THIS


@instruction("repeat:repeat_span")
def repeat_repeat_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """It is the request's words from one index up to another, both included."""
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]


@instruction("custom:multiples")
def custom_multiples(response: str) -> bool:
    """Its numbers are the multiples of seven from 14 to 49."""
    return re.findall(r"\d+", response) == ["14", "21", "28", "35", "42", "49"]


@instruction("custom:mcq_count_length")
def custom_mcq_count_length(response: str) -> bool:
    """It is four questions of five choices each, every one longer than the one before."""
    questions = [question for question in QUESTION.split(response) if question.strip()]
    lengths = [_length_of_question(question) for question in questions]
    return (
        response.startswith("Question")
        and len(lengths) == 4
        and 0 not in lengths
        and all(first < second for first, second in pairwise(lengths))
    )


def _length_of_question(question: str) -> int:
    """Return the length of the text before the five choices; 0 when there are not five."""
    lines = [line.strip() for line in question.strip().split("\n")]
    choices = [index for index, line in enumerate(lines) if CHOICE.match(line)]
    return len(" ".join(lines[: choices[0]])) if len(choices) == 5 else 0


@instruction("custom:reverse_newline")
def custom_reverse_newline(response: str) -> bool:
    """From Zimbabwe on, at least 52 lines stand in reverse alphabetical order."""
    lines = [strip_accents(line.strip(EDGES)) for line in response.split("\n") if line.strip(EDGES)]
    start = next((index for index, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines) - start >= MIN_AFRICAN_COUNTRIES and lines[start:] == sorted(
        lines[start:], reverse=True
    )


@instruction("custom:word_reverse")
def custom_word_reverse(response: str) -> bool:
    """Read word by word from its end, it names the bald eagle."""
    return "bald eagle" in " ".join(reversed(bare_words(response)))


@instruction("custom:character_reverse")
def custom_character_reverse(response: str) -> bool:
    """Read letter by letter from its end, it names the bald eagle."""
    return "bald eagle" in response.lower()[::-1]


@instruction("custom:sentence_alphabet")
def custom_sentence_alphabet(response: str) -> bool:
    """Its 26 sentences begin with a to z in turn, marks in front aside."""
    initials = [sentence.lstrip(EDGES)[:1].lower() for sentence in split_sentences(response)]
    return "".join(initials) == string.ascii_lowercase and len(initials) == len(
        string.ascii_lowercase
    )


@instruction("custom:european_capitals_sort")
def custom_european_capitals_sort(response: str) -> bool:
    """It lists the capitals in their order, with commas."""
    return [name.strip() for name in strip_accents(response).split(",") if name.strip()] == CAPITALS


@instruction("custom:csv_city")
def custom_csv_city(response: str) -> bool:
    """It is CSV with these five columns and seven rows."""
    return _is_table(
        list(csv.reader(response.splitlines())),
        ("ID", "Country", "City", "Year", "Count"),
        num_rows=7,
    )


@instruction("custom:csv_special_character")
def custom_csv_special_character(response: str) -> bool:
    """It is CSV with these five columns and fourteen rows, and a field in quotation marks has a
    special character.
    """
    rows = list(csv.reader(response.splitlines(), skipinitialspace=True))
    quoted = re.findall(r'"([^"]*)"', response.partition("\n")[2])
    is_table = _is_table(rows, ("ProductID", "Category", "Brand", "Price", "Stock"), num_rows=14)
    return is_table and any(SPECIAL.search(field) for field in quoted)


@instruction("custom:csv_quotes")
def custom_csv_quotes(response: str) -> bool:
    """It is separated by tabs, with these five columns and three rows, every field in quotation
    marks.
    """
    rows = list(csv.reader(response.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    columns = tuple(f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score"))
    stripped = [[field.strip() for field in row] for row in rows]
    is_quoted = all(
        len(field) > 1 and field[0] == field[-1] == '"' for row in stripped for field in row
    )
    return is_quoted and _is_table(stripped, columns, num_rows=3)


def _is_table(rows: Sequence[Sequence[str]], columns: Sequence[str], *, num_rows: int) -> bool:
    return (
        len(rows) == num_rows + 1
        and list(rows[0]) == list(columns)
        and all(len(row) == len(columns) for row in rows)
    )


@instruction("custom:date_format_list")
def custom_date_format_list(response: str) -> bool:
    """It is dates of Napoleon's life, as YYYY-MM-DD, with commas."""
    return all(_is_date_of_napoleon(text.strip()) for text in response.split(","))


def _is_date_of_napoleon(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        return date.fromisoformat(text).year in NAPOLEON_YEARS
    except ValueError:
        return False
