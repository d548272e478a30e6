"""IFBench's instructions about words, sentences and their numbers. All are English.

Most instructions take words that white space separates, without the marks around them; those about
positions, pronouns and overlaps take tokens as NLTK makes them. Marks alone are no words. Sentences
are split as for IFEval.
Three instructions need knowledge of English: stop words, syllables, parts of speech. The published
program asks NLTK, which downloads a word list and a tagger's model when it is called. Here the word
list is part of this file, and the dictionaries come with syllapy and textblob, so nothing is
downloaded.

Source: Generalizing Verifiable Instruction Following (arXiv 2507.02833), and its published
definitions as of 2026-09 (allenai/IFBench at 1d62c1d6).
"""

from __future__ import annotations

import importlib
import re
import string
import warnings
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

from relax_events.api.rewards import EnvironmentProblem
from relax_events.packages.verifiers.ifeval_instructions import (
    STOP_WORDS,
    WORD,
    instruction,
    read_tokens,
    split_sentences,
)

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
EDGES = string.punctuation + " "
ATTACHED_MARKS = r"-/\|+=~^_…"
CLOSING_EDGES = "".join(mark for mark in EDGES if mark not in ".?!") + "\u201d\u2019\u00bb"
CONJUNCTIONS = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
PRONOUNS = frozenset(
    (  # noqa: SIM905 a word a line would be a page
        "i me my mine myself we us our ours ourselves you your yours yourself yourselves he "
        "him his himself she her hers herself it its itself they them their theirs themselves "
        "this that these those who whom whose which what each either neither both all some any "
        "none anyone everyone someone"
    ).split()
    + [f"{word}ever" for word in ("who", "whom", "what", "which")]
    + [f"{word}{end}" for word in ("any", "every", "no", "some") for end in ("body", "thing")]
)
NAMES = (  # noqa: SIM905
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte "
    "Alexander Amelia Benjamin Harper Leo Zoe Daniel Chloe "
    "Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher "
    "Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
).split()
JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
KEYWORD_COUNTS = (1, 2, 3, 5, 7)
MIN_PALINDROMES, MIN_PALINDROME_LETTERS = 10, 5
OVERLAP_MARGIN_PERCENT = 2


def bare_words(text: str) -> list[str]:
    """Return the words in lowercase, without any punctuation; marks alone are no word."""
    return list(filter(_is_word, text.lower().translate(NO_PUNCTUATION).split()))


def split_words(text: str) -> list[str]:
    """Return what white space separates, without marks around it; marks alone are no word."""
    return [piece.strip(EDGES) for piece in text.split() if _is_word(piece)]


def read_words(text: str) -> list[str]:
    """Return the words of `read_tokens` in lowercase, without marks at their edges; marks are no
    words.
    """
    return [token.strip(f"{EDGES}\u2026") for token in read_tokens(text.lower()) if _is_word(token)]


def _is_word(piece: str) -> bool:
    return any(map(str.isalnum, piece))


@instruction("count:word_count_range")
def count_word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    """Its number of words is in this range."""
    return min_words <= len(WORD.findall(response)) <= max_words


@instruction("count:unique_word_count")
def count_unique_word_count(response: str, *, N: int) -> bool:  # noqa: N803 the dataset's name
    """At least so many different words occur."""
    return len(set(split_words(response.lower()))) >= N


@instruction("count:conjunctions")
def count_conjunctions(response: str, *, small_n: int) -> bool:
    """At least so many of the seven coordinating conjunctions occur."""
    return len(CONJUNCTIONS & set(split_words(response.lower()))) >= small_n


@instruction("count:person_names")
def count_person_names(response: str, *, N: int) -> bool:  # noqa: N803
    """At least so many of the fifty names occur."""
    return sum(re.search(rf"\b{name}\b", response) is not None for name in NAMES) >= N


@instruction("count:numbers")
def count_numbers(response: str, *, N: int) -> bool:  # noqa: N803
    """Exactly so many numbers occur."""
    return len(re.findall(r"\d+", response.translate(NO_PUNCTUATION))) == N


@instruction("count:pronouns")
def count_pronouns(response: str, *, N: int) -> bool:  # noqa: N803
    """At least so many pronouns occur."""
    return sum(word in PRONOUNS for word in read_words(response.replace("/", " "))) >= N


@instruction("count:punctuation")
def count_punctuation(response: str) -> bool:
    """Each of . , ! ? ; : occurs, and an interrobang besides."""
    interrobang = next((mark for mark in ("?!", "!?", "\u203d") if mark in response), None)
    rest = "" if interrobang is None else response.replace(interrobang, "", 1)
    return all(mark in rest for mark in ".,!?;:")


