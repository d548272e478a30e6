"""The assertions of IFEval's published tests on the 25 instructions of its dataset, run against our
reward.

Source: google-research/google-research, instruction_following_eval/instructions_test.py at commit
45e9105 (Apache 2.0). Long texts are cut to the part that matters. Assertions on four instructions
that are not in the dataset, and on the texts of the instructions themselves, are left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.packages.verifiers.ifeval import ifeval

pytestmark = pytest.mark.unit
Case = tuple[str, dict[str, Any], str, bool]
LESS, AT_LEAST = "less than", "at least"
FORM = (
    "Sure, here is a short template with 5 "
    "placeholders:\n[Name]\n[Email]\n[Phone]\n[Address]\n[Website]\nThis template can be used "
    "for many things."
)
SONG = "My [adjective] [noun] is [adjective] [noun]. I [verb] and [verb]."
BULLETS = [
    (
        "\n  To\n  create a bullet point, start each line with an asterisk (*). For "
        "example:\n  * This is a bullet point.\n"
        "  *(no space required)Another bullet point.\n  * (no newline ending "
        "required)Another bullet point.\n  markdown bullet points are often used"
    ),
    (
        "\n  Check that inline asterisk (*), *, will not be counted. Only * that starts a\n  "
        "bullet list will be counted:\n"
        "    * This is a bullet point.\n    * Another bullet point.\n    . dot is not counted"
    ),
    (
        "\n  Here are three bullets starting with asterisk:\n  * I am a large language model.\n  "
        "* I am trained on text.\n  * I am learning."
    ),
    (
        "\n  Here are three markdown bullets:\n  - I am a large language model.\n  - I am "
        "trained on text.\n  -I am learning."
    ),
    "\n  Paragraph 1\n  ***\n  Paragraph 2\n  ***\n  Paragraph 3\n  * only one bullet point\n  ",
]
HIGHLIGHTS = [
    (
        "\n  you can use the * character before and after\n  the text, as in:*hello*, You "
        "can also use the ** character to\n"
        "  create bold text. To bold the word `hello`, you\n  would type: **hello** "
    ),
    (
        "\n  Sure:\n  *Finite difference methods\n  *Finite element methods*\n  *Boundary "
        "element methods\n  *Monte Carlo methods\n  I hope"
    ),
    (
        "\n  There may be *two different* highlighted *sections in the same*\n  line. **This is "
        "also true** for **double markdown highlights.**\n  "
    ),
]
SECTIONS = [
    (
        '\n  Mark each section\n  with "Section X", such as:\n  Section 1\n  [content of section '
        "1]\n  Section 2\n  [content of section 2]"
    ),
    "SECTION 1\n  [content of section 1]\n  SECTION 2\n  [content of section 2]",
]
MARK = "\n          ***\n"
PARAGRAPHS = [
    "\n  paragraph 1\n  ***\n  paragraph 2\n  ***\n  paragraph 3",
    f"{MARK}  paragraph 1{MARK}      paragraph 2{MARK}      paragraph 3",
    f"\n  paragraph 1{MARK}      paragraph 2{MARK}      paragraph 3\n          ***",
    f"\n  paragraph 1{MARK}      paragraph 2{MARK}          ***",
]
POSTSCRIPTS = [
    "\n  I will do my best.\n\n  P.S. I hope this is what you were looking for.",
    (
        "\n  Sure, here is my response with a postscript starting with P.P.S.:\n\n  P.P.S. I am "
        "always happy to answer.\n\n  Any other questions?"
    ),
    (
        "\n  the circle has no\n  size and is just a point. (not starting a new line) P.S. I "
        "hope you enjoyed\n  my joke!"
    ),
    (
        "\n  the area of the square will also be one.\n  p.p.s what if the entire response was "
        "lower case letters?\n  "
    ),
    (
        "\n  The mysteries of space and time are mysterious.\n  P. S. Sometimes there are even "
        "spaces between P. and S..\n  "
    ),
]
PARIS = [
    (
        "\n  The romantic river Seine winds its way\n  past iconic landmarks like the Louvre\n  "
        "Museum, where the Mona Lisa resides."
    ),
    (
        "\n  Paris is a city of beauty, romance, and history. The city is also known for its "
        "romantic\n  river cruises, its delicious food.\n  "
    ),
]
KEYWORDS = ["romantic", "river", "Mona Lisa"]
THRICE, LISTED = (
    "\n  keyword, Keyword, KEYWORD\n  ",
    "\n    *keyword\n    *Keyword\n    *KEYWORD\n  ",
)
SEVEN_WORDS = "\n  d3sCRi7 lArge lAnguagE M0del w1tH 20 w0RdS."
SIXTEEN_WORDS = (
    "\n  L4RGE L4NGU4GE M0DEL: AI syst3m th4t und3rstands, g3n3r4tes, or tr4nsforms\n  l4ngu4g3 "
    "b4s3d on pr3vious l3arning & d4t4."
)
SECOND_IS_I = {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"}
THIRD_IS_REALLY = {"num_paragraphs": 5, "nth_paragraph": 3, "first_word": "Really"}
FIFTH_IS_HAHA = {"num_paragraphs": 5, "nth_paragraph": 5, "first_word": "haha"}
FIVE = (
    "\n  Wow this is a very long response.\n\n  I can't believe there is more than three "
    "paragraphs.\n\n  {third}\n\n  I can't believe it.\n\n"
    "  Haha, you go that right."
)
HISTORY = (
    "\n  The party came to power in 1933. By 1934, its leader\n  had become dictator of "
    "Germany.\n  "
)
DINOSAURS = (
    "\n  Dinosaurs were the most\n  successful land animals on Earth until they went extinct.\n  "
)
GPT = (
    "\n  GPT, or Generative Pre-trained Transformer, is trained on text and code, and is used "
    "by\n  organizations like Google.\n  "
)
STARS = "******"
RESPONSES = [
    f"\n  This is response 1.\n  {STARS}\n  This is response 2.\n  ",
    f"\n  This is response 1.\n  {STARS}\n  This is response 1.\n  ",
    (
        f"\n  This is response 1.\n  {STARS}\n  This is response 2.\n  {STARS}\n  This is "
        "response 3.\n  "
    ),
    f"\n  {STARS}\n  Response 1.\n  {STARS}\n  {STARS}\n  Response 2.\n  {STARS}\n  ",
    f"\n  {STARS}\n  Response 1\n  {STARS}\n  Response 2\n  {STARS}\n  ",
]
CASES: list[Case] = [
    ("language:response_language", {"language": "en"}, "The response is English", True),
    ("language:response_language", {"language": "es"}, "Desayunamos en McDonald's hoy", True),
    ("language:response_language", {"language": "en"}, "Today we visit the Louvre", True),
    (
        "length_constraints:number_sentences",
        {"relation": LESS, "num_sentences": 4},
        "xx,x. xx,x! xx/x. x{x}x?",
        False,
    ),
    (
        "length_constraints:number_sentences",
        {"relation": LESS, "num_sentences": 5},
        "xxxx. xx,x! xxxx. x(x)x?",
        True,
    ),
    (
        "length_constraints:number_sentences",
        {"relation": AT_LEAST, "num_sentences": 4},
        "xxxx. xx,x! xx|x. x&x x?",
        True,
    ),
    (
        "length_constraints:number_sentences",
        {"relation": AT_LEAST, "num_sentences": 5},
        "xx-x. xx,x! xx}x. x,xx?",
        False,
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 5}, FORM, True),
    ("detectable_content:number_placeholders", {"num_placeholders": 7}, SONG, False),
    *(
        ("detectable_format:number_bullet_lists", {"num_bullets": count}, text, True)
        for count, text in zip((3, 2, 3, 3, 1), BULLETS, strict=True)
    ),
    ("detectable_format:constrained_response", {}, "\n My answer is no.\n", True),
    ("detectable_format:constrained_response", {}, "My answer is no.   ", True),
    (
        "detectable_format:constrained_response",
        {},
        "\n  My answer is no. I am still under development and I am always learning.",
        True,
    ),
    *(
        ("detectable_format:number_highlighted_sections", {"num_highlights": count}, text, expected)
        for count, text, expected in zip((2, 2, 4), HIGHLIGHTS, (True, False, True), strict=True)
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 3},
        SECTIONS[0],
        False,
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        SECTIONS[1],
        True,
    ),
    *(
        ("length_constraints:number_paragraphs", {"num_paragraphs": count}, text, expected)
        for count, text, expected in zip(
            (3, 3, 3, 2), PARAGRAPHS, (True, True, True, False), strict=True
        )
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, POSTSCRIPTS[0], True),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, POSTSCRIPTS[0], False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, POSTSCRIPTS[1], True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, POSTSCRIPTS[2], True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, POSTSCRIPTS[3], True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, POSTSCRIPTS[4], True),
    ("keywords:existence", {"keywords": KEYWORDS}, PARIS[0], True),
    ("keywords:existence", {"keywords": KEYWORDS}, PARIS[1], False),
    (
        "keywords:frequency",
        {"keyword": "  keyword ", "frequency": 4, "relation": LESS},
        THRICE,
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "  keyword ", "frequency": 3, "relation": AT_LEAST},
        THRICE,
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "KEYWORD", "frequency": 4, "relation": AT_LEAST},
        LISTED,
        False,
    ),
    ("length_constraints:number_words", {"num_words": 8, "relation": LESS}, SEVEN_WORDS, True),
    ("length_constraints:number_words", {"num_words": 16, "relation": LESS}, SIXTEEN_WORDS, False),
    (
        "length_constraints:number_words",
        {"num_words": 16, "relation": AT_LEAST},
        SIXTEEN_WORDS,
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        SECOND_IS_I,
        "\n  paragraph 1\n\n  I paragraph 2\n\n  paragraph 3",
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        SECOND_IS_I,
        "\n  paragraph 1\n\n  I paragraph 2",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        SECOND_IS_I,
        "\n  paragraph 1\n\n  fail paragraph 2\n\n  paragraph 3",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        FIFTH_IS_HAHA,
        FIVE.format(third="Really more than three? No way!"),
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        THIRD_IS_REALLY,
        FIVE.format(third='"Really?! more than three? No way!"'),
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        THIRD_IS_REALLY,
        FIVE.format(third="Rea!lly more than three? No way!"),
        False,
    ),
    *(
        ("keywords:forbidden_words", {"forbidden_words": words}, text, expected)
        for words, text, expected in [
            (["HOUSE", "POWER", "BECOME"], HISTORY, False),
            (["HOUSE", "POWER", "BECOME"], DINOSAURS, True),
            (["HOUSE", "POWER", "BECOME"], GPT, True),
            (["GOOGLE", "TEXT"], HISTORY, True),
            (["GOOGLE", "TEXT"], DINOSAURS, True),
            (["GOOGLE", "TEXT"], GPT, False),
            (["GENE", "TRANSFORM"], GPT, True),
        ]
    ),
    *(
        ("combination:two_responses", {}, text, expected)
        for text, expected in zip(RESPONSES, (True, False, False, False, True), strict=True)
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a CL description."},
        "Write a CL description. Hi, please\n  check this out. Thanks.\n  ",
        True,
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a CL description."},
        "Hi. Write a CL description. Thanks.\n  ",
        False,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "\n  Any more questions?\n  "},
        "\n  The answer is 7. Any more questions?\n  ",
        True,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "\n  This is the end.\n  "},
        "\n  At the end I am required to say that this is the end.\n  ",
        True,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "\n  This will fail.\n  "},
        "\n  This will fail. Paris is cool.\n  ",
        False,
    ),
    ("detectable_format:title", {}, "\n  <<Song of Joy>>\n  La la la. Happy song.\n  ", True),
    (
        "detectable_format:title",
        {},
        "\n  Is it fine for title to be at the end?\n  <<This is the title>>\n  ",
        True,
    ),
    ("detectable_format:title", {}, "\n  << >>\n  There is no title.\n  ", False),
    (
        "detectable_format:title",
        {},
        "\n  <<This is not a title.\n  This is a paragraph.>>\n  ",
        False,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "T", "let_frequency": 4, "let_relation": AT_LEAST},
        "\n  There is the T. Four T's.\n  ",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 4, "let_relation": LESS},
        "\n  asdfghjkl!!aA\n  ",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "p", "let_frequency": 4, "let_relation": AT_LEAST},
        "\n  asdfghjkl!!aA\n  ",
        False,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": AT_LEAST},
        "#one #two #three #four",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": AT_LEAST},
        "#one #two #three",
        False,
    ),
    (
        "change_case:english_capital",
        {},
        "\n  THIS IS AN ENGLISH SENTENCE. EVERY LETTER IS CAPITALIZED!!! AMAZING.\n  ",
        True,
    ),
    ("change_case:english_capital", {}, "\n  Every Word Is Capitalized.\n  ", False),
    ("change_case:english_lowercase", {}, "\n  every letter is lowercase.\n  ", True),
    ("change_case:english_lowercase", {}, "\n  Almost every letter is lowercase.\n  ", False),
    (
        "punctuation:no_comma",
        {},
        "\n  Every sentence is short. There is no need for a comma.\n  ",
        True,
    ),
    (
        "punctuation:no_comma",
        {},
        "\n  Since the start of time, people have always found a way to punctuate.\n  ",
        False,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": AT_LEAST},
        "HERE there are THREE FUlly CAPITAL words.",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 5, "capital_relation": LESS},
        "THERE are Four FULLY CAPITAL WORDS. Others Not.",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 4, "capital_relation": LESS},
        "THERE are Four FULLY CAPITAL WORDS. Others Not.",
        False,
    ),
    (
        "startend:quotation",
        {},
        '\n  "This entire message is wrapped in double quotation marks."\n  ',
        True,
    ),
    (
        "startend:quotation",
        {},
        '\n  "This message is wrapped in double quotation marks." But not everything.\n  ',
        False,
    ),
]


@pytest.mark.parametrize(("name", "kwargs", "response", "expected"), CASES)
def test_ifeval_verdict_matches_the_published_program(
    name: str, kwargs: dict[str, Any], response: str, expected: bool
) -> None:
    assert score(name, kwargs, response) == float(expected)


@pytest.mark.parametrize(
    "kwargs", [{"letter": "ab", "let_frequency": 1}, {"letter": "a", "let_frequency": -1}]
)
def test_arguments_rejected_by_the_published_program_fail(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keywords:letter_frequency takes .*, got"):
        score("keywords:letter_frequency", kwargs, "abc")


def score(name: str, kwargs: dict[str, Any], response: str) -> float:
    return ifeval(
        response, answer="", metadata={"instruction_id_list": [name], "kwargs": [kwargs]}, prompt=""
    )["reward"]
