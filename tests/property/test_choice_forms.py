"""Choices in every form that they are written in, made by a grammar: case x bracket x emphasis x LaTeX
x lead-in x language x tail.
"""

from __future__ import annotations

import itertools

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
    "Russian": ["Ответ: {}", "Правильный ответ — {}"],
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
def test_article_and_pronoun_are_no_letters(completion: str) -> None:
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
