"""IFEval's instructions: for each a response that follows it and one that does not, by the paper's
definitions.
"""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.packages.verifiers.ifeval import ifeval, variants
from relax_events.packages.verifiers.ifeval_instructions import INSTRUCTIONS, count_sentences

pytestmark = pytest.mark.unit
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "rain"]}, "Rain, then sunshine.", "Only sun."),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        "Sun and sun",
        "sun",
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        "sun",
        "sun sun",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "sunny", "The Sun!"),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        "Eleven",
        "one",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein ganz gew\u00f6hnlicher deutscher Satz.",
        "This is a plain sentence in English.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Two!",
        "Dr. No is one.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "One.",
        "One. Two.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "One\n***\nTwo\n***\n",
        "One\n***\n***\nTwo",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "one two three",
        "one two",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First this.\n\n'then, that.",
        "First.\n\nNow that.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"},
        "So.",
        "So.\n\nso",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] at [address]",
        "[name]",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. more", "Bye."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. more", "P.S. more"),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "* one\n- two",
        "* one\n* two\n* three",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* one\n**not one**", "none"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "No."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        "*one* and ** **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "Here: <<<Ode>> to <<joy>> .", "<<Ode to joy"),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[a [b] c] [d]",
        "[a [b] c] [d",
    ),
    ("detectable_format:title", {}, "<<Ode to joy>>\nO friends", "<< >>\nO friends"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    (
        "startend:end_checker",
        {"end_phrase": "Is that all?"},
        'Yes. "Is that all?"',
        "Is that all? Yes.",
    ),
    ("startend:quotation", {}, '"quoted"', '"half'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO, I said",
        "NO, said she",
    ),
    (
        "change_case:english_capital",
        {},
        "THIS IS A SENTENCE IN ENGLISH.",
        "This is a sentence in English.",
    ),
    (
        "change_case:english_lowercase",
        {},
        "this is a sentence in english.",
        "This is a sentence in English.",
    ),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


def follow(response: str, *named: tuple[str, dict[str, Any]], **options: Any) -> dict[str, float]:
    metadata = {
        "instruction_id_list": [name for name, _ in named],
        "kwargs": [kwargs for _, kwargs in named],
    }
    return ifeval(response, answer="", metadata=metadata, prompt="The prompt.", **options)


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), CASES)
def test_instruction_accepts_only_a_response_that_follows_it(
    name: str, kwargs: dict[str, Any], good: str, bad: str
) -> None:
    padded = kwargs | {"num_anything_else": None}  # datasets keep a column for every argument
    assert follow(good, (name, padded)) == {"reward": 1.0, "followed": 1.0}
    assert follow(bad, (name, padded)) == {"reward": 0.0, "followed": 0.0}
    assert follow("", (name, padded))["reward"] == 0.0


def test_all_25_instructions_are_covered() -> None:
    names = {name for name, *_ in CASES}
    assert len(names) == 25
    assert names <= INSTRUCTIONS.keys()


def test_ifeval_requires_all_instructions_or_returns_the_fraction_followed() -> None:
    both = [("punctuation:no_comma", {}), ("detectable_format:title", {})]
    assert follow("no title", *both) == {"reward": 0.0, "followed": 0.5}
    assert follow("no title", *both, partial=True) == {"reward": 0.5, "followed": 0.5}
    assert follow("<think>a, b</think><<A title>>", *both)["reward"] == 1.0


def test_loose_mode_ignores_text_around_the_answer() -> None:
    quoted = ("startend:quotation", {})
    text = 'Sure, here it is:\n"the answer"\nAnything else?'
    assert (follow(text, quoted)["reward"], follow(text, quoted, mode="loose")["reward"]) == (
        0.0,
        1.0,
    )
    assert follow('**"the answer"**', quoted, mode="loose")["reward"] == 1.0
    assert variants("a*\nb\nc") == [
        "a*\nb\nc",
        "b\nc",
        "a*\nb",
        "b",
        "a\nb\nc",
        "b\nc",
        "a\nb",
        "b",
    ]


