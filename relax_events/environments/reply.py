"""What an environment is, and what it says. Imports nothing heavy: environments are written against
this alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to an answer.

    Attributes:
        text: Each `<image>`, `<audio>` or `<video>` in it stands for one piece of `media`, in
            order, as in a prompt.
        media: Files as bytes or data URIs, by modality. Of a modality that is not named here, the
            text has no placeholders.
        role: Of the message, as the chat template knows it.
    """

    text: str
    media: Mapping[Literal["image", "audio", "video"], Sequence[bytes | str]] = field(
        default_factory=dict
    )
    role: str = "user"


class Environment(Protocol):
    """Answers the policy: a text, a `Reply`, or None when the sample is over.

    A function of what was said, and of nothing else: it runs in several processes, and a sample may
    be generated again. A function without the parameter `files` is not given them, which saves
    their way. Further keyword arguments are its options.
    """

    def __call__(
        self,
        completion: str,
        *,
        messages: list[dict[str, str]],
        answer: str,
        metadata: dict[str, Any],
        files: list[bytes],
    ) -> Reply | str | None:
        """Answer.

        Args:
            completion: What the policy wrote last, without special tokens.
            messages: What was said before, as `role` and `content`; media are `<image>`, `<audio>`
                or `<video>` in the content.
            answer: The reference answer of the prompt.
            metadata: What the prompt's source gave with it.
            files: The media of `messages`, in order, as they came.
        """
