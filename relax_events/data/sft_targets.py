"""Tokenize the SFT and DPO targets of rows like generated samples: tokens and loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT, begins_turn
from relax_events.data.messages import continue_turn
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.events.types import PromptGroupIssued


@dataclass(frozen=True, slots=True)
class TokenizedTarget:
    """The tokens after the prompt, and a mask with 1 on the assistant's tokens and stop tokens."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


def tokenize_targets(
    row: PromptRow | PromptGroupIssued, *, renderer: PromptRenderer
) -> tuple[TokenizedTarget, ...]:
    """Tokenize the targets of a row: its completions, or its answer if it has none.

    Raises:
        PoisonSample: A target is empty, or the chat template changes earlier text; the text says
            which.
    """
    completions = row.completions or [[ChatMessage.of_text(ASSISTANT, row.answer)]]
    return tuple(
        tokenize_completion(row.messages, completion, renderer=renderer, tools=row.tools)
        for completion in completions
    )


def tokenize_group_targets(
    issued: PromptGroupIssued, *, renderer: PromptRenderer
) -> tuple[TokenizedTarget, ...]:
    """Tokenize the targets of a prompt group, one for each sample.

    Raises:
        PoisonSample: The numbers of targets and samples differ, or as for `tokenize_targets`.
    """
    targets = tokenize_targets(issued, renderer=renderer)
    if len(targets) != issued.samples_per_prompt:
        raise PoisonSample(
            f"{issued.samples_per_prompt} samples need the same number of targets, got "
            f"{len(targets)}; is the data section that of the run?"
        )
    return targets


def tokenize_completion(
    prompt: Sequence[ChatMessage],
    completion: Sequence[ChatMessage],
    *,
    renderer: PromptRenderer,
    tools: str = "",
) -> TokenizedTarget:
    """Tokenize the messages that follow a prompt.

    The chat template renders the conversation up to the start and up to the end of each assistant
    message. The text between the two, up to its last stop token, is trained on; template text after
    it and other messages have loss mask 0. Each piece is tokenized alone, as in generation. If the
    template puts no stop token after the last message, one is added.

    Args:
        prompt: The conversation so far.
        completion: Messages that begin and end with the assistant's; the first one continues a
            prompt that ends with an assistant's message.
        renderer: The policy's renderer.
        tools: JSON list of tools, as in the prompt.
    Raises:
        PoisonSample: A message is empty, or the template changes earlier text when a message is
            added.
    """
    turns = [message for message in completion if message.role == ASSISTANT]
    if not all(one.text.strip() or one.tool_calls for one in turns):
        raise PoisonSample("an assistant message of the target is empty; remove the row")
    renderer.require_shown([*prompt, *completion], tools=tools)
    if not renderer.has_template:
        return _tokenize_without_template(completion, renderer)
    pieces: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.uint8]] = []
    rendered = renderer.render_prompt(prompt, tools=tools)
    if begins_turn(prompt):
        *prompt, begun = prompt
        completion = [continue_turn(begun, completion[0]), *completion[1:]]
    for index, message in enumerate(completion):
        if message.role != ASSISTANT:
            continue
        before = (
            renderer.apply_template([*prompt, *completion[:index]], tools=tools)
            if index
            else rendered
        )
        after = renderer.apply_template(
            [*prompt, *completion[: index + 1]], tools=tools, is_complete=True
        )
        between = renderer.encode_rendered(_appended_text(before, rendered, len(prompt) + index))
        turn = renderer.encode_rendered(_appended_text(after, before, len(prompt) + index + 1))
        num_loss = _num_loss_tokens(turn, renderer.stop_token_ids)
        pieces += [between, turn]
        masks += [
            np.zeros(len(between), np.uint8),
            (np.arange(len(turn)) < num_loss).astype(np.uint8),
        ]
        rendered = after
    tokens, mask = np.concatenate(pieces), np.concatenate(masks)
    num_kept = int(np.flatnonzero(mask)[-1]) + 1
    return _end_with_stop_token(tokens[:num_kept], mask[:num_kept], renderer.stop_token_ids)


def _tokenize_without_template(
    completion: Sequence[ChatMessage], renderer: PromptRenderer
) -> TokenizedTarget:
    if len(completion) > 1:
        raise PoisonSample(
            f"a completion of {len(completion)} messages needs a chat template to separate "
            "them; set data.chat_template = true"
        )
    tokens = renderer.encode(completion[0].text)
    return _end_with_stop_token(tokens, np.ones(len(tokens), np.uint8), renderer.stop_token_ids)


def _appended_text(longer: str, shorter: str, num_messages: int) -> str:
    if not longer.startswith(shorter):
        at = next(
            (
                index
                for index, (one, other) in enumerate(zip(longer, shorter, strict=False))
                if one != other
            ),
            len(longer),
        )
        raise PoisonSample(
            f"the chat template changes the text before message {num_messages} "
            f"({shorter[at : at + 40]!r}): rendered text must not change when messages are added; "
            "set data.train_on = 'last', or data.chat_template_file to a template that keeps it"
        )
    return longer[len(shorter) :]


def _num_loss_tokens(turn: NDArray[np.int32], stop_token_ids: Sequence[int]) -> int:
    """Count the tokens up to the last stop token; all if there is none."""
    stops = np.flatnonzero(np.isin(turn, stop_token_ids))
    return int(stops[-1]) + 1 if len(stops) else len(turn)


def _end_with_stop_token(
    tokens: NDArray[np.int32], mask: NDArray[np.uint8], stop_token_ids: Sequence[int]
) -> TokenizedTarget:
    if int(tokens[-1]) in stop_token_ids:
        return TokenizedTarget(tokens, mask)
    return TokenizedTarget(
        np.append(tokens, np.int32(stop_token_ids[0])), np.append(mask, np.uint8(1))
    )
