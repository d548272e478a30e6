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
    ATTACHED_MARKS,
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
EMOJI = re.compile(
    r"[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u23cf"
    r"\u23e9-\u23f3\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2604\u260e\u2611"
    r"\u2614\u2615\u2618\u261d\u2620\u2622\u2623\u2626\u262a\u262e\u262f\u2638-\u263a\u2640\u2642"
    r"\u2648-\u2653\u265f\u2660\u2663\u2665\u2666\u2668\u267b\u267e\u267f\u2692-\u2697\u2699\u269b"
    r"\u269c\u26a0\u26a1\u26a7\u26aa\u26ab\u26b0\u26b1\u26bd\u26be\u26c4\u26c5\u26c8\u26ce\u26cf\u26d1"
    r"\u26d3\u26d4\u26e9\u26ea\u26f0-\u26f5\u26f7-\u26fa\u26fd\u2702\u2705\u2708-\u270d\u270f\u2712"
    r"\u2714\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763\u2764"
    r"\u2795-\u2797\u27a1\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d"
    r"\u3297\u3299\U0001f004\U0001f0cf\U0001f170-\U0001f171\U0001f17e\U0001f17f\U0001f18e"
    r"\U0001f191-\U0001f19a\U0001f1e6-\U0001f202\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f250"
    r"\U0001f251\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f7e0-\U0001f7f0\U0001f90c-\U0001f9ff"
    r"\U0001fa70-\U0001faff]"
)
"""Unicode's emoji; whole blocks from U+1F300 on, with the halves of flags."""
INNER_MARKS = "".join(re.escape(mark) for mark in string.punctuation if mark not in ".!?")
PICTOGRAPHS_BEHIND = re.compile(
    rf"(?<![.!?])([.!?]++)([\s{INNER_MARKS}]*+)([^\w\s.!?{INNER_MARKS}]++)"
)
QUOTED_FIELD = re.compile(r'((?:"[^"]*(?:"|$)|[^"\t\n])*+)(\t|\n|$)')
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
    return all(EMOJI.search(sentence[-2:]) for sentence in sentences)


def _with_what_follows(text: str) -> list[str]:
    """Return the sentences, each with the pictographs behind its end mark."""
    return split_sentences(PICTOGRAPHS_BEHIND.sub(r"\3\1\2 ", text))


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
    """There are bullets *, each with a bullet - below it."""
    bullets = response.split("*")[1:]
    return bool(bullets) and all("-" in bullet for bullet in bullets)


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
    """Every word begins with a capital, marks in front aside; a clitic such as "'s" is no word."""
    words = [word for token in read_tokens(response) if (word := token.lstrip(ATTACHED_MARKS))]
    return not any(
        word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper())
        for word in words
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
    header, _, rest = response.partition("\n")
    columns = tuple(f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score"))
    rows = [re.split(r"\t *", header.strip(" \r")), *_split_at_tabs(rest)]
    is_quoted = all(
        len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row
    )
    return is_quoted and _is_table(rows, columns, num_rows=3)


def _split_at_tabs(text: str) -> list[list[str]]:
    """Return the rows of a table with fields as they stand, without blanks around them; line ends
    and tabs between quotation marks belong to their field.
    """
    rows: list[list[str]] = [[]]
    for match in QUOTED_FIELD.finditer(text.removesuffix("\n")):
        rows[-1].append(match[1].strip())
        if match[2] == "\n":
            rows.append([])
        elif not match[2]:
            break
    return rows


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
