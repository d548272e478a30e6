"""The words and runs of characters by which a text makes, hedges and denies a choice.

Each word has one role, whatever its language. A further language is further words.
"""

from __future__ import annotations

import re
from enum import Enum


class Role(Enum):
    """What a word says about a label next to it."""

    LEAD = "the text answers"
    NAMED = "the text answers, if a copula follows"
    CONCLUSION = "the text answers, if the label ends the clause"
    COPULA = "is"
    MODAL = "can be"
    HEDGE = "may be"
    DENIAL = "is not"
    WRONG = "is wrong"
    RIGHT = "is right"
    CONDITION = "if it is, or was thought to be"
    CONTRAST = "is, in contrast to one before it that is not"
    JOIN = "and"
    OPINION = "the text answers, if nothing else is in the clause"
    FILLER = "says nothing"


WORDS: dict[Role, str] = {
    Role.LEAD: """
        answer answers answered ans final_answer choose chooses chose chosen choosing pick picks
        picked picking select selects selected selecting go going conclude leaves
        leaving it's that's
        antwort wähle réponse reponse choisis respuesta elijo escojo resposta escolho risposta
        scelgo ответ выбираю""",
    Role.NAMED: """
        option choice letter selection response solution result correct right best it that this
        final one statement verdict lösung richtig richtige bonne correcte correcta correta corretta
        opción opção opzione alternativa alternative scelta вариант верный правильный""",
    Role.CONCLUSION: "therefore thus hence so consequently donc daher entonces portanto quindi",
    Role.COPULA: "is are was were be being remains lautet ist est es é è",
    Role.MODAL: "must should would will can seem seems looks appears",
    Role.HEDGE: """
        maybe perhaps possibly might may could potentially either alternatively or unsure
        vielleicht oder peut-être ou quizás o talvez forse может возможно или""",
    Role.DENIAL: """
        not never cannot neither nor no unlikely doubt except excluding eliminate eliminates
        eliminated exclude excluded rule ruled reject rejected without rather instead nicht kein
        keine pas non não не""",
    Role.WRONG: """
        wrong incorrect false invalid impossible falsch fausse falsa incorrecta incorreta errada
        неверно""",
    Role.RIGHT: """
        accurate appropriate suitable possible plausible""",
    Role.CONDITION: """
        if whether unless suppose supposing assume assuming assumed thought guessed initially wenn
        ob si se если""",
    Role.CONTRAST: "but sondern mais sino ma mas",
    Role.JOIN: "and und et y e и",
    Role.OPINION: """
        i i'd i'll we we'd think believe say guess clearly definitely obviously probably surely
        certainly likely indeed""",
    Role.FILLER: """
        the a an my our your to for of question problem above then than simply just only most
        actually completely also with out number das der die la le el da di это""",
}
ROLES = {word: role for role, words in WORDS.items() for word in words.split()}
CALLS_RIGHT = {*WORDS[Role.RIGHT].split(), "correct", "right", "best", "answer", "correcte"}
CALLS_RIGHT |= {
    "richtig",
    "richtige",
    "bonne",
    "верно",
    "choice",
    "solution",
    "correcta",
    "correta",
    "corretta",
    "правильный",
    "верный",
}
CALLS_WRONG = {*WORDS[Role.WRONG].split(), "not", "never", "cannot", "unlikely", "nicht", "pas"}
CALLS_WRONG |= {"eliminated", "excluded", "ruled", "rejected", "não", "non", "не"}
ENDS_OF_CALLS = {
    "because",
    "since",
    "as",
    "and",
    "so",
    "here",
    "then",
    "while",
    "whereas",
    "or",
    "but",
}
OR = {"or", "nor", "oder", "ou", "o", "или"}
DOUBTFUL = {"possible", "plausible"}
NO_NOUN_WORDS = """
    is are was were must should would will can could may might seems cannot isn't can't because
    since as due so which that where with for by from and or but not if given based then while
    whereas rather instead only ist est es und oder et ou o"""
NO_NOUNS = frozenset(NO_NOUN_WORDS.split())
"""An article stands before none of these, so "A" in front of one is a label."""
NO_VERBS_OF_I = {"is", "because", "since", "or"}

CJK = "\u2e80-\u2fff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
CJK_FILLERS = "(?:应该|應該|选项|選項|[是为為就应應的了最终終项項はが은는이가])*"
CJK_LEAD = re.compile(
    rf"(?:答案|答え|正解|选择|選擇|[选選](?![项項])|정답|답|正[确確]{CJK_FILLERS}[是为為]){CJK_FILLERS}"
    rf"(?:正[确確])?{CJK_FILLERS}$"
)
CJK_DENIAL = re.compile("[不非没沒错錯误誤]|排除|除了|ない|아니")
CJK_HEDGE = re.compile("可能|也许|也許|或|大概|かも|아마")
CJK_JOIN = re.compile("(?:或者?|[和与與及とや와과])$")
CJK_RIGHT = re.compile("(?:选?[项項])?[是为為がは]?(?:正[确確解]|对|對|最佳)")