@instruction("count:words_japanese")
def count_words_japanese(response: str, *, N: int) -> bool:  # noqa: N803
    """Every so-manieth word is Japanese, numbers aside."""
    words = split_words(response)[N - 1 :: N]
    return all(JAPANESE.search(word) for word in words if not word.isdigit())


@instruction("count:keywords_multiple")
def count_keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """The five keywords occur once, twice, three, five and seven times as whole words."""
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(
        len(re.findall(rf"\b{re.escape(keyword.strip())}\b", response, re.IGNORECASE)) == count
        for keyword, count in zip(keywords, KEYWORD_COUNTS, strict=True)
    )


@instruction("ratio:sentence_type")
def ratio_sentence_type(response: str) -> bool:
    """There are sentences with a question mark, and twice as many with a full stop."""
    ends = _count_end_marks(response)
    return ends["."] == 2 * ends["?"] > 0


@instruction("ratio:sentence_balance")
def ratio_sentence_balance(response: str) -> bool:
    """As many sentences end with a full stop as with a question mark and with an exclamation
    mark, and there are some.
    """
    ends = _count_end_marks(response)
    return ends["."] == ends["?"] == ends["!"] > 0


def _count_end_marks(text: str) -> Counter[str]:
    """Count the last characters of the sentences; what closes behind an end mark aside."""
    return Counter(sentence.rstrip(CLOSING_EDGES)[-1:] for sentence in split_sentences(text))


@instruction("ratio:overlap")
def ratio_overlap(response: str, *, reference_text: str, percentage: int) -> bool:
    """So much of its different runs of three words occurs in the reference too, two percent more or
    less.
    """
    mine, other = (
        set(zip(tokens, tokens[1:], tokens[2:], strict=False))
        for tokens in map(read_tokens, (response, reference_text))
    )
    return (
        bool(mine)
        and abs(100 * len(mine & other) / len(mine) - percentage) <= OVERLAP_MARGIN_PERCENT
    )


@instruction("ratio:sentence_words")
def ratio_sentence_words(response: str) -> bool:
    """It has three sentences of the same number of characters, and no word twice."""
    sentences, words = split_sentences(response), bare_words(response)
    is_even = len(sentences) == 3 and len({len(sentence) for sentence in sentences}) == 1
    return is_even and len(words) == len(set(words))


@instruction("words:alphabet")
def words_alphabet(response: str) -> bool:
    """Each word begins with the letter after that of the word before; a follows z."""
    initials = [word[0] for word in bare_words(response)]
    numbers = [ord(letter) - ord("a") for letter in initials]
    in_turn = all((first + 1) % 26 == second for first, second in pairwise(numbers))
    return (
        bool(initials) and all(letter in string.ascii_lowercase for letter in initials) and in_turn
    )


@instruction("words:vowel")
def words_vowel(response: str) -> bool:
    """It is one paragraph, with at most three of the five vowels."""
    text = response.strip().lower()
    return "\n" not in text and len(set("aeiou") & set(text)) <= 3


@instruction("words:consonants")
def words_consonants(response: str) -> bool:
    """Every word has two consonants together."""
    words = split_words(response.lower())
    return bool(words) and all(CLUSTER.search(word) for word in words)


@instruction("words:palindrome")
def words_palindrome(response: str) -> bool:
    """Ten words of at least five characters read the same backwards."""
    palindromes = [
        word
        for word in bare_words(response)
        if len(word) >= MIN_PALINDROME_LETTERS and word == word[::-1]
    ]
    return len(palindromes) >= MIN_PALINDROMES


@instruction("words:prime_lengths")
def words_prime_lengths(response: str) -> bool:
    """The length of every word is a prime number."""
    return all(
        len(word) > 1 and all(len(word) % divisor for divisor in range(2, len(word)))
        for word in bare_words(response)
    )


@instruction("words:repeats")
def words_repeats(response: str, *, small_n: int) -> bool:
    """No word occurs more often."""
    return max(Counter(bare_words(response)).values(), default=0) <= small_n


@instruction("words:last_first")
def words_last_first(response: str) -> bool:
    """Each sentence begins with the last word of the one before."""
    words = [split_words(sentence.lower()) for sentence in split_sentences(response)]
    return all(first[-1] == second[0] for first, second in pairwise(words))


@instruction("words:paragraph_last_first")
def words_paragraph_last_first(response: str) -> bool:
    """Each line ends with the word that it begins with."""
    lines = [line.strip().lower().strip(EDGES).split() for line in response.split("\n")]
    return all(words[0] == words[-1] for words in lines if words)


