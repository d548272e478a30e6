"""Rewards that follow a published program, compared on generated texts with its rule, restated by
hand: GSM8K's final answers, SQuAD's metrics, and the forms of open-r1 and TRL.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.packages.verifiers.code import is_same_output
from relax_events.packages.verifiers.math_answers import openr1_multimodal
from relax_events.packages.verifiers.text_answers import f1, gsm8k, squad_exact_match

pytestmark = pytest.mark.property
MANY = settings(max_examples=400, derandomize=True)


def call(function: Any, completion: str, answer: str, **options: Any) -> Any:
    return function(completion, answer=answer, metadata={}, prompt="", **options)


FINAL = re.compile(r"#### (-?[0-9.,]+)")


def read_final(text: str) -> str | None:
    """GSM8K's rule: what stands behind the first mark, without commas, is compared as text."""
    match = FINAL.search(text)
    return match and match[1].replace(",", "")


NUMBERS = st.integers(-(10**7), 10**7)
FORMS = st.sampled_from(
    ["{}", "{:,}", "{}.0", "{}.", "${}", "{} apples", "{:,}.00", " {}", "**{}**"]
)
LEADS = st.sampled_from(["", "48/2 = 24\n", "So 3 + 4 = 7.\n", "<<2*3=6>>6\n", "#1 is done\n"])


@MANY
@given(NUMBERS, NUMBERS, FORMS, LEADS)
def test_gsm8k_pays_what_the_published_rule_pays(
    right: int, other: int, form: str, lead: str
) -> None:
    for number in (right, other):
        completion = f"{lead}#### {form.format(number)}"
        published = read_final(completion) == read_final(f"work\n#### {right}")
        assert call(gsm8k, completion, f"work\n#### {right}") == float(number == right)
        assert number == right or not published


@pytest.mark.parametrize(
    ("completion", "published", "reward"),
    [
        ("#### 5.0", 0, 1),  # compared as text
        ("#### 5.", 0, 1),  # its full stop is part of the number
        ("#### $5", 0, 1),
        ("####5", 0, 1),  # the blank is required
        ("#### **5**", 0, 1),
        ("#### 10/2", 0, 1),  # the first part of a fraction
        ("#### 5/2", 1, 0),
        ("so it is 5", 0, 1),  # without the mark there is no answer
        ("#### 5\nWait. #### 6", 1, 0),  # the first, not the last
        ("#### 6\nWait. #### 5", 0, 1),
        ("#### \u22125", 0, 0),
        ("#### 5e2", 1, 0),
        ("#### 5*2", 1, 0),  # a part of an expression
        ("#### 5 \u00d7 2", 1, 0),
        ("#### 5-6", 1, 0),
        ("#### 5 or 6", 1, 0),
        ("#### 5, 6", 1, 0),
        ("#### not 5", 0, 0),
        ("#### 12 - 7 = 5", 0, 1),
        ("#### 5 of 6", 1, 1),
        ("#### 5\n- 3 were left", 1, 1),
    ],
)
def test_differences_from_the_published_rule_of_gsm8k(
    completion: str, published: float, reward: float
) -> None:
    assert (read_final(completion) == "5") == published
    assert call(gsm8k, completion, "#### 5") == reward


@MANY
@given(NUMBERS, FORMS, LEADS, st.sampled_from([" or {}", ", not {}", "\nOr {}?", " {}", "/{}"]))
def test_a_contradiction_behind_the_final_number_never_raises_the_reward(
    right: int, form: str, lead: str, contradiction: str
) -> None:
    """The first number behind the mark counts, so a second one earns nothing."""
    completion = f"{lead}#### {form.format(right + 1)}"
    assert call(gsm8k, completion + contradiction.format(right), str(right)) == 0.0


PLAIN = re.compile(r"[!-/:-@\[-`{-~]")
WORDS = st.lists(
    st.sampled_from(
        [*("The", "a", "An", "cat", "Cat's", "sat,", "well-known", "1,000", "U.S.", "(b)", "the-a")]
    ),
    max_size=6,
)


def read_words(text: str) -> list[str]:
    """SQuAD's evaluation 1.1: lower case, no ASCII punctuation, no articles, one blank."""
    return re.sub(r"\b(?:a|an|the)\b", " ", PLAIN.sub("", text.lower())).split()


@MANY
@given(
    WORDS, st.lists(WORDS.filter(bool), min_size=1, max_size=3), st.sampled_from([" ", "  ", "\n"])
)
def test_words_are_compared_as_by_the_evaluation_of_squad(
    answer_words: list[str], references: list[list[str]], blank: str
) -> None:
    import orjson

    completion, texts = blank.join(answer_words), [" ".join(words) for words in references]
    mine, others = read_words(completion), [read_words(text) for text in texts]
    scores = []
    for other in others:
        rest, num_shared = list(other), 0
        for word in mine:
            if word in rest:
                rest.remove(word)
                num_shared += 1
        precision, recall = num_shared / max(len(mine), 1), num_shared / max(len(other), 1)
        scores.append(2 * precision * recall / (precision + recall) if num_shared else 0.0)
    label = orjson.dumps(texts).decode()
    assert call(squad_exact_match, completion, label) == float(mine in others)
    assert call(f1, completion, label) == pytest.approx(max(scores))


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "\n", "2", "a thought", " "]),
    max_size=9,
)
FORMED = [
    ["<think>", thought, "</think>", blank, "<answer>", "2", "</answer>", end]
    for thought in ("a thought", "", "\n2\n")
    for blank in ("", "\n", " so ", " \n")
    for end in ("", "\n", "2")
]
OPEN_R1 = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL)
TRL = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@MANY
@given(
    PIECES | st.sampled_from(FORMED) | st.permutations([*TAGS, "\n", "2"]),
    st.sampled_from(["think_answer", "think"]),
)
def test_forms_are_those_of_open_r1_and_trl(pieces: list[str], form: str) -> None:
    """Ours lets blanks between tags be, requires each tag once, and a text behind a thought."""
    completion = "".join(pieces)
    components = call(openr1_multimodal, completion, "2", form=form)
    occurs_twice = any(completion.count(tag) > 1 for tag in TAGS)
    if form == "think":
        has_text = completion.partition("</think>")[2].strip() != ""
        published = TRL.match(completion.lstrip()) is not None and has_text
    else:
        spaced = re.sub(r"\s*(</?(?:think|answer)>)\s*", r"\1", completion)
        written = re.sub(r"(<(?:think|answer)>)(.*?)(</\w+>)", r"\1\n\2\n\3\n", spaced)
        published = OPEN_R1.match(written.strip()) is not None
    assert components["format"] == float(published and not occurs_twice)
    if not occurs_twice:
        tags = TAGS[:2] if form == "think" else TAGS
        assert components["tags"] == sum(completion.count(tag) == 1 for tag in tags) / len(tags)


LINES = st.lists(
    st.sampled_from(["1", "0.5", "YES", "1 2 3", "[1, 2.5]", "a=1"]), min_size=1, max_size=4
)


@MANY
@given(LINES, st.sampled_from(["0", "1", "or 1", "1 2", "\n\n2"]))
def test_more_output_than_expected_is_never_right(lines: list[str], addition: str) -> None:
    text = "\n".join(lines)
    assert is_same_output(text, text)
    assert not is_same_output(f"{text}\n{addition}", text)
    assert not is_same_output(f"{text} {addition}", text)
    assert not is_same_output("\n".join(lines[:-1]), text)
