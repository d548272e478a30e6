"""Messages to prompt tokens, and completion tokens to text, by the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from relax_events.config import DataConfig
from relax_events.data.tokenizer_folder import FolderTokenizer
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptRenderer:
    """Turns conversations into what the model reads, and what it wrote into text.

    `stop_token_ids` are the tokens that end a completion: the tokenizer's and those of the model's generation settings.
    """

    def __init__(self, tokenizer: FolderTokenizer | PreTrainedTokenizerBase, config: DataConfig, *, stop_token_ids: Sequence[int] = ()) -> None:
        """Render with a tokenizer at hand.

        Args:
            tokenizer: Of the policy.
            config: Says whether the chat template is used, and with which options.
            stop_token_ids: End a completion besides the tokenizer's own end token.
        Raises:
            ConfigError: The chat template is wanted and the tokenizer has none, or nothing ends a completion.
        """
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; set data.chat_template = false")
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *stop_token_ids]))
        if not self.stop_token_ids:
            raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} names no end token; set eos_token in its tokenizer_config.json")
        self._tokenizer = tokenizer
        self._config = config

    @classmethod
    def from_folder(cls, path: Path, config: DataConfig) -> Self:
        """Load the tokenizer of a model folder; nothing is ever downloaded.

        Raises:
            ConfigError: There is no such folder, or it holds no tokenizer.
        """
        if not path.is_dir():
            raise ConfigError(f"model folder {path} does not exist; set model.path, or make the folder with: relax models prepare CONFIG")
        return cls(_tokenizer(path, own_template(config)), config, stop_token_ids=_generation_stops(path / "generation_config.json"))

    def prompt_tokens(self, messages: Sequence[ChatMessage], *, tools: str = "") -> NDArray[np.int32]:
        """Render a conversation up to where the model goes on.

        Without chat template the messages' texts stand one below the other, as they are.

        Args:
            messages: The conversation.
            tools: JSON list of the tools that the template shows; an empty text where there are none.
        Raises:
            PoisonSample: The template refuses the conversation; the text says why.
        """
        if not self._config.chat_template:
            return self.encode("\n".join(message.text for message in messages))
        return self.encode(self.templated(messages, tools=tools))

    @property
    def has_template(self) -> bool:
        """Whether conversations are rendered by a chat template."""
        return self._config.chat_template

    def templated(self, messages: Sequence[ChatMessage], *, tools: str = "", is_whole: bool = False) -> str:
        """Render a conversation by the chat template: up to where the model goes on, or `is_whole`, as it ends with its last message.

        Raises:
            PoisonSample: The template refuses the conversation; the text says why.
        """
        turns = [{"role": message.role, "content": message.text} for message in messages]
        options = self._config.chat_template_options
        shown = json.loads(tools) if tools else None
        try:
            return str(self._tokenizer.apply_chat_template(turns, tools=shown, add_generation_prompt=not is_whole, tokenize=False, **options))
        except (TemplateError, TypeError) as error:
            raise PoisonSample(f"the chat template refuses the conversation: {error}") from None

    def answer_tokens(self, answer: str) -> NDArray[np.int32]:
        """Render a reference answer as the completion that the model should write, with the token that ends it."""
        return np.append(self.encode(answer), np.int32(self.stop_token_ids[0]))

    def completion_text(self, tokens: NDArray[np.int32]) -> str:
        """Decode a completion without its special tokens; bytes that are no UTF-8 become replacement characters."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Give the tokens of a text as it stands."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def own_template(config: DataConfig) -> str | None:
    """Return the text of `data.chat_template_file`, None where the tokenizer's own template is used.

    Raises:
        ConfigError: The file can't be read.
    """
    if config.chat_template_file is None:
        return None
    try:
        return config.chat_template_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {config.chat_template_file} can't be read: {error}; set data.chat_template_file") from None


def _tokenizer(path: Path, template: str | None) -> FolderTokenizer | PreTrainedTokenizerBase:
    """Load the tokenizer by itself, or by transformers where the folder is of an older or richer kind."""
    try:
        if (tokenizer := FolderTokenizer.open(path, chat_template=template)) is not None:
            return tokenizer
        from transformers import AutoTokenizer

        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except TemplateError as error:
        raise ConfigError(f"chat template of {path} is no Jinja template: {error}; set data.chat_template_file") from None
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
