"""Messages to prompt tokens, and completion tokens to text, by the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from relax_events.config import DataConfig, JudgeConfig, MediaConfig
from relax_events.data.completions import ASSISTANT
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.media.token_layout import MediaLayout
from relax_events.models.tokenizer_folder import FolderTokenizer
from relax_events.objects.roots import media_in
from relax_events.regular_files import read_regular_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ue000"
"""Stands for an answer whose text does not matter: a sign that no prompt holds by chance."""


class PromptRenderer:
    """Turns conversations into what the model reads, and what it wrote into text.

    `stop_token_ids` are the tokens that end a completion: the tokenizer's and those of the model's
    generation settings.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer | PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        stop_token_ids: Sequence[int] = (),
        layout: MediaLayout | None = None,
    ) -> None:
        """Render with a tokenizer at hand.

        Args:
            tokenizer: Of the policy.
            config: Says whether the chat template is used, and with which options.
            stop_token_ids: End a completion besides the tokenizer's own end token.
            layout: How media stand in a prompt; None where the model reads text alone.
        Raises:
            ConfigError: The chat template is wanted and the tokenizer has none, or nothing ends a
                completion.
        """
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; take one "
                "that has, or set data.chat_template = false"
            )
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *stop_token_ids]))
        if not self.stop_token_ids:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} names no end token; set "
                "eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._config, self._layout = config, layout

    @classmethod
    def from_folder(
        cls, path: Path, config: DataConfig, *, media: MediaConfig | None = None
    ) -> Self:
        """Load the tokenizer of a model folder; nothing is ever downloaded.

        Args:
            path: The folder.
            config: Of the prompts.
            media: How the model is shown media; None where prompts are of text alone.
        Raises:
            ConfigError: There is no such folder, it holds no tokenizer, or its settings for media
                can't be used.
        """
        if not path.is_dir():
            raise ConfigError(
                f"model folder {path} does not exist; set model.path, or make the folder "
                "with: relax models prepare CONFIG"
            )
        layout = None if media is None else MediaLayout.from_folder(path, media)
        stops = _generation_stops(path / "generation_config.json")
        return cls(
            _tokenizer(path, own_template(config)), config, stop_token_ids=stops, layout=layout
        )

    def prompt_tokens(
        self, messages: Sequence[ChatMessage], *, tools: str = ""
    ) -> NDArray[np.int32]:
        """Render a conversation up to where the model goes on.

        Without chat template the messages' texts stand one below the other, as they are.

        Args:
            messages: The conversation.
            tools: JSON list of the tools that the template shows; an empty text where there are
                none.
        Raises:
            PoisonSample: The template refuses the conversation, or its media and their places don't
                fit; the text says why.
        """
        if not self._config.chat_template:
            return self.encode("\n".join(message.text for message in messages))
        return self._with_media(self.templated(messages, tools=tools), media_in(messages))

    def reply_tokens(
        self, before: Sequence[ChatMessage], reply: ChatMessage, *, tools: str = ""
    ) -> NDArray[np.int32]:
        """Render what stands between an answer's stop token and the next answer: the end of its
        message, the reply, the head of the next.

        The template is given a mark in the answer's place, and what it makes of all before is let
        go: tokens that were drawn stay as they are.

        Args:
            before: The conversation up to the answer.
            reply: What follows the answer.
            tools: As for `prompt_tokens`.
        Raises:
            PoisonSample: The template refuses the conversation or does not show the answer, or the
                reply's media and their places don't fit.
        """
        text = self.templated([*before, ChatMessage.of_text(ASSISTANT, MARK), reply], tools=tools)
        _, *pieces = text.rsplit(MARK, reply.text.count(MARK) + 1)
        if len(pieces) <= reply.text.count(MARK):
            raise PoisonSample(
                "the chat template leaves out an answer that a reply follows; take one that "
                "shows it, by data.chat_template_file"
            )
        tokens = self._with_media(MARK.join(pieces), media_in([reply]))
        stops = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return tokens[int(stops[0]) + 1 :] if len(stops) else tokens

    def _with_media(self, text: str, media: Sequence[MediaRef]) -> NDArray[np.int32]:
        if not media:
            return self.encode(text)
        if self._layout is None:
            raise PoisonSample(
                f"the prompt brings {len(media)} pieces of media, and the model reads text "
                "alone; take one that reads media"
            )
        return self._layout.expanded(self.encode(self._layout.spelt(text, media)), media)

    @property
    def has_template(self) -> bool:
        """Whether conversations are rendered by a chat template."""
        return self._config.chat_template

    def templated(
        self, messages: Sequence[ChatMessage], *, tools: str = "", is_whole: bool = False
    ) -> str:
        """Render a conversation by the chat template: up to where the model goes on, or `is_whole`,
        as it ends with its last message.

        Raises:
            PoisonSample: The template refuses the conversation; the text says why.
        """
        turns: list[Any] = [
            {"role": message.role, "content": _content(message)} for message in messages
        ]
        options = self._config.chat_template_options
        shown = json.loads(tools) if tools else None
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns,
                    tools=shown,
                    add_generation_prompt=not is_whole,
                    tokenize=False,
                    **options,
                )
            )
        except (TemplateError, TypeError) as error:
            raise PoisonSample(f"the chat template refuses the conversation: {error}") from None

    def answer_tokens(self, answer: str) -> NDArray[np.int32]:
        """Render a reference answer as the completion that the model should write, with the token
        that ends it.
        """
        return np.append(self.encode(answer), np.int32(self.stop_token_ids[0]))

    def completion_text(
        self, tokens: NDArray[np.int32], *, skip_special_tokens: bool = True
    ) -> str:
        """Decode a completion, without its special tokens unless they are wanted; bytes that are no
        UTF-8 become replacement characters.
        """
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=skip_special_tokens))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Give the tokens of a text as it stands."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def judge_renderer(judge: JudgeConfig, data: DataConfig) -> PromptRenderer:
    """Load what shows the judging model a question: its own tokenizer, with its own chat template.

    Raises:
        ConfigError: There is none, or it can't be used.
    """
    if judge.model_path is None:
        raise ConfigError(
            "the judge role has no model; set judge.model_path to the folder of its checkpoint"
        )
    own = {
        "chat_template": True,
        "chat_template_file": None,
        "chat_template_options": judge.chat_template_options,
    }
    return PromptRenderer.from_folder(judge.model_path, data.model_copy(update=own))


