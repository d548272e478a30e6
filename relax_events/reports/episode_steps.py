"""The steps of a sample's conversation: who said what, the tools that the policy called, and the
tokens of each of its turns. What ATIF and traces are made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from relax_events.config import RunConfig
from relax_events.data.conversations import ASSISTANT
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage
from relax_events.events.types import SampleRolledOut
from relax_events.gateway.tool_calls import ParsedReply, parse_reply
from relax_events.gateway.tool_formats import ToolFormat, choose_format
from relax_events.models.tokenizer_folder import FolderTokenizer
from relax_events.training.batch.paths import SamplePath, sampled_tokens, split_paths
from relax_events.training.batch.row_layout import read_array

TOOL = "tool"


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The tokens of a turn of the policy.

    Attributes:
        num_read: Tokens before it on its path, which the policy read.
        tokens: int32 [n], what it sampled.
        logprobs: float32 [n], in nats, as the engine had them.
    """

    num_read: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """A message of a conversation, with the results of the tools that it called.

    Attributes:
        message: As it was said.
        reply: The parts of a turn of the policy; None for other messages.
        turn: Its tokens; None for other messages, and where tokens and turns don't match.
        results: The messages of tools that follow it.
    """

    message: ChatMessage
    reply: ParsedReply | None
    turn: SampledTurn | None
    results: tuple[ChatMessage, ...] = ()


def read_tool_format(config: RunConfig) -> ToolFormat:
    """Return the format of the policy's tool calls: of the run file, or of the chat template where
    the model's folder is here.
    """
    template = ""
    with suppress(OSError, ValueError, TemplateError, ConfigError):
        tokenizer = FolderTokenizer.open(config.model.path)
        template = str(tokenizer.chat_template or "") if tokenizer else ""
    return choose_format(config.environment.tool_call_format, template=template)


def read_steps(sample: SampleRolledOut, style: ToolFormat) -> list[EpisodeStep]:
    """Return the steps of a sample: of the path of its last turn, if it has several.

    Args:
        sample: With its arrays at hand.
        style: The format of the policy's tool calls.
    """
    turns = sampled_turns(sample)
    said = sample.turns or [ChatMessage.of_text(ASSISTANT, sample.completion)]
    num_said = sum(message.role == ASSISTANT for message in said)
    known: Iterator[SampledTurn | None] = (
        iter(turns) if len(turns) == num_said else iter([None] * num_said)
    )
    steps: list[EpisodeStep] = []
    for number, message in enumerate((*sample.messages, *said)):
        is_sampled = number >= len(sample.messages) and message.role == ASSISTANT
        if message.role == TOOL and steps and steps[-1].message.role == ASSISTANT:
            before = steps[-1]
            steps[-1] = EpisodeStep(
                before.message, before.reply, before.turn, (*before.results, message)
            )
            continue
        reply = parse_reply(message.text, style=style) if message.role == ASSISTANT else None
        steps.append(EpisodeStep(message, reply, next(known) if is_sampled else None))
    return steps


def sampled_turns(sample: SampleRolledOut) -> list[SampledTurn]:
    """Return the turns of the policy on the last path: the runs of tokens that it sampled."""
    logprobs = read_array(sample, "rollout_logprobs").astype(np.float32)
    paths = split_paths([sample])
    tokens, is_sampled = read_array(paths[-1], "tokens"), sampled_tokens(paths[-1])
    own = logprobs[len(logprobs) - len(tokens) :].copy()
    _fill_shared(own, paths, logprobs)
    edges = np.flatnonzero(np.diff(is_sampled.astype(np.int8), prepend=0, append=0))
    return [
        SampledTurn(int(start), tokens[start:end].astype(np.int32), own[start:end])
        for start, end in edges.reshape(-1, 2).tolist()
    ]


def _fill_shared(
    own: NDArray[np.float32], paths: Sequence[object], logprobs: NDArray[np.float32]
) -> None:
    """Fill in the log-probabilities of turns that the last path shares with earlier ones, which
    have them.
    """
    *earlier, last = paths
    start = 0
    for path in earlier:
        assert isinstance(path, SamplePath)
        assert isinstance(last, SamplePath)
        size = min(len(path.tokens), len(last.tokens))
        differ = np.flatnonzero(path.tokens[:size] != last.tokens[:size])
        num_shared = int(differ[0]) if len(differ) else size
        values = logprobs[start : start + num_shared]
        is_empty = (own[:num_shared] == 0) & last.is_sampled[:num_shared]
        own[:num_shared][is_empty] = values[is_empty]
        start += len(path.tokens)


def arguments_of(text: str) -> dict[str, object]:
    """Return the arguments of a tool call as an object."""
    found: dict[str, object] = json.loads(text)
    return found