@instruction("words:no_consecutive")
def words_no_consecutive(response: str) -> bool:
    """No two words in a row begin with the same letter."""
    return all(first[0] != second[0] for first, second in pairwise(bare_words(response)))


@instruction("words:words_position")
def words_words_position(response: str, *, keyword: str) -> bool:
    """The second word, and the second to last, is this one; marks are no words."""
    words = read_words(response)
    return len(words) > 1 and words[1] == words[-2] == keyword.strip().lower()


@instruction("words:keywords_specific_position")
def words_keywords_specific_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """The mth word of the nth sentence is this one."""
    sentences = split_sentences(response)
    words = read_words(sentences[n - 1]) if n <= len(sentences) else []
    return m <= len(words) and words[m - 1] == keyword.strip().lower()


@instruction("sentence:keyword")
def sentence_keyword(response: str, *, word: str, N: int) -> bool:  # noqa: N803
    """The so-manieth sentence has this word."""
    sentences = split_sentences(response)
    return (
        len(sentences) >= N
        and re.search(rf"\b{re.escape(word)}\b", sentences[N - 1], re.IGNORECASE) is not None
    )


@instruction("sentence:increment")
def sentence_increment(response: str, *, small_n: int) -> bool:
    """Each sentence has so many more words than the one before."""
    counts = [len(bare_words(sentence)) for sentence in split_sentences(response)]
    return all(second == first + small_n for first, second in pairwise(counts))


@instruction("sentence:alliteration_increment")
def sentence_alliteration_increment(response: str) -> bool:
    """Each sentence has more words in runs with the same first letter than the one before."""
    counts = [_num_alliterating(sentence) for sentence in split_sentences(response)]
    return all(first < second for first, second in pairwise(counts))


def _num_alliterating(sentence: str) -> int:
    initials = [word.lstrip(EDGES)[:1] for word in sentence.lower().split() if word.lstrip(EDGES)]
    same = [first == second for first, second in pairwise(initials)]
    # A run of n words has n - 1 equal neighbours, and counts n.
    return sum(same) + sum(here and not before for before, here in pairwise([False, *same]))


VERB_TAG, NOUN_TAGS, DETERMINER_TAGS = "VB", (["NN"], ["JJ"]), (["DT"], ["PRP$"])
ADVERBIALS = frozenset(
    (  # noqa: SIM905 a word a line would be a page
        "yesterday today tomorrow tonight monday tuesday wednesday thursday friday saturday sunday "
        "first second third last next half such much many overall sure true okay"
    ).split()
)
"""Words tagged as a noun or an adjective that an article may follow."""


def import_package(name: str, instruction_name: str) -> Any:
    """Import a package that an instruction needs.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(
            f"the instruction {instruction_name} needs the package {name.partition('.')[0]} "
            f"({error}); install relax-events[english]"
        ) from None


@instruction("ratio:stop_words")
def ratio_stop_words(response: str, *, percentage: int) -> bool:
    """At most so many percent of its words are stop words."""
    words = WORD.findall(response.lower())
    return bool(words) and 100 * sum(word in STOP_WORDS for word in words) <= percentage * len(
        words
    )


@instruction("words:odd_even_syllables")
def words_odd_even_syllables(response: str) -> bool:
    """Words with an odd and with an even number of syllables alternate."""
    syllapy = import_package("syllapy", "words:odd_even_syllables")
    numbers = [syllapy.count(word) % 2 for word in bare_words(response)]
    return all(first != second for first, second in pairwise(numbers))


@instruction("words:start_verb")
def words_start_verb(response: str) -> bool:
    """Its first word is a verb, as it stands or in lowercase; marks before it do not count.

    A word that may be a noun is a verb before an article or a possessive: "List the houses".
    """
    sentences = split_sentences(response)
    tokens = [token.lstrip(ATTACHED_MARKS) for token in read_tokens("".join(sentences[:1]))]
    words = [token for token in tokens if token[:1].isalnum()]
    if not words:
        return False
    texts = (" ".join(words), " ".join([words[0].lower(), *words[1:]]))
    tags = [[tag for _, tag in _tagger().tag(text)] for text in texts]
    return any(tag[:1] and tag[0].startswith(VERB_TAG) for tag in tags) or (
        words[0].lower() not in ADVERBIALS
        and tags[1][:1] in NOUN_TAGS
        and tags[1][1:2] in DETERMINER_TAGS
    )


@lru_cache(maxsize=1)
def _tagger() -> Any:
    tagger = import_package("textblob.en.taggers", "words:start_verb").PatternTagger()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # textblob leaves the file of its lexicon, which the first call reads, to be closed.
        tagger.tag("a")
    return tagger