def _content(message: ChatMessage) -> str | list[dict[str, str]]:
    """Return a message as chat templates take it: a text, or a list of parts where it has media."""
    if all(part.kind is Modality.TEXT for part in message.parts):
        return message.text
    return [_part(part) for part in message.parts]


def _part(part: ContentPart) -> dict[str, str]:
    return (
        {"type": "text", "text": part.text or ""}
        if part.kind is Modality.TEXT
        else {"type": part.kind.value}
    )


def own_template(config: DataConfig) -> str | None:
    """Return the text of `data.chat_template_file`, None where the tokenizer's own template is
    used.

    Raises:
        ConfigError: The file can't be read.
    """
    if config.chat_template_file is None:
        return None
    try:
        return read_regular_text(config.chat_template_file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {config.chat_template_file} can't be read: {error}; set "
            "data.chat_template_file"
        ) from None


def _tokenizer(path: Path, template: str | None) -> FolderTokenizer | PreTrainedTokenizerBase:
    """Load the tokenizer by itself, or by transformers where the folder is of an older or richer
    kind.
    """
    try:
        if (tokenizer := FolderTokenizer.open(path, chat_template=template)) is not None:
            return tokenizer
        from transformers import AutoTokenizer

        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except TemplateError as error:
        raise ConfigError(
            f"chat template of {path} is no Jinja template: {error}; set data.chat_template_file"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {path} holds no usable tokenizer: {error}") from None
    if template is not None:
        loaded.chat_template = template
    return loaded


def _generation_stops(path: Path) -> list[int]:
    if not path.is_file():
        return []
    stops = json.loads(path.read_text()).get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
