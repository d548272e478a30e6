"""Rewards for following instructions that a program can check."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from relax_events.rewards.declaring import declares
from relax_events.rewards.verifiers import ifbench_forms, ifbench_words
from relax_events.rewards.verifiers.answers import final_text
from relax_events.rewards.verifiers.instructions import INSTRUCTIONS, import_langdetect

TABLES = (ifbench_words, ifbench_forms)
"""Importing them has put their instructions into the table."""
METADATA = {
    "instruction_id_list": "ids such as `punctuation:no_comma`, as in the dataset",
    "kwargs": "for each of them an object of its arguments; nulls are left out",
}


@declares(
    source="Instruction-Following Evaluation for Large Language Models (arXiv 2311.07911); for IFBench arXiv 2507.02833",
    metadata=METADATA,
    packages=("langdetect",),
    prepare=import_langdetect,
)
def ifeval(
    completion: str, *, answer: str, metadata: dict[str, Any], prompt: str, mode: Literal["strict", "loose"] = "strict", partial: bool = False
) -> dict[str, float]:
    """Give 1 when the text after `</think>` follows all instructions, else 0; with `partial` the share of those it follows.

    It knows the 25 instructions of IFEval, and those of IFBench that need no model of language: all but `ratio:stop_words`,
    `words:start_verb` and `words:odd_even_syllables`.
    `loose` also tries the text without its first line, its last line, both, and without asterisks. The component `followed` is
    the share.

    Raises:
        ValueError: The metadata name no instruction, an unknown one, or arguments that it does not take.
    """
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs") or []
    if not names or not isinstance(names, list) or len(names) < len(arguments):
        raise ValueError("the sample names no instructions; see metadata.instruction_id_list and metadata.kwargs")
    given = [*arguments, *[{}] * (len(names) - len(arguments))]
    texts = variants(final_text(completion)) if mode == "loose" else [final_text(completion)]
    followed = [_is_followed(name, kwargs or {}, texts, prompt) for name, kwargs in zip(names, given, strict=True)]
    share = sum(followed) / len(followed)
    return {"reward": share if partial else float(all(followed)), "followed": share}


def variants(text: str) -> list[str]:
    """Return a text without what often stands around an answer, in the eight ways of the loose measure."""
    lines = text.split("\n")
    cuts = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cuts, *(cut.replace("*", "") for cut in cuts)]


def _is_followed(name: str, kwargs: Mapping[str, Any], texts: Sequence[str], prompt: str) -> bool:
    check = INSTRUCTIONS.get(name)
    if check is None:
        raise ValueError(f"there is no instruction {name!r}; see metadata.instruction_id_list")
    taken = list(inspect.signature(check).parameters)[1:]
    arguments = {key: value for key, value in kwargs.items() if key in taken and value is not None}
    if "prompt_to_repeat" in taken:
        arguments.setdefault("prompt_to_repeat", prompt)
    try:
        return any(text.strip() and check(text, **arguments) for text in texts)
    except TypeError as error:
        raise ValueError(f"instruction {name} does not take {dict(kwargs)!r:.100}: {error}") from None
