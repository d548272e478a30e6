"""Lays out answers that the data bring as if the model had generated them: tokens, and which of
them it would have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_events.data.completions import ASSISTANT
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.events.types import PromptGroupIssued


@dataclass(frozen=True, slots=True)
class LaidOutAnswer:
    """What follows the prompt: tokens, and 1 where the assistant chose the token, its stop tokens
    included.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


def answers_of(
    row: PromptRow | PromptGroupIssued, *, renderer: PromptRenderer
) -> tuple[LaidOutAnswer, ...]:
    """Lay out the answers that a row brings: its completions, or where it has none its answer.

    Raises:
        PoisonSample: An answer is empty, or the chat template can't be followed; the text says
            which.
    """
    completions = row.completions or [[ChatMessage.of_text(ASSISTANT, row.answer)]]
    return tuple(
        lay_out(row.messages, completion, renderer=renderer, tools=row.tools)
        for completion in completions
    )


def sample_answers(
    issued: PromptGroupIssued, *, renderer: PromptRenderer
) -> tuple[LaidOutAnswer, ...]:
    """Lay out the answers of a prompt group, one for each sample.

    Raises:
        PoisonSample: There are more or fewer answers than samples, or as `answers_of`.
    """
    answers = answers_of(issued, renderer=renderer)
    if len(answers) != issued.samples_per_prompt:
        rule = f"{issued.samples_per_prompt} samples need as many answers"
        raise PoisonSample(
            f"{rule}, and the prompt brings {len(answers)}; is the data section that of the run?"
        )
    return answers


def lay_out(
    prompt: Sequence[ChatMessage],
    completion: Sequence[ChatMessage],
    *,
    renderer: PromptRenderer,
    tools: str = "",
) -> LaidOutAnswer:
    """Lay out the messages that follow a prompt.

    The chat template renders the conversation again up to before and up to behind each assistant
    message. What the latter adds is the assistant's, up to the last stop token in it; template text
    behind that, and the messages between, carry no loss. Each piece is tokenised by itself, as it
    is when the model generates it. A last message that the template leaves without a stop token is
    given one.

    Args:
        prompt: The conversation so far.
        completion: Begins and ends with an assistant message.
        renderer: Of the policy.
        tools: As the prompt is rendered with.
    Raises:
        PoisonSample: A message is empty, or the template renders the beginning of the conversation
            otherwise once more follows.
    """
    if any(not message.text.strip() for message in completion if message.role == ASSISTANT):
        raise PoisonSample("an assistant message that is to be learnt is empty; leave the row out")
    if not renderer.has_template:
        return _plain(completion, renderer)
    pieces: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.uint8]] = []
    written = renderer.templated(prompt, tools=tools)
    for index, message in enumerate(completion):
        if message.role != ASSISTANT:
            continue
        before = (
            renderer.templated([*prompt, *completion[:index]], tools=tools) if index else written
        )
        after = renderer.templated([*prompt, *completion[: index + 1]], tools=tools, is_whole=True)
        between = renderer.encode(_rest(before, written, len(prompt) + index))
        turn = renderer.encode(_rest(after, before, len(prompt) + index + 1))
        num_chosen = _num_chosen(turn, renderer.stop_token_ids)
        pieces += [between, turn]
        masks += [
            np.zeros(len(between), np.uint8),
            (np.arange(len(turn)) < num_chosen).astype(np.uint8),
        ]
        written = after
    tokens, mask = np.concatenate(pieces), np.concatenate(masks)
    num_kept = int(np.flatnonzero(mask)[-1]) + 1
    return _ended(tokens[:num_kept], mask[:num_kept], renderer.stop_token_ids)


def _plain(completion: Sequence[ChatMessage], renderer: PromptRenderer) -> LaidOutAnswer:
    if len(completion) > 1:
        raise PoisonSample(
            f"a completion of {len(completion)} messages needs a chat template to tell them "
            "apart; set data.chat_template = true"
        )
    tokens = renderer.encode(completion[0].text)
    return _ended(tokens, np.ones(len(tokens), np.uint8), renderer.stop_token_ids)


def _rest(longer: str, shorter: str, num_messages: int) -> str:
    if not longer.startswith(shorter):
        at = next(
            (
                index
                for index, (one, other) in enumerate(zip(longer, shorter, strict=False))
                if one != other
            ),
            len(longer),
        )
        rule = "a text that was rendered must stay as it is when more follows"
        remedy = (
            "set data.train_on = 'last', or a template that keeps to it by data.chat_template_file"
        )
        raise PoisonSample(
            f"the chat template changes what stands before message {num_messages} "
            f"({shorter[at : at + 40]!r}): {rule}; {remedy}"
        )
    return longer[len(shorter) :]


def _num_chosen(turn: NDArray[np.int32], stop_token_ids: Sequence[int]) -> int:
    """Count the tokens up to the last stop token; all where there is none."""
    stops = np.flatnonzero(np.isin(turn, stop_token_ids))
    return int(stops[-1]) + 1 if len(stops) else len(turn)


def _ended(
    tokens: NDArray[np.int32], mask: NDArray[np.uint8], stop_token_ids: Sequence[int]
) -> LaidOutAnswer:
    if int(tokens[-1]) in stop_token_ids:
        return LaidOutAnswer(tokens, mask)
    return LaidOutAnswer(
        np.append(tokens, np.int32(stop_token_ids[0])), np.append(mask, np.uint8(1))
    )
