"""IFBench's three instructions that need knowledge of English: stop words, syllables, parts of
speech.

The published program asks NLTK, which downloads a word list and a tagger's model when it is called.
Here the word list is written down, and syllapy and textblob bring their dictionaries with them, so
nothing is downloaded.
Source: Generalizing Verifiable Instruction Following (arXiv 2507.02833), and its published
definitions.
"""

from __future__ import annotations

import importlib
import warnings
from functools import lru_cache
from itertools import pairwise
from typing import Any

from relax_events.errors import EnvironmentProblem
from relax_events.rewards.verifiers.ifbench_words import TOKEN, bare_words
from relax_events.rewards.verifiers.ifeval_instructions import WORD, instruction, sentences_of

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
"""NLTK's English stop words, without those that hold an apostrophe: they are compared with runs of
alphabetic characters."""
VERB_TAG = "VB"


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
    """Its first word is a verb, as it stands or in lowercase; marks before it do not count."""
    words = next(
        (
            found
            for sentence in sentences_of(response)
            if (found := [token for token in TOKEN.findall(sentence) if token[0].isalnum()])
        ),
        [],
    )
    if not words:
        return False
    texts = (" ".join(words), " ".join([words[0].lower(), *words[1:]]))
    return any(tags and tags[0][1].startswith(VERB_TAG) for tags in map(_tagger().tag, texts))


@lru_cache(maxsize=1)
def _tagger() -> Any:
    tagger = import_package("textblob.en.taggers", "words:start_verb").PatternTagger()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # textblob leaves the file of its lexicon, which the first call reads, to be closed.
        tagger.tag("a")
    return tagger
