"""Choices in every form that they are written in, made by a grammar: case x bracket x emphasis x LaTeX
x lead-in x language x tail.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.packages.verifiers.text_answers import gpqa, multiple_choice

pytestmark = pytest.mark.property
CHOICES = ["a red star", "a white dwarf", "a black hole", "a red giant"]
BRACKETS = ["{}", "({})", "[{}]", "{})", "{}.", "\uff08{}\uff09", "【{}】", "'{}'"]
EMPHASES = ["{}", "**{}**", "*{}*", "__{}__", "`{}`", "<b>{}</b>", '"{}"', "「{}」"]
LATEX = ["{}", "${}$", r"\({}\)", r"\text{{{}}}", r"\textbf{{{}}}", r"$\mathrm{{{}}}$"]
LEADS = {
    "English": [
        *("Answer: {}", "ANSWER: {}", "**Answer:** {}", "The answer is {}", "the answer is: {}"),
        *("The correct answer is {}", "Final answer: {}", "So the final answer is {}"),
        *("The correct option is {}", "The best choice is {}", "I choose {}", "I would pick {}"),
        *("Therefore, the answer must be {}", "My answer: option {}", "Hence {}", "So it is {}"),
        *("I think the answer is {}", "### Final Answer\n\n{}", '{{"answer": "{}"}}', "It's {}"),
        *("The answer to this question is choice {}", "I'd go with {}", r"\boxed{{{}}}"),
        *("<answer>{}</answer>", r"The answer is \boxed{{{}}}", "My choice is {}", "Answer - {}"),
    ],
    "Chinese": [
        "答案\uff1a{}",
        "答案是{}",
        "正确答案为{}",
        "故选{}",
        "所以\uff0c应选择{}",
        "正确选项是 {}",
    ],
    "Japanese": ["答えは{}です", "正解\uff1a{}"],
    "Korean": ["정답은 {}", "정답: {}"],
    "German": ["Die Antwort ist {}", "Antwort: {}", "Die richtige Antwort lautet {}"],
    "French": ["La réponse est {}", "Réponse : {}", "La bonne réponse est l'option {}"],
    "Spanish": ["La respuesta es {}", "Respuesta: {}", "La respuesta correcta es la opción {}"],
    "Portuguese": ["A resposta é {}", "A alternativa correta é a {}"],
    "Italian": ["La risposta è {}", "La risposta corretta è la {}"],
    "Russian": ["Ответ: {}", "Правильный ответ \u2014 {}"],
}
WITHOUT_LEAD = ["{}", "Option {}", "{} is correct", "{} is the right answer", "选项{}正确"]
TAILS = ["", ".", "\n", ".\n\nThis follows from its mass.", ", because the others are too light."]
TAILS += [". It is stable."]
ALL_LEADS = [*itertools.chain(*LEADS.values()), *WITHOUT_LEAD]
BARE_TAKES_NO_SMALL = {"Hence {}", "So it is {}", *WITHOUT_LEAD}


@st.composite
def written_letter(draw: st.DrawFn, letter: str) -> str:
    """Return a letter with a bracket, an emphasis and LaTeX around it."""
    text = draw(st.sampled_from(BRACKETS)).format(letter)
    for form in (st.sampled_from(LATEX), st.sampled_from(EMPHASES)):
        text = draw(form).format(text)
    return text


def score(completion: str, letter: str, *, choices: list[str] | None = CHOICES) -> float:
    return gpqa(
        completion, answer=letter, metadata={"choices": choices} if choices else {}, prompt=""
    )


@settings(max_examples=600)
@given(st.data(), st.sampled_from("ABCD"), st.sampled_from(ALL_LEADS), st.sampled_from(TAILS))
def test_each_written_form_chooses_its_letter_alone(
    data: st.DataObject, letter: str, lead: str, tail: str
) -> None:
    completion = lead.format(data.draw(written_letter(letter))) + tail
    assert [score(completion, other) for other in "ABCD"] == [
        float(other == letter) for other in "ABCD"
    ], completion


@settings(max_examples=200)
@given(
    st.data(),
    st.sampled_from("ABCD"),
    st.sampled_from([*itertools.chain(*LEADS.values())]),
    st.sampled_from(TAILS),
)
def test_a_small_letter_chooses_as_its_capital_does(
    data: st.DataObject, letter: str, lead: str, tail: str
) -> None:
    completion = lead.format(data.draw(written_letter(letter.lower()))) + tail
    assert [score(completion, other) for other in "ABCD"] == [
        float(other == letter) for other in "ABCD"
    ], completion


ARTICLE_AND_PRONOUN = [
    f"{lead}{words}"
    for lead in ("", "Answer: ", "The answer is ", "So ", "Option 3. ", "**Answer:** ")
    for words in (
        *("A star", "A very hot star", "A big one", "a star of low mass", "A 5 kg ball"),
        *("I think so", "I guess it depends", "I would need more facts", "I am a model"),
    )
]


@pytest.mark.parametrize("completion", ARTICLE_AND_PRONOUN)
def test_article_and_pronoun_are_no_choice(completion: str) -> None:
    assert {
        score(completion, letter, choices=choices)
        for letter in "ABCDI"
        for choices in (None, [*"pqrstuvwx"])
    } == {0.0}


NO_CHOICE = [
    *(
        "The answer is {0} or {1}",
        "Answer: {0}, {1}",
        "Answer: {0}/{1}",
        "{0} and {1}",
        "{0} or {1}",
    ),
    *("Both {0} and {1} are correct.", "The answer is either {0} or {1}.", r"\boxed{{{0}, {1}}}"),
    *(r"\boxed{{{0} \text{{ or }} {1}}}", "<answer>{0} or {1}</answer>", "答案是{0}和{1}"),
    *("Maybe {0}", "Perhaps the answer is {0}.", "The answer might be {0}", "It could be {0}."),
    *(
        "Possibly {0}.",
        "Is the answer {0}?",
        "Is {0} correct?",
        "The answer: {0}?",
        "答案可能是{0}",
    ),
    *("Die Antwort ist vielleicht {0}", "La réponse est peut-être {0}", "Vielleicht {0}"),
    *(
        "The answer is not {0}",
        "The answer isn't {0}.",
        "{0} is wrong",
        "It is not {0}.",
        "Not {0}",
    ),
    *("I don't think the answer is {0}", "neither {0} nor {1}", "{0} is incorrect.", "不选{0}"),
    *("The answer cannot be {0}", "The wrong answer is {0}", "Option {0} can be ruled out."),
    *("Anything except {0}", "I would rule out {0}.", "{0}是错误的", "答案不是{0}", "排除{0}"),
    *("<answer>not {0}</answer>", "La réponse n'est pas {0}", "Die Antwort ist nicht {0}"),
    *("If the answer is {0}, then", "whether the answer is {0}", "The options are A, B, C and D."),
    *("A) one\nB) two\nC) three\nD) four", "A\nB\nC\nD", "x = {0} = 3"),
]
UNMARKED = st.sampled_from(["{}", "({})", "**{}**", "[{}]", "${}$", r"\text{{{}}}"])


@settings(max_examples=300)
@given(st.data(), st.sampled_from(NO_CHOICE), st.permutations("ABCD"), st.sampled_from(TAILS[:4]))
def test_a_list_a_hedge_and_a_denial_choose_nothing(
    data: st.DataObject, form: str, labels: list[str], tail: str
) -> None:
    written = [data.draw(UNMARKED).format(letter) for letter in labels]
    completion = form.format(*written) + tail
    assert [score(completion, letter) for letter in "ABCD"] == [0.0] * 4, completion


CONTRADICTIONS = [
    *(
        " Or maybe {0}.",
        " But it could also be {0}.",
        " No, {0} is correct.",
        " {0} is also possible.",
    ),
    *("\n\nThe answer is {0}.", " {1} is wrong.", " Actually it is not {1}.", "\nOr {0}."),
    *(" The answer is not {1}.", " The answer is {0} or {1}.", " 也可能是{0}。", " 不是{1}。"),
]


@settings(max_examples=400)
@given(
    st.data(),
    st.sampled_from([*ALL_LEADS, *NO_CHOICE]),
    st.permutations("ABCD"),
    st.sampled_from(CONTRADICTIONS),
)
def test_an_appended_contradiction_pays_nothing(
    data: st.DataObject, lead: str, labels: list[str], contradiction: str
) -> None:
    """It names another letter than the right one, or denies the right one."""
    right, other = labels[0], labels[1]
    start = lead.format(*[data.draw(UNMARKED).format(letter) for letter in labels])
    completion = start + contradiction.format(data.draw(UNMARKED).format(other), right)
    assert score(completion, right) == 0.0, completion


KEPT = [
    ("B", "The answer is not A but B"),
    ("B", "Not A, but B"),
    ("B", "The answer is not A; it is B"),
    ("C", "The answer is B? No. The answer is C."),
    ("B", "A is not correct, B is correct"),
    ("B", "No, the answer is B."),
    ("B", "The correct answer is B, since A and C are wrong"),
    ("B", "The answer is B (not A or C)"),
    ("B", "B. A is too small and C too large."),
    ("A", "Answer: A because it is hot"),
    ("B", "First I thought A, but the answer is B"),
    ("B", "A is too small\nC is too big\n\nB"),
    ("B", "A) no\nC) no\n\n**B**"),
    ("B", "B. a white dwarf\n\nExplanation: Option A is small"),
    ("B", "I'm not sure, but the answer is B"),
    ("B", "The answer is neither A nor C; the answer is B"),
    ("B", "If it's not A, the answer is B"),
    ("B", "Option A is incorrect. Option C is incorrect. Option B is correct."),
    ("B", "A\uff0cC\uff0cD错误\uff0c故选B。"),
    ("B", "因此正确答案是选项 B\uff1a白矮星"),
    ("B", r"$\boxed{\textbf{(B)}\ \text{white dwarf}}$"),
    ("B", "The answer is **(B) a white dwarf**, not a red star."),
    ("D", "It is a red giant, not a red star"),
    ("B", "The answer is B, not A. A white dwarf has a small radius."),
]


@pytest.mark.parametrize(("letter", "completion"), KEPT)
def test_a_choice_stands_next_to_what_is_said_of_others(letter: str, completion: str) -> None:
    assert [score(completion, other) for other in "ABCD"] == [
        float(other == letter) for other in "ABCD"
    ]


@pytest.mark.parametrize(
    "completion",
    [
        "It is not a white dwarf",
        "It may be a white dwarf",
        "A white dwarf is wrong",
        "The answer is not B: a white dwarf",
        "a white dwarf or a red giant",
    ],
)
def test_the_text_of_a_denied_choice_chooses_nothing(completion: str) -> None:
    assert [score(completion, letter) for letter in "ABCD"] == [0.0] * 4


@given(st.data(), st.sampled_from("ABCD"), st.sampled_from(["", " ", ".", " a star", ": a star"]))
def test_multiple_choice_reads_the_letter_in_its_tag_in_each_form(
    data: st.DataObject, letter: str, tail: str
) -> None:
    written = data.draw(written_letter(letter)) if not tail.strip(" .") else f"({letter})"
    completion = f"so <answer>{written}{tail}</answer>"
    assert [
        multiple_choice(completion, answer=other, metadata={}, prompt="") for other in "ABCD"
    ] == [float(other == letter) for other in "ABCD"], completion


THOUGHTS = [
    "Option {0} would give 3 J, which is too low.",
    "({0}) is tempting but violates conservation of energy.",
    "{0} and {1} can be ruled out.",
    "The field is about B = 3 T.",
    "Let me consider each option.",
    "**Option {0}**: this requires a mass above 8.",
    "- {0}: too small\n- {1}: too large",
    "If {0} were right, the mass would be negative.",
    "Is it {0}? No, since the spin must be integer.",
    "Could it be {0}? The parity is wrong.",
    "I know that A star emits light.",
    "{0} seems plausible at first, but the units do not match.",
    "Choice {0} is incorrect because of the sign.",
    "At point A the force vanishes, and at point B it is maximal.",
    "The answer is not {0}, as shown above.",
    "We need to find which of A, B, C, D holds.",
    "First, I calculate the energy: E = mc^2.",
    "Vitamin C is not involved.",
    "Perhaps {0}? It has the wrong sign.",
    "{0} might look right, but it fails the test.",
    "A careful analysis shows it.",
    "Options:\nA) one\nB) two\nC) three\nD) four",
    "Statement {0} is true but irrelevant.",
    "The ratio A/B is 2.",
    "Initially I thought the answer was {0}.",
    "So the answer is {0}? Let me check again. The mass is off.",
]
ENDS = [
    "The answer is {}.",
    "Answer: {}",
    "**Answer: {}**",
    "\\boxed{{{}}}",
    "Therefore, the correct answer is **({})**.",
    "So the correct option is {}.",
    "Final answer: **{}**",
    "<answer>{}</answer>",
    "The correct answer is ({}) a thing.",
    "### Answer\n**{}**",
    "{}",
    "**{}**",
    "Option {} is correct.",
    "Thus the answer must be {}.",
]
REMARKS = [
    "",
    "\n",
    "\n\nThe other options are wrong because they ignore the spin.",
    " Option {0} ignores the spin, and {1} the mass.",
    " The other choices ({0}, {1}) are too small.",
    " This rules out {0} and {1}.",
    " Unlike {0}, it conserves energy.",
    " A higher mass would be unstable.",
    " I hope this helps!",
    " (Not {0}.)",
    " {0} would only be right at T = 0.",
]


@settings(max_examples=400)
@given(
    st.permutations("ABCD"),
    st.lists(st.sampled_from(THOUGHTS), max_size=6),
    st.lists(st.permutations([1, 2, 3]), min_size=7, max_size=7),
    st.sampled_from(ENDS),
    st.sampled_from(REMARKS),
    st.sampled_from([" ", "\n"]),
)
def test_the_choice_of_a_long_answer_is_its_conclusion(
    labels: list[str],
    thoughts: list[str],
    orders: list[list[int]],
    end: str,
    remark: str,
    separator: str,
) -> None:
    """Thoughts and remarks name the other choices, deny them and ask whether they are right."""
    spoken = [
        text.format(*(labels[index] for index in order))
        for text, order in zip([*thoughts, remark], orders, strict=False)
    ]
    if remark and end in ("{}", "**{}**", "### Answer\n**{}**"):
        spoken[-1] = "\n\n" + spoken[-1].strip()
    elif remark.startswith(" ") and end.endswith("}"):
        spoken[-1] = "." + spoken[-1]
    completion = f"{separator.join(spoken[:-1])}\n{end.format(labels[0])}{spoken[-1]}"
    assert [score(completion, other) for other in "ABCD"] == [
        float(other == labels[0]) for other in "ABCD"
    ], completion


PUBLISHED_RULE = re.compile(r"answer[ \t]*:[ \t]*\$?([A-D])\$?", re.IGNORECASE)
"""What simple-evals takes for the answer: the first letter behind "Answer:"."""


PUBLISHED_LEADS = [lead for lead in ALL_LEADS if PUBLISHED_RULE.search(lead.format("A"))]


@given(
    st.sampled_from("ABCDabcd"),
    st.sampled_from(["{}", "${}$", "{})", "{}.", "{}**"]),
    st.sampled_from(PUBLISHED_LEADS),
    st.sampled_from(TAILS),
)
def test_a_letter_that_the_published_rule_reads_is_read_alike(
    letter: str, form: str, lead: str, tail: str
) -> None:
    completion = lead.format(form.format(letter)) + tail
    published = PUBLISHED_RULE.search(completion)
    assert published is not None
    assert score(completion, published[1].upper()) == 1.0


@pytest.mark.parametrize(
    ("completion", "published", "letter"),
    [
        ("Answer: A, B", "A", None),  # a list
        ("Answer: A or B", "A", None),
        ("Answer: A star", "A", None),  # an article
        ("Answer: Because it is hot, (C)", "B", "C"),  # the first letter of a word
        ("Answer: A\nWait. Answer: B", "A", "B"),  # the first, not the last
        ("Answer: A? No. The answer is C.", "A", "C"),
        ("The answer is (C)", None, "C"),  # another lead-in
    ],
)
def test_differences_from_the_published_rule_have_a_reason(
    completion: str, published: str | None, letter: str | None
) -> None:
    match = PUBLISHED_RULE.search(completion)
    assert (match and match[1].upper()) == published
    assert [score(completion, other) for other in "ABCD"] == [
        float(other == letter) for other in "ABCD"
    ]


@pytest.mark.parametrize(
    "completion",
    [
        "**Answer:** The correct option is (C), because it is heavy.",
        "Answer: The correct answer is C",
        "The answer is therefore clearly C",
        "Correct Answer: C) a black hole",
        "C: a black hole",
        "(C) a black hole",
        "Answer\n\nC) a black hole",
        "My final answer is: **C**\n\n---",
        "The answer is\n\n$$\\boxed{C}$$",
        "$$\\boxed{\\text{C}}$$\n",
        "Choice (C) is the best answer.",
        "It must be C",
        "I'm going with C.",
        "Definitely C.",
        "Obviously C",
        "Probably C.",
        "I believe C.",
        "I say C.",
        "I think C",
        "Let me go with option C",
        "Correct: C",
        "Ans: C",
        "Solution: C",
        "Result: C",
        "-> C",
        "Therefore C",
        "[C]",
        "C!",
        "The answer is C)",
        "The answer is option c",
        "The letter is C",
        "I select choice **C**.",
        "The most likely answer is C.",
        "The answer to the above question is C",
        "Among the options, C is the correct one.",
        "Thus C is the correct choice.",
        "Only C is correct.",
        "C is right",
        "Only option C satisfies all constraints.",
        "the correct statement is (C)",
        "So my answer is C. Thank you!",
        "<answer>C</answer>\n",
        "<answer>\nC\n</answer>",
        "<answer> (C) a black hole</answer>",
        "<final>C</final>",
        "Answer: $C$",
        "Answer: $\\text{C}$",
        "Answer: \\boxed{C}",
        "Answer: (C). The black hole",
        "**C) a black hole**",
        "The correct answer is: \n\n**C. a black hole**",
        "选C",
        "应该选C。",
        "答案\uff1a**C**",
        "本题选择C选项",
        "故答案为\uff1aC",
        "正确的是C",
        "正确的选项是\uff08C\uff09",
        "所以答案是\uff1a(C) 黑洞",
        "C。",
        "C是正确答案",
        "Die richtige Antwort ist C.",
        "Richtig ist C",
        "C ist richtig.",
        "La bonne réponse est la C",
        "C est la bonne réponse",
        "La opción correcta es C",
        "Правильный вариант: C",
        "I'd answer C",
        "I will answer with C.",
        "Answer with C",
        "[[C]]",
        "Answer:C",
        "answer=C",
        "ANSWER IS C",
        "The answer is 'C'",
        'The answer is "C".',
        "Answer: C / a black hole",
        "Answer: C - a black hole",
        "Answer: C \u2014 a black hole",
        "Answer: C, a black hole",
        "Answer: C (a black hole)",
        "Answer: C a black hole",
        "The answer is C as A is wrong",
        "The correct answer is C, not A or B",
        "Options A, B, and D are incorrect, leaving C.",
        "That leaves C",
        "That leaves us with C.",
        "This corresponds to option C.",
        "which matches choice C.",
        "This matches option (C).",
    ],
)
def test_a_written_statement_chooses_c(completion: str) -> None:
    assert [score(completion, other) for other in "ABCD"] == [0.0, 0.0, 1.0, 0.0]