@pytest.mark.parametrize(
    ("response", "instructions", "reward"),
    [
        (
            "ox ox ox",
            [("keywords:frequency", {"keyword": "ox", "frequency": 3, "relation": "less than"})],
            0,
        ),
        (
            "ox ox",
            [("keywords:frequency", {"keyword": "ox", "frequency": 3, "relation": "less than"})],
            1,
        ),
        ("a b", [("keywords:existence", {"keywords": [one]}) for one in "ac"], 0),
        ("a b", [("keywords:existence", {"keywords": [one]}) for one in "ca"], 0),
        ("a b", [("keywords:existence", {"keywords": [one]}) for one in "ab"], 1),
        ("prompt", [("combination:repeat_prompt", {"prompt_to_repeat": "the prompt."})], 0),
        ("so the prompt.", [("combination:repeat_prompt", {"prompt_to_repeat": "the prompt."})], 0),
    ],
)
def test_each_instruction_of_a_sample_is_checked_with_its_own_arguments(
    response: str, instructions: list[tuple[str, dict[str, Any]]], reward: float
) -> None:
    assert follow(response, *instructions)["reward"] == reward


@pytest.mark.parametrize(
    ("name", "response", "count"),
    [
        ("number_highlighted_sections", "* **Bold**: an item", 2),
        ("number_highlighted_sections", "***both***", 2),
        ("number_highlighted_sections", "**one** and *two*", 2),
        ("number_highlighted_sections", "** ** and * *", 0),
        ("capital_word_frequency", "The U.S. and NASA", 2),
        ("capital_word_frequency", "I'M in an X-RAY AND/OR P.P.S", 5),
        ("capital_word_frequency", "A1 and 42", 1),
    ],
)
def test_parts_and_words_are_counted_as_by_the_published_program(
    name: str, response: str, count: int
) -> None:
    """Its counts on these texts, by lm-eval 0.4.13's copy and NLTK 3.10.4's word tokenizer."""
    room = "detectable_format" if name.startswith("number") else "change_case"
    limit = "num_highlights" if name.startswith("number") else "capital_frequency"
    for threshold in range(1, 8):
        assert follow(response, (f"{room}:{name}", {limit: threshold}))["reward"] == float(
            count >= threshold
        )


@pytest.mark.parametrize("blanks", ["\n\n", "\n\n\n\n", "\n\n \n\n", "\n\n\n\n\n\n"])
def test_empty_paragraph_shifts_no_index(blanks: str) -> None:
    response = f"{blanks}Alpha one.{blanks}Bravo two.{blanks}"
    name = "length_constraints:nth_paragraph_first_word"
    for nth, reward in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 0.0)):
        kwargs = {"num_paragraphs": 2, "nth_paragraph": nth, "first_word": "bravo"}
        assert follow(response, (name, kwargs))["reward"] == reward


def test_repeat_prompt_instruction_defaults_to_the_samples_own_prompt() -> None:
    assert follow("the prompt. And more", ("combination:repeat_prompt", {}))["reward"] == 1.0


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "the sample names no instructions"),
        (
            {"instruction_id_list": ["count:stars"], "kwargs": [{}]},
            "there is no instruction 'count:stars'",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            "instruction keywords:existence does not take",
        ),
        (
            {
                "instruction_id_list": ["keywords:frequency"],
                "kwargs": [{"keyword": "a", "frequency": 1, "relation": "above"}],
            },
            "a relation must be",
        ),
    ],
)
def test_ifeval_fails_on_instructions_that_it_can_not_check(
    metadata: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        ifeval("text", answer="", metadata=metadata, prompt="")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two", 2),
        ("Mr. Smith left. Why?", 2),
        ("It costs 3.50 euros.", 1),
        ('He said "no." Then he left...', 2),
        ("E.g. this.", 1),
    ],
)
def test_sentences_are_counted_by_their_end_punctuation(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("name", "kwargs", "response"),
    [
        (
            "length_constraints:number_words",
            {"num_words": 3.0, "relation": "at least"},
            "one two three",
        ),
        ("keywords:existence", {"keywords": ["sun ", " rain"]}, "Sun, rain."),
        ("keywords:frequency", {"keyword": " sun ", "frequency": 2.0}, "Sun, sun."),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 1.0, "nth_paragraph": 1.0, "first_word": "so "},
            "So it is.",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "e", "let_frequency": 3.0, "let_relation": "at least"},
            "Eleven",
        ),
    ],
)
def test_ifeval_accepts_integers_as_floats_and_keywords_with_spaces(
    name: str, kwargs: dict[str, Any], response: str
) -> None:
    assert follow(response, (name, kwargs))["reward"] == 1.0


def test_ifeval_fails_on_a_non_integer_number() -> None:
    with pytest.raises(
        ValueError,
        match=r"length_constraints:number_words takes a whole number as num_words, got 2.5",
    ):
        follow("one", ("length_constraints:number_words", {"num_words": 2.5}))
