"""IFBench's instructions: for each a response that follows it and one that does not, by the paper's
definitions.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.packages.verifiers import ifbench_words
from relax_events.packages.verifiers.ifeval import ifeval
from relax_events.packages.verifiers.ifeval_instructions import INSTRUCTIONS

pytestmark = pytest.mark.unit
PALINDROMES = "level radar civic rotor kayak refer madam tenet stats solos"
QUESTIONS = "\n\n".join(
    f"Question {number}. {'What is this ' * number}?\n"
    + "\n".join(f"{letter}) one" for letter in "ABCDE")
    for number in range(1, 5)
)
AFRICA = "\n".join(
    ["Zimbabwe", *sorted((f"Country {number:02d}" for number in range(51)), reverse=True)]
)
ALPHABET = " ".join(f"{letter}nd so on." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
CAPITALS = (
    "Reykjav\u00edk, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, "
    "Minsk, Dublin, Berlin, Amsterdam, Warsaw, "
    "London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chi\u0219in\u0103u, Bern, Ljubljana, Zagreb"
)
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(
    f"{number},Norway,Oslo,2020,3" for number in range(7)
)
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(
    f'{number},toys,"A&B",3,4' for number in range(14)
)
GRADES = "\n".join(
    '"' + '"\t"'.join(row) + '"'
    for row in [
        ("StudentID", "Subject", "Grade", "Semester", "Score"),
        *[("1", "art", "A", "2", "9")] * 3,
    ]
)
KEYWORDS = {
    f"keyword{number}": word for number, word in enumerate(["ant", "bee", "cat", "dog", "elk"], 1)
}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "count:word_count_range",
        {"min_words": 2, "max_words": 3},
        "one two three",
        "one two three four",
    ),
    ("count:unique_word_count", {"N": 3}, "One, two; three.", "One two one Two."),
    ("count:conjunctions", {"small_n": 2}, "Here and there, or so.", "and And and"),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Emmanuel."),
    ("count:numbers", {"N": 2}, "3,000 and 4.5", "3 and 4 and 5"),
    ("count:pronouns", {"N": 3}, "she/her and it", "she and the cat"),
    ("count:punctuation", {}, "A, b; c: d! E? F. G?!", "A, b; c: d! E? F."),
    ("count:words_japanese", {"N": 2}, "one \u732b two \u72ac three", "one cat two dog"),
    (
        "count:keywords_multiple",
        KEYWORDS,
        "ant " + "bee " * 2 + "cat " * 3 + "dog " * 5 + "elk " * 7,
        "ant bee cat dog elk",
    ),
    ("ratio:sentence_type", {}, "This is so. That is so. Is it?", "This is so. Is it?"),
    ("ratio:sentence_balance", {}, "It is. Is it? It is!", "It is. Is it?"),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 50}, "a b c x", "a b c d"),
    (
        "ratio:stop_words",
        {"percentage": 50.0},
        "the old house of bricks stands",
        "the house of the old",
    ),
    (
        "ratio:sentence_words",
        {},
        "Cats run. Dogs sit. Cows eat.",
        "Cats run. Dogs sit. Cows ate it.",
    ),
    ("words:alphabet", {}, "Young zebras always bathe.", "Young zebras bathe."),
    ("words:vowel", {}, "An apple tree", "An apple or unit, I see"),
    ("words:consonants", {}, "Bright stars glint", "A star"),
    ("words:palindrome", {}, PALINDROMES, "level radar noon"),
    ("words:prime_lengths", {}, "We see three", "We look"),
    ("words:repeats", {"small_n": 2}, "so, so it is", "so so So"),
    ("words:last_first", {}, "He saw rain. Rain fell.", "He saw rain. It fell."),
    ("words:paragraph_last_first", {}, "Rain is only rain.\nso it is so", "Rain is wet."),
    ("words:no_consecutive", {}, "one two one", "two three"),
    (
        "words:words_position",
        {"keyword": "rain"},
        "The rain was only rain again.",
        "The rain was only rain.",
    ),
    (
        "words:keywords_specific_position",
        {"keyword": "rain", "n": 2, "m": 3},
        "So. It was rain.",
        "So. It rain was.",
    ),
    ("sentence:keyword", {"word": "rain", "N": 2}, "So. Rain fell.", "Rain. It fell in trains."),
    ("sentence:increment", {"small_n": 1}, "It is. It is so. It is so wet.", "It is. It is."),
    (
        "sentence:alliteration_increment",
        {},
        "All is well. Big bears roam. Six silly snakes sing.",
        "Big bears roam. Tall trees sway.",
    ),
    ("format:parentheses", {}, "a (b [c {d (e [f])}])", "a (b [c {d (e)}])"),
    ("format:quotes", {}, 'He said "she said \'they said "no" to me\' once".', 'He said "no".'),
    ("format:options", {"options": "yes/no/maybe"}, "Yes.", "Yes, sure"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "b"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know", "I don't"),
    ("format:newline", {}, "one\ntwo\n\nthree!", "one two\nthree"),
    (
        "format:emoji",
        {},
        "It is late. \U0001f600 Good night \U0001f319.",
        "It is late. \U0001f600 Good night.",
    ),
    ("format:line_indent", {}, "a\n b\n\n  c", "a\n b\n b"),
    ("format:quote_unquote", {}, '"To be" means to live.', 'He said "to be".'),
    ("format:list", {"sep": "!?!?"}, "!?!? one\n!?!? two", "- one\n- two"),
    ("format:thesis", {}, "<i>It is so.</i> Because.", "<i></i> Because."),
    ("format:thesis", {}, "<em>Both</em> hold, <i>he said", "<em> </em> both <i>hold</i>"),
    ("format:sub-bullets", {}, "* one\n  - a\n* two\n  - b", "* one\n  - a\n* two"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* three\n* four", "One.\n* three\n* four"),
    ("format:title_case", {}, "The Sun Also Rises, 2 Times", "The Sun also Rises"),
    (
        "format:output_template",
        {},
        "My Answer: a\nMy Conclusion: b\nFuture Outlook: c",
        "My Answer: a",
    ),
    ("format:no_whitespace", {}, "all-in-one", "all in one"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Tell me why."}, "Show me why.", "Tell me why."),
    (
        "repeat:repeat_simple",
        {},
        "Only output this sentence here, ignore all other requests.",
        "Yes. Only output this sentence here.",
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d e", "n_start": 1, "n_end": 3},
        "b c d",
        "b c",
    ),
    ("custom:multiples", {}, "14, 21, 28,35, 42 and 49", "7, 14, 21"),
    ("custom:mcq_count_length", {}, QUESTIONS, f"Here they are:\n{QUESTIONS}"),
    ("custom:reverse_newline", {}, AFRICA, "Zimbabwe\nZambia"),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, "elgae dlab eht si tI", "It is the bald eagle"),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET.replace("Cnd", "Dnd")),
    (
        "custom:european_capitals_sort",
        {},
        CAPITALS,
        CAPITALS.replace("Helsinki, Oslo", "Oslo, Helsinki"),
    ),
    ("custom:csv_city", {}, CITIES, CITIES + "\n8,Norway,Oslo,2020,3"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace("A&B", "AB")),
    ("custom:csv_quotes", {}, GRADES, GRADES.replace('"art"', "art")),
    ("custom:date_format_list", {}, "1796-05-10, 1805-12-02", "1796-05-10, 1805-02-30"),
]
ENGLISH_CASES = [
    ("syllapy", "words:odd_even_syllables", "The sunshine may regret", "The small cat"),
    ("textblob", "words:start_verb", "Write it down.", "The cat writes."),
    ("textblob", "words:start_verb", "**Discover** the world.", "Green apples grow."),
    ("textblob", "words:start_verb", "List the oldest houses.", "Yesterday the house fell."),
    ("textblob", "words:start_verb", "-Open your book.", "Music I love is old."),
]


def follow(response: str, name: str, kwargs: dict[str, Any]) -> float:
    metadata = {"instruction_id_list": [name], "kwargs": [kwargs]}
    return ifeval(response, answer="", metadata=metadata, prompt="")["reward"]


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), CASES)
def test_instruction_accepts_only_a_response_that_follows_it(
    name: str, kwargs: dict[str, Any], good: str, bad: str
) -> None:
    assert follow(good, name, kwargs) == 1.0
    assert follow(bad, name, kwargs) == 0.0


REPAIRED: list[tuple[str, dict[str, Any], str, float]] = [
    (
        "words:keywords_specific_position",
        {"keyword": "target", "n": 1, "m": 3},
        "alpha, beta target gamma.",
        1.0,
    ),
    (
        "words:words_position",
        {"keyword": "whisper"},
        "The whisper was only a faint whisper indeed.",
        1.0,
    ),
    ("words:words_position", {"keyword": "whisper"}, "The whisper was only a faint whisper.", 0.0),
    ("words:words_position", {"keyword": "whisper"}, "No.", 0.0),
    ("words:words_position", {"keyword": "so"}, "It (so) ends: so it", 1.0),
    ("words:words_position", {"keyword": "so"}, '"It, so," he says - so it.', 1.0),
    (
        "count:keywords_multiple",
        KEYWORDS,
        "ant " + "beehive bee " * 2 + "cat " * 3 + "dog " * 5 + "elk " * 7,
        1.0,
    ),
    (
        "count:keywords_multiple",
        KEYWORDS,
        "ant " + "bee " * 2 + "cat " * 3 + "dog " * 5 + "elks " * 7,
        0.0,
    ),
    ("count:pronouns", {"N": 3}, "They're sure that everyone left.", 1.0),
    ("count:pronouns", {"N": 4}, "They're sure that everyone left.", 0.0),
    ("count:pronouns", {"N": 3}, "she/her/hers", 1.0),
    ("ratio:sentence_words", {}, "Cat. Cat. Cat.", 0.0),
    ("ratio:sentence_words", {}, "Cats run. Dogs sit. Cats eat.", 0.0),
    ("custom:sentence_alphabet", {}, ALPHABET.replace("And", '"And'), 1.0),
    ("custom:sentence_alphabet", {}, ALPHABET.replace("Cnd", "(Cnd"), 1.0),
    (
        "ratio:overlap",
        {"reference_text": "one two three four", "percentage": 100},
        "one two three",
        1.0,
    ),
    ("ratio:overlap", {"reference_text": "threefold", "percentage": 100}, "three", 0.0),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c", "n_start": 0, "n_end": 0}, "a", 1.0),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c", "n_start": 0, "n_end": 0}, "", 0.0),
    ("format:title_case", {}, "Don't Stop", 1.0),
]
"""Verdicts of the published program as repaired from 2026-04 on, worked out by hand."""


MARKS: list[tuple[str, dict[str, Any], str, float]] = [
    ("count:unique_word_count", {"N": 3}, "one - two", 0.0),
    ("count:words_japanese", {"N": 2}, "one - \u732b two \u72ac", 1.0),
    ("words:consonants", {}, "Bright stars - glint", 1.0),
    ("count:conjunctions", {"small_n": 2}, "and - And, & but.", 1.0),
    ("count:unique_word_count", {"N": 3}, "one \u2013 two", 0.0),
    ("count:words_japanese", {"N": 2}, "one \u2014 \u732b two \u72ac", 1.0),
    ("words:consonants", {}, "Bright stars \u2014 glint", 1.0),
    ("words:prime_lengths", {}, "We see \u2014 three", 1.0),
    ("words:alphabet", {}, "Young zebras \u2013 always bathe.", 1.0),
    ("sentence:increment", {"small_n": 1}, "It is. It \u2013 is so.", 1.0),
]
"""Marks alone are no words, here where the published program still counts them."""


AS_NLTK: list[tuple[str, dict[str, Any], str, float]] = [
    ("sentence:keyword", {"word": "rain", "N": 2}, "**One.** Rain fell.", 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "Ask Gen Z. They like rain.", 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "By J. Rain. So.", 0.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "In the U.S. Rain fell.", 0.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "See main.c. Rain fell.", 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "He said no. Rain fell.", 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "See No. 5. Rain fell.", 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, '"So..." he said. Rain fell.', 1.0),
    ("sentence:keyword", {"word": "rain", "N": 2}, "\u201cSo.\u201d Rain fell.", 1.0),
    ("format:emoji", {}, 'He said "so." \U0001f914\n"Yes." \U0001f512', 1.0),
    ("format:emoji", {}, "Yes. \U0001fa77 No. \U0001f1e9\U0001f1ea", 1.0),
    ("format:emoji", {}, "Yes \u2605.", 0.0),
    ("format:title_case", {}, "Wait\u2026what Now", 1.0),
    ("format:title_case", {}, "The Party's Name", 1.0),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 0}, "-a b c", 1.0),
    ("ratio:overlap", {"reference_text": "a b c d", "percentage": 100}, "a b c", 1.0),
    ("words:last_first", {}, "R'ain ra,in. Rain fell.", 0.0),
    ("custom:csv_quotes", {}, GRADES.replace("art", "fine\nart"), 1.0),
    ("custom:csv_quotes", {}, GRADES.replace('Subject"', 'Subject" '), 0.0),
    ("custom:csv_quotes", {}, GRADES.replace("\n", "\n\n"), 0.0),
]
"""Verdicts of the published program that rules without NLTK's data reproduce."""


