"""Turn messages into prompt tokens without tokenizing again what the policy said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.data.rendering import ANSWER_MARK, PromptRenderer
from relax_events.errors import PoisonSample
from relax_events.gateway.messages import Message, for_template


class ChatRenderer:
    """Renders a session's messages with the policy's chat template."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self.stop_token_ids = renderer.stop_token_ids

    def prompt_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[Message]
    ) -> NDArray[np.int32]:
        """Render a whole conversation up to the start of the next turn.

        Raises:
            PoisonSample: The template rejects it; the text says why.
        """
        turns = [for_template(message) for message in messages]
        return self._renderer.encode(self._renderer.render_turns(turns, tools=list(tools) or None))

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

        The template sees a mark instead of the sampled turn, and what it writes up to the mark is
        dropped: that part is on the path already, as it was read and sampled.

        Args:
            before: The conversation up to the sampled turn.
            rest: The messages after it.
            tools: Of the session.
            has_stop: Whether the sampled turn ends with a stop token, which is then not repeated.
        Raises:
            PoisonSample: The template rejects the conversation or leaves the sampled turn out.
        """
        turns = [for_template(message) for message in (*before, *rest)]
        turns.insert(len(before), {"role": ASSISTANT, "content": ANSWER_MARK})
        text = self._renderer.render_turns(turns, tools=list(tools) or None)
        num_marks = sum(str(turn.get("content", "")).count(ANSWER_MARK) for turn in turns)
        if num_marks != 1 or text.count(ANSWER_MARK) != 1:
            raise PoisonSample(
                "the chat template leaves out, or repeats, an earlier turn of the policy; set "
                "data.chat_template_file to a template that keeps it"
            )
        tokens = self._renderer.encode(text.partition(ANSWER_MARK)[2])
        stops = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return tokens[int(stops[0]) + 1 :] if has_stop and len(stops) else tokens

    def reply_text(self, tokens: NDArray[np.int32]) -> str:
        """Decode a sampled turn without its stop token; with special tokens where it has a tool
        call or reasoning, whose tags are special in some tokenizers.
        """
        if len(tokens) and int(tokens[-1]) in self.stop_token_ids:
            tokens = tokens[:-1]
        raw = self._renderer.completion_text(tokens, skip_special_tokens=False)
        if "<tool_call>" in raw or "</think>" in raw:
            return raw
        return self._renderer.completion_text(tokens)
