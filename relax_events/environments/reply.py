"""The protocol of an environment and its reply. An environment needs to import only this module,
which imports no large library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's reply to a turn of the policy.

    Attributes:
        text: The text. Each `<image>`, `<audio>` or `<video>` in it is the placeholder of one file
            of `media`, in order, as in a prompt.
        media: Files as bytes or data URIs, by modality. In a modality that is not a key,
            placeholders are ordinary text.
        role: The message's role in the chat template.
    """

    text: str
    media: Mapping[Literal["image", "audio", "video"], Sequence[bytes | str]] = field(
        default_factory=dict
    )
    role: str = "user"


class Environment(Protocol):
    """Replies to the policy: a text, a `Reply`, or None when the sample is over.

    It must depend only on its arguments: it runs in several processes, and a sample may be
    generated again. Files are sent only to a function with the parameter `files`. Further keyword
    arguments are its options.
    """

    def __call__(
        self,
        completion: str,
        *,
        messages: list[dict[str, Any]],
        answer: str,
        metadata: dict[str, Any],
        files: list[bytes],
    ) -> Reply | str | None:
        """Reply to the last turn.

        Args:
            completion: The policy's last turn, without special tokens.
            messages: The earlier conversation in OpenAI's form: `role` and `content`, and where a
                message has them `tool_calls`, `tool_call_id`, `name` and `reasoning_content`. Media
                are `<image>`, `<audio>` or `<video>` in the content, which is a text.
            answer: The reference answer of the prompt.
            metadata: The row's metadata.
            files: The media of `messages`, in order, unprocessed.
        """