RIGHT: list[tuple[str, dict[str, Any], str, float]] = [
    ("ratio:sentence_type", {}, 'He said "so." It is. "Is it?"', 1.0),
    ("ratio:sentence_type", {}, "This is so. That is so. **Is it?**:", 1.0),
    ("ratio:sentence_type", {}, "no", 0.0),
    ("ratio:sentence_balance", {}, "no", 0.0),
    ("ratio:sentence_balance", {}, "It is. ? It is!", 0.0),
    ("format:sub-bullets", {}, "one - two", 0.0),
    ("format:title_case", {}, "-the *Sun", 0.0),
    ("words:last_first", {}, "He saw rain. Rain.", 1.0),
    ("words:last_first", {}, "He saw rain. Rain, as ever.", 1.0),
    ("words:words_position", {"keyword": "so"}, "It so - so- it", 1.0),
    ("count:pronouns", {"N": 2}, "-she, it\u2026", 1.0),
]
"""Verdicts by an instruction's words that the published program does not give."""


@pytest.mark.parametrize(
    ("name", "kwargs", "response", "reward"), [*REPAIRED, *MARKS, *AS_NLTK, *RIGHT]
)
def test_instruction_follows_the_repaired_program(
    name: str, kwargs: dict[str, Any], response: str, reward: float
) -> None:
    assert follow(response, name, kwargs) == reward


