"""Words and paragraphs of instructions: what is counted is what is indexed, and marks are no words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.packages.verifiers.ifbench_words import read_words
from relax_events.packages.verifiers.ifeval import ifeval
from relax_events.packages.verifiers.ifeval_instructions import read_tokens, split_sentences

pytestmark = pytest.mark.property
NAMES = ["alpha", "beta", "gamma", "delta", "well-known", "and/or", "1,000", "3.14", "10:30"]
WORDS = st.sampled_from([*NAMES, "o'clock"])
MARKS = st.sampled_from(["", ",", ":", ";", " -", ")", '"', "*", " &", "...", "\u201d", " \u2014"])
OPENING = st.sampled_from(["", "(", '"', "*", "[", "\u201c"])


def follows(name: str, response: str, **kwargs: object) -> bool:
    metadata = {"instruction_id_list": [name], "kwargs": [kwargs]}
    return ifeval(response, answer="", metadata=metadata, prompt="")["reward"] == 1.0


@given(
    st.lists(st.tuples(OPENING, WORDS, MARKS), min_size=2, max_size=7),
    st.integers(1, 8),
    st.sampled_from(NAMES[:4]),
)
def test_a_word_has_the_position_that_it_has_without_marks(
    pieces: list[tuple[str, str, str]], position: int, keyword: str
) -> None:
    words = [word for _, word, _ in pieces]
    sentence = " ".join("".join(piece) for piece in pieces) + "."
    assert read_words(sentence) == words
    assert follows(
        "words:keywords_specific_position", sentence, keyword=keyword, n=1, m=position
    ) == (position <= len(words) and words[position - 1] == keyword)
    assert follows("words:words_position", sentence, keyword=keyword) == (
        words[1] == words[-2] == keyword
    )


CONTRACTIONS = ["don't", "it's", "she'll", "we've", "they're", "I'd", "I'm", "cannot", "James'"]


@given(st.lists(st.tuples(OPENING, WORDS | st.sampled_from(CONTRACTIONS), MARKS), min_size=1))
def test_words_are_those_of_nltk(pieces: list[tuple[str, str, str]]) -> None:
    nltk = pytest.importorskip("nltk.tokenize.destructive")
    sentence = " ".join("".join(piece) for piece in pieces) + "."
    words = [
        token
        for token in nltk.NLTKWordTokenizer().tokenize(sentence)
        if any(map(str.isalnum, token))
    ]
    assert [token for token in read_tokens(sentence) if any(map(str.isalnum, token))] == words


BLANKS = st.sampled_from(["", " ", "\n", "  "])


@given(
    st.lists(
        st.sampled_from(["Alpha one.", "'bravo, two", "charlie", "  Delta"]), min_size=1, max_size=5
    ),
    st.data(),
    st.integers(1, 6),
    st.sampled_from(["alpha", "Bravo", "charlie", "delta"]),
)
def test_paragraphs_are_indexed_as_they_are_counted(
    paragraphs: list[str], data: st.DataObject, nth: int, word: str
) -> None:
    """Empty paragraphs anywhere change nothing."""
    pieces = [piece for part in paragraphs for piece in (*data.draw(st.lists(BLANKS)), part)]
    response = "\n\n".join([*pieces, *data.draw(st.lists(BLANKS))])
    for count in (len(paragraphs), len(paragraphs) + 1):
        expected = count == len(paragraphs) >= nth and word.lower() in paragraphs[nth - 1].lower()
        assert expected == follows(
            "length_constraints:nth_paragraph_first_word",
            response,
            num_paragraphs=count,
            nth_paragraph=nth,
            first_word=word,
        )


def test_a_first_word_may_be_several_words() -> None:
    kwargs = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Last but"}
    name = "length_constraints:nth_paragraph_first_word"
    assert follows(name, "One.\n\n\n\nLast but not least.", **kwargs)
    assert not follows(name, "One.\n\nLast not least.", **kwargs)
    assert not follows(name, "Last but one.\n\nOne.", **kwargs)


ENDS = st.sampled_from(".?!")
STYLES = st.sampled_from(
    ["{}{}"] * 3 + ["**{}{}**", '"{}{}"', "({}{})", "\u201c{}{}\u201d", "*{}{}* ", "**({}{})**"]
)
BODIES = st.sampled_from(
    [
        "Then alpha met Dr. Smith",
        "In the U.S. alpha costs 3.50",
        "After No. 5 and Fig. 2 it is over",
        "So... alpha is old",
        "On alpha.com, e.g. at 5 p.m. on Oct. 3",
        "We asked Gen Z",
        "They said no",
    ]
)


@given(st.lists(st.tuples(STYLES, BODIES, ENDS), min_size=1, max_size=6), st.sampled_from(" \n"))
def test_sentences_end_behind_what_closes_them(
    pieces: list[tuple[str, str, str]], blank: str
) -> None:
    """Emphasis, quotation marks and brackets around a sentence change no count and no kind."""
    sentences = [style.format(body, end).strip() for style, body, end in pieces]
    response = blank.join(sentences)
    assert split_sentences(response) == sentences
    kinds = [sum(end == kind for *_, end in pieces) for kind in ".?!"]
    assert follows("ratio:sentence_type", response) == (kinds[0] == 2 * kinds[1] > 0)
    assert follows("ratio:sentence_balance", response) == (kinds[0] == kinds[1] == kinds[2])
