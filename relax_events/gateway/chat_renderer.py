"""Turn messages into prompt tokens without tokenizing the policy's turns again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.data.rendering import ANSWER_MARK, PromptRenderer
from relax_events.errors import PoisonSample
from relax_events.gateway.messages import Message, for_template, list_media, read_text
from relax_events.gateway.render_queue import RenderQueue
from relax_events.gateway.tool_formats import choose_format

Result = TypeVar("Result")
NUM_THREADS = 4
"""Renderings at once: a tokenizer lets other threads run."""


class ChatRenderer:
    """Renders a session's messages with the policy's chat template."""

    def __init__(self, renderer: PromptRenderer, *, tool_format: str = "auto") -> None:
        """Use the policy's renderer.

        Args:
            renderer: Of the policy.
            tool_format: The format of its tool calls; see `tool_formats.choose_format`.
        """
        self._renderer = renderer
        self.tool_format = choose_format(tool_format, template=renderer.chat_template)
        self.reads_media = renderer.reads_media
        self.longest_token_bytes = renderer.longest_token_bytes
        self._queue = RenderQueue(NUM_THREADS if renderer.may_share_threads else 1)
        self.stop_token_ids = renderer.stop_token_ids

    async def run(self, owner: object, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """Run something slow for a session without holding up the event loop or other sessions;
        raises as `RenderQueue.run`.
        """
        return await self._queue.run(owner, work, num_bytes=num_bytes)

    def close(self) -> None:
        """Stop the threads."""
        self._queue.close()

    def prompt_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[Message]
    ) -> NDArray[np.int32]:
        """Render a whole conversation up to the start of the next turn.

        Raises:
            PoisonSample: The template rejects it, or media and placeholders don't match; the text
                says why.
        """
        turns = self._for_template(messages)
        return self._renderer.encode_with_media(
            self._renderer.render_turns(turns, tools=list(tools) or None), list_media(messages)
        )

    def bridge_tokens(
        self,
        before: Sequence[Message],
        rest: Sequence[Message],
        *,
        tools: Sequence[Message],
        has_stop: bool,
    ) -> NDArray[np.int32]:
        """Render the tokens between a sampled turn and the next one: the end of its message, the
        messages after it, and the head of the next turn.

        The template gets a mark instead of the sampled turn, and its text up to the mark is
        dropped: that part is on the path already, as it was read and sampled.

        Args:
            before: The conversation up to the sampled turn.
            rest: The messages after it.
            tools: Of the session.
            has_stop: Whether the sampled turn ends with a stop token, which is then not repeated.
        Raises:
            PoisonSample: The template rejects the conversation or leaves the sampled turn out, or
                media and placeholders don't match.
        """
        turns = self._for_template((*before, *rest))
        turns.insert(len(before), {"role": ASSISTANT, "content": ANSWER_MARK})
        text = self._renderer.render_turns(turns, tools=list(tools) or None)
        num_marks = sum(read_text(message).count(ANSWER_MARK) for message in (*before, *rest))
        if num_marks or text.count(ANSWER_MARK) != 1:
            raise PoisonSample(
                "the chat template leaves out, or repeats, an earlier turn of the policy; set "
                "data.chat_template_file to a template that keeps it"
            )
        tokens = self._renderer.encode_with_media(text.partition(ANSWER_MARK)[2], list_media(rest))
        stops = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return tokens[int(stops[0]) + 1 :] if has_stop and len(stops) else tokens

    def _for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        takes_text = self.tool_format.takes_text
        return [for_template(message, takes_text=takes_text) for message in messages]

    def reply_text(self, tokens: NDArray[np.int32]) -> str:
        """Decode a sampled turn without its stop token; with special tokens where it has a tool
        call or reasoning, whose tags are special in some tokenizers.
        """
        if len(tokens) and int(tokens[-1]) in self.stop_token_ids:
            tokens = tokens[:-1]
        raw = self._renderer.completion_text(tokens, skip_special_tokens=False)
        if any(opener in raw for opener in ("</think>", *self.tool_format.openers)):
            return raw
        return self._renderer.completion_text(tokens)