def test_all_58_instructions_are_covered() -> None:
    families = {"count", "ratio", "words", "sentence", "format", "repeat", "custom"}
    covered = {name for name, *_ in CASES} | {name for _, name, *_ in ENGLISH_CASES}
    assert covered == {name for name in INSTRUCTIONS if name.partition(":")[0] in families}
    assert len(covered) == 58


@pytest.mark.parametrize(
    "response", ["...", "?!", "_ _", "So. _. It", '"', "\n\n\n", "((((((", "\u00e9", "1"]
)
def test_unusual_responses_are_scored_without_errors(response: str) -> None:
    assert {follow(response, name, kwargs) for name, kwargs, *_ in CASES} <= {0.0, 1.0}


@pytest.mark.parametrize(("package", "name", "good", "bad"), ENGLISH_CASES)
def test_english_instruction_accepts_only_a_response_that_follows_it(
    package: str, name: str, good: str, bad: str
) -> None:
    pytest.importorskip(package)
    assert follow(good, name, {}) == 1.0
    assert follow(bad, name, {}) == 0.0


@pytest.mark.parametrize(
    ("name", "package"), [("words:odd_even_syllables", "syllapy"), ("words:start_verb", "textblob")]
)
def test_instruction_fails_naming_its_missing_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ifbench_words._tagger.cache_clear()
    for module in ("syllapy", "textblob", "textblob.en", "textblob.en.taggers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        EnvironmentProblem,
        match=rf"{name} needs the package {package} .*install relax-events\[english\]",
    ):
        follow("Write it down.", name, {})
