"""Rewards for following instructions that a program can check."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from relax_events.api.rewards import Explanation, reward
from relax_events.packages.verifiers import ifbench_forms, ifbench_words
from relax_events.packages.verifiers.answer_extraction import final_text
from relax_events.packages.verifiers.ifeval_instructions import INSTRUCTIONS, import_langdetect

TABLES = (ifbench_words, ifbench_forms)
"""Importing these modules registers their instructions."""
KEYWORD_PARAMETERS = ("keyword", "forbidden_word", "word", "letter", "first_word")
METADATA = {
    "instruction_id_list": "ids such as `punctuation:no_comma`, as in the dataset",
    "kwargs": "for each of them an object of its arguments; nulls are left out",
}


def explain_ifeval(
    completion: str, *, metadata: dict[str, Any], prompt: str, mode: str = "strict", **_: Any
) -> Explanation:
    """Explain which instructions were not followed."""
    followed = follow(completion, metadata=metadata, prompt=prompt, mode=mode)
    missed = [name for name, is_followed in followed if not is_followed]
    return Explanation(
        answer=final_text(completion),
        location="all of it",
        why=f"not followed: {', '.join(missed)}" if missed else "all instructions are followed",
    )


@reward(
    source=(
        "Instruction-Following Evaluation for Large Language Models (arXiv 2311.07911); for "
        "IFBench arXiv 2507.02833"
    ),
    metadata=METADATA,
    packages=("langdetect", "syllapy", "textblob"),
    prepare=import_langdetect,
    explain=explain_ifeval,
)
def ifeval(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    mode: Literal["strict", "loose"] = "strict",
    partial: bool = False,
) -> dict[str, float]:
    """Give 1 when the text after `</think>` follows all instructions, else 0; with `partial` the
    share of the instructions that it follows.

    It knows the 25 instructions of IFEval and the 58 of IFBench. Of these
    `words:odd_even_syllables` needs the package syllapy and `words:start_verb` textblob (`pip
    install 'relax-events[english]'`); both bring their data with them. `loose` also tries the text
    without its first line, its last line, both, and without asterisks. The component `followed` is
    the share.

    For these 25 the verdicts are those of IFEval's program, for the 58 as IFBench's
    program of 2026-09 gives them, with its repairs from 2026-04 on. Sentences are split by rules,
    and by NLTK's models in the published programs, so the same text gives the same verdict without
    downloaded data: at `.`, `!` or `?`, and what closes behind them, before white space; not at
    dots before a small letter or a digit, nor behind a title, another abbreviation or one letter,
    unless a function word with a capital follows. Verdicts differ where the programs are wrong by
    an instruction's words: marks alone, such as a dash, are no words and no sentences; a
    conjunction counts once, in any case; an empty paragraph is not counted, and so is not indexed
    either; a ratio of sentences needs some of each kind, quoted ones too; sub-bullets need bullets.
    The page of evidence counts all by instruction.

    Raises:
        ValueError: The metadata name no instruction, an unknown one, or arguments that it does not
            take.
        EnvironmentProblem: An instruction needs a package that is not installed.
    """
    followed = [
        is_followed
        for _, is_followed in follow(completion, metadata=metadata, prompt=prompt, mode=mode)
    ]
    share = sum(followed) / len(followed)
    return {"reward": share if partial else float(all(followed)), "followed": share}


def follow(
    completion: str, *, metadata: dict[str, Any], prompt: str, mode: str
) -> list[tuple[str, bool]]:
    """Return the names of the instructions, each with whether it was followed.

    Raises:
        ValueError: As in `ifeval`.
    """
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs") or []
    if not names or not isinstance(names, list) or len(names) < len(arguments):
        raise ValueError(
            "the sample names no instructions; see metadata.instruction_id_list and metadata.kwargs"
        )
    padded_arguments = [*arguments, *[{}] * (len(names) - len(arguments))]
    texts = variants(final_text(completion)) if mode == "loose" else [final_text(completion)]
    return [
        (name, _is_followed(name, kwargs or {}, texts, prompt))
        for name, kwargs in zip(names, padded_arguments, strict=True)
    ]


def variants(text: str) -> list[str]:
    """Return the eight variants of the loose metric: a text without its first or last line and
    without asterisks.
    """
    lines = text.split("\n")
    cuts = [
        text,
        "\n".join(lines[1:]).strip(),
        "\n".join(lines[:-1]).strip(),
        "\n".join(lines[1:-1]).strip(),
    ]
    return [*cuts, *(cut.replace("*", "") for cut in cuts)]


def _is_followed(name: str, kwargs: Mapping[str, Any], texts: Sequence[str], prompt: str) -> bool:
    check = INSTRUCTIONS.get(name)
    if check is None:
        raise ValueError(f"there is no instruction {name!r}; see metadata.instruction_id_list")
    parameters = dict(list(inspect.signature(check).parameters.items())[1:])
    arguments = {
        key: _convert_argument(name, parameters[key], value)
        for key, value in kwargs.items()
        if key in parameters and value is not None
    }
    if "prompt_to_repeat" in parameters:
        arguments.setdefault("prompt_to_repeat", prompt)
    try:
        return any(text.strip() and check(text, **arguments) for text in texts)
    except TypeError as error:
        raise ValueError(
            f"instruction {name} does not take {dict(kwargs)!r:.100}: {error}"
        ) from None


def _convert_argument(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Convert an argument for a check: datasets store whole numbers as floats, and keywords with
    surrounding blanks.
    """
    if isinstance(value, float) and parameter.annotation == "int":
        if not value.is_integer():
            raise ValueError(
                f"instruction {name} takes a whole number as {parameter.name}, got {value}; "
                "see metadata.kwargs"
            )
        return int(value)
    if parameter.name.rstrip("s12345") in KEYWORD_PARAMETERS:
        return (
            [str(one).strip() for one in value] if isinstance(value, list) else str(value).strip()
        )
    return value
