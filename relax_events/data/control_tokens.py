"""Keeps control tokens to the chat template and the policy: a content that spells one, such as a
web page with `<|im_end|>`, has it as text.

    protect     before rendering: each control token's text in a content becomes a mark, one
                private character
    split       after rendering: the text, and apart from it what the marks stand for
    as_text     the tokens of a control token's text, none of which is a control token

A content without such a text is not changed, and neither are its tokens.
"""
# ruff: noqa: RUF001 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import structlog

from relax_events.data.conversations import ASSISTANT
from relax_events.models.tokenizer_folder import FolderTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEVER = "(?!)"
FIRST_MARK = 0xF0000
"""The first character of Unicode's private plane 15."""
TURN_TAGS = frozenset(
    {
        *("<think>", "</think>", "[THINK]", "[/THINK]"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    }
)
"""Tags of reasoning and tool calls: tokens also in an assistant's message, which has them as
text."""


class ControlTokens:
    """The control tokens of a tokenizer: tokens that it calls special, and tokens that the caller
    names.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer | PreTrainedTokenizerBase,
        *,
        also: Collection[int] = (),
    ) -> None:
        """Read the tokenizer's control tokens.

        Args:
            tokenizer: The policy's tokenizer.
            also: Further token ids, such as stop tokens and media placeholders.
        """
        self._tokenizer = tokenizer
        self._ids = {
            str(token.content): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if (token.special or token_id in also) and token.content
        }
        texts = sorted(self._ids, key=len, reverse=True)
        self._escape = chr(FIRST_MARK + len(texts))
        self._texts = {chr(FIRST_MARK + index): text for index, text in enumerate(texts)}
        self._marks = {text: mark for mark, text in self._texts.items()}
        used = f"[{chr(FIRST_MARK)}-{self._escape}]"
        self._spelled = re.compile("|".join(map(re.escape, texts)) or NEVER)
        self._used = re.compile(used)
        self._in_contents = re.compile(f"{self._spelled.pattern}|{used}")
        self._in_rendered = re.compile(f"{self._escape}?{used}")
        self._as_text: dict[str, list[int]] = {}

    def protect(self, turns: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return a conversation, or tools, with marks for the control tokens that its texts spell.

        An assistant's message keeps its tags of reasoning and tool calls.
        """
        return [self._protected(turn, turn.get("role") == ASSISTANT) for turn in turns]

    def protect_text(self, text: str, *, is_turn: bool) -> str:
        """Return a text with marks.

        Args:
            text: Any content.
            is_turn: Whether it is an assistant's message.
        """
        is_free = text.isascii() or not self._used.search(text)
        if is_free and not self._spelled.search(text):
            return text

        def mark(match: re.Match[str]) -> str:
            text = match[0]
            if is_turn and text in TURN_TAGS:
                return text
            self._report(text)
            return self._marks.get(text) or self._escape + text

        return self._in_contents.sub(mark, text)

    def split(self, rendered: str) -> Iterator[tuple[str, str]]:
        """Give pieces of a rendered text, each with the control token's text that follows it as
        text; after the last piece there is none.
        """
        piece, end = "", 0
        for match in () if rendered.isascii() else self._in_rendered.finditer(rendered):
            piece += rendered[end : match.start()]
            end = match.end()
            if (text := self._texts.get(match[0])) is None:
                piece += match[0][-1]  # the content has this character
            else:
                yield piece, text
                piece = ""
        yield piece + rendered[end:], ""

    def as_text(self, text: str) -> list[int]:
        """Return the tokens of a control token's text as of any other text."""
        if not self._as_text:
            texts = list(self._ids)
            tokens = map(self._without_control, texts, self._encode_as_text(texts))
            self._as_text = dict(zip(texts, tokens, strict=True))
        return self._as_text[text]

    def _protected(self, value: Any, is_turn: bool) -> Any:
        if isinstance(value, str):
            return self.protect_text(value, is_turn=is_turn)
        if isinstance(value, Mapping):
            return {
                self._protected(key, is_turn): self._protected(inner, is_turn)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._protected(inner, is_turn) for inner in self._joined(value)]
        return value

    def _joined(self, parts: Sequence[Any]) -> list[Any]:
        """Return parts of a content; neighbouring texts that together spell a control token are
        one.
        """
        joined: list[Any] = []
        for is_text, run in groupby(parts, _is_text):
            texts = list(run)
            if is_text and len(texts) > 1 and self._spells_across([one["text"] for one in texts]):
                texts = [{**texts[0], "text": "".join(one["text"] for one in texts)}]
            joined += texts
        return joined

    def _spells_across(self, texts: Sequence[str]) -> bool:
        ends = list(accumulate(map(len, texts)))
        return any(
            ends[bisect_right(ends, match.start())] < match.end()
            for match in self._spelled.finditer("".join(texts))
        )

    def _without_control(self, text: str, tokens: list[int]) -> list[int]:
        """Return the tokens if none is a control token, else the tokens of each character: a model
        of pieces may have the text as one.
        """
        if not set(self._ids.values()).intersection(tokens):
            return tokens
        pieces = (self._tokenizer.encode(char, add_special_tokens=False) for char in text)
        return [token for piece in pieces for token in piece]

    def _encode_as_text(self, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(self._tokenizer, FolderTokenizer):
            return self._tokenizer.encode_as_text(texts)
        tokenizer = copy.deepcopy(self._tokenizer)  # the option changes it for other threads too
        return [
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            for text in texts
        ]

    def _report(self, text: str) -> None:
        if text in self._marks and not self._as_text:
            log.warning("control_token.encoded_as_text", token=text)
            self.as_text(text)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


log = structlog.get_logger()
