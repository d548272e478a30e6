"""Render messages to prompt tokens, and completion tokens to text, with the model's tokenizer.

    rows, programs, environments --> prompt_tokens --> engine --> a turn --> turn_text
                                                         ^          |
                                                         +----------+
                                                        bridge_tokens

Tokens are only appended: a sampled turn is never rendered or tokenized again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from relax_events.config import DataConfig, JudgeConfig, MediaConfig
from relax_events.data.control_tokens import ControlTokens
from relax_events.data.conversations import ASSISTANT, begins_turn
from relax_events.data.messages import (
    REASONING_FIELDS,
    continue_turn,
    list_texts,
    print_message,
)
from relax_events.data.shown_fields import ShownFields
from relax_events.data.tool_formats import choose_format
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, MediaRef
from relax_events.media.token_layout import MediaLayout
from relax_events.models.tokenizer_folder import (
    FolderTokenizer,
    find_longest_token,
    read_folder_template,
)
from relax_events.objects.store import list_message_media
from relax_events.regular_files import read_regular_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_REASONING = "</think>"
MIN_TOKEN_BYTES = 16
TURN_MARKS = tuple(map(chr, range(0xE000, 0xF900)))
"""Private characters, one of which stands for the text of a turn that is not rendered."""


class PromptRenderer:
    """Renders conversations to tokens, and decodes completions to text.

    `stop_token_ids` are the tokens that end a completion, by the tokenizer and the model's
    generation settings.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer | PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        stop_token_ids: Sequence[int] = (),
        layout: MediaLayout | None = None,
        tool_format: str = "auto",
    ) -> None:
        """Use a loaded tokenizer.

        Args:
            tokenizer: The policy's tokenizer.
            config: Whether the chat template is used, and its options.
            stop_token_ids: Tokens that end a completion in addition to the tokenizer's end token.
            layout: Token layout of media in a prompt; None for a model that reads text only.
            tool_format: The format of tool calls; see `choose_format`.
        Raises:
            ConfigError: The tokenizer lacks the chat template that the config requires, or no token
                ends a completion.
        """
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; use one "
                "with a template, or set data.chat_template = false"
            )
        tokenizer_stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*tokenizer_stops, *stop_token_ids])
        )
        if not self.stop_token_ids:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} names no end token; set "
                "eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._config, self._layout = config, layout
        placeholders = () if layout is None else layout.placeholders.values()
        self._control = ControlTokens(tokenizer, also=(*self.stop_token_ids, *placeholders))
        self.tool_format = choose_format(tool_format, template=self.chat_template)
        self._reasoning_field = find_reasoning_field(self.chat_template)
        self._shown_fields = ShownFields(self._render_probe)

    @classmethod
    def from_folder(
        cls,
        path: Path,
        config: DataConfig,
        *,
        media: MediaConfig | None = None,
        tool_format: str = "auto",
    ) -> Self:
        """Load the tokenizer of a model folder; nothing is ever downloaded.

        Args:
            path: The folder.
            config: The data section.
            media: Preprocessing of media; None if prompts are text only.
            tool_format: The format of tool calls; see `choose_format`.
        Raises:
            ConfigError: There is no such folder, it holds no tokenizer, or its settings for media
                can't be used.
        """
        if not path.is_dir():
            raise ConfigError(
                f"model folder {path} does not exist; set model.path, or create the folder "
                "with: relax models prepare CONFIG"
            )
        layout = None if media is None else MediaLayout.from_folder(path, media)
        stops = _read_generation_stops(path / "generation_config.json")
        return cls(
            _load_tokenizer(path, read_chat_template(config)),
            config,
            stop_token_ids=stops,
            layout=layout,
            tool_format=tool_format,
        )

    def row_tokens(self, messages: Sequence[ChatMessage], *, tools: str = "") -> NDArray[np.int32]:
        """Render the prompt of a row as `prompt_tokens`.

        Raises:
            PoisonSample: Also if the template leaves out a field of its messages, or its tools.
        """
        self.require_shown(messages, tools=tools)
        return self.prompt_tokens(messages, tools=tools)

    def require_shown(self, messages: Sequence[ChatMessage], *, tools: str = "") -> None:
        """Refuse messages or tools of a row that the prompt would not show.

        Raises:
            PoisonSample: The text names the field.
        """
        if not self.has_template and list_message_media(messages):
            raise PoisonSample("media need a chat template; leave data.chat_template out")
        self._shown_fields.require(messages, tools=tools)

    def _render_probe(self, messages: Sequence[ChatMessage], tools: str) -> str:
        if not self.has_template:
            return ""
        return self.apply_template(messages, tools=tools, is_complete=True)

    def prompt_tokens(
        self, messages: Sequence[ChatMessage], *, tools: str = ""
    ) -> NDArray[np.int32]:
        """Render a conversation up to the start of the completion. A conversation that ends with an
        assistant's message begins a turn, and the completion continues its text.

        Without a chat template the messages' texts are joined by newlines.

        Args:
            messages: The conversation.
            tools: JSON list of the tools that the template shows; empty if there are none.
        Raises:
            PoisonSample: The template rejects the conversation, or media and placeholders don't
                match; the text says why.
        """
        if not self._config.chat_template:
            return self.encode("\n".join(message.text for message in messages))
        return self.encode_with_media(
            self.render_prompt(messages, tools=tools), list_message_media(messages)
        )

    def bridge_tokens(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        *,
        tools: str = "",
        has_stop: bool = True,
    ) -> NDArray[np.int32]:
        """Render the tokens between a sampled turn and the next one: the end of its message, the
        messages after it, and the head of the next turn.

        The template gets a mark instead of the sampled turn, and its text up to the mark is
        dropped: that part has its tokens already, as they were read and sampled.

        Args:
            before: The conversation up to the sampled turn.
            replies: The messages after it; the last may begin the next turn.
            tools: As for `prompt_tokens`.
            has_stop: Whether the sampled turn ends with a stop token, which is then not repeated.
        Raises:
            PoisonSample: The template rejects the conversation, or leaves out or repeats the
                sampled turn, or media and placeholders of the replies don't match.
        """
        turn = make_mark((*before, *replies))
        render = self.render_prompt if replies else self.apply_template
        rendered = render([*join_turns(before), turn, *replies], tools=tools)
        _, text = _split_at_mark(rendered, turn.text)
        tokens = self.encode_with_media(text, list_message_media(replies))
        stops = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return tokens[int(stops[0]) + 1 :] if has_stop and len(stops) else tokens

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return str(self._tokenizer.chat_template or "")

    @property
    def may_share_threads(self) -> bool:
        """Whether several threads may encode at once: transformers' tokenizers change their own
        settings during a call.
        """
        return isinstance(self._tokenizer, FolderTokenizer)

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest text that one token stands for, at least 16: an unknown character
        is a token in some tokenizers.
        """
        return max(MIN_TOKEN_BYTES, find_longest_token(self._tokenizer.get_vocab()))

    @property
    def reads_media(self) -> bool:
        """Whether prompts may have media."""
        return self._layout is not None

    def encode_with_media(self, text: str, media: Sequence[MediaRef]) -> NDArray[np.int32]:
        """Tokenize a rendered text, each of whose media placeholders stands for a media file.

        Raises:
            PoisonSample: Media and placeholders don't match, or the model reads text only.
        """
        if not media:
            return self.encode_rendered(text)
        if self._layout is None:
            raise PoisonSample(
                f"the prompt has {len(media)} media items, and the model reads text only; "
                "use a model that reads media"
            )
        return self._layout.expand_placeholders(
            self.encode_rendered(self._layout.expand_videos(text, media)), media
        )

    @property
    def has_template(self) -> bool:
        """Whether a chat template renders conversations."""
        return self._config.chat_template

    def require_template(self) -> None:
        """Refuse a conversation of a program where no chat template renders it.

        Raises:
            PoisonSample: There is none.
        """
        if not self.has_template:
            raise PoisonSample(
                "the tokenizer of the model has no chat template; use one with a template, or send "
                "token ids"
            )

    def render_prompt(self, messages: Sequence[ChatMessage], *, tools: str = "") -> str:
        """Render a conversation up to the head of the next turn, or, where it begins that turn, up
        to the end of its text; see `apply_template`.

        Raises:
            PoisonSample: As of `apply_template`, or a begun turn has tool calls, or the template
                leaves it out or repeats it.
        """
        if not begins_turn(messages):
            return self.apply_template(messages, tools=tools)
        *before, begun = messages
        if begun.tool_calls:
            raise PoisonSample(
                "the prompt ends with an assistant's message that has tool calls, which no text "
                "continues; add their results, or leave the calls out"
            )
        mark = make_mark(messages)
        rendered = self.apply_template(
            [*before, continue_turn(begun, mark)], tools=tools, is_complete=True
        )
        return _split_at_mark(rendered, mark.text)[0]

    def apply_template(
        self, messages: Sequence[ChatMessage], *, tools: str = "", is_complete: bool = False
    ) -> str:
        """Render a conversation by the chat template.

        Args:
            messages: The conversation.
            tools: As for `prompt_tokens`.
            is_complete: Whether the text ends with the last message, not with the head of the next
                turn.
        Returns:
            The text for `encode_with_media`, in which marks stand for the control tokens that
            messages and tools spell.
        Raises:
            PoisonSample: There is no template, or it rejects the conversation; the text says why.
        """
        self.require_template()
        turns = [
            print_message(
                message,
                parses_arguments=not self.tool_format.takes_text,
                reasoning_field=self._reasoning_field,
            )
            for message in messages
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    self._control.protect(turns),
                    tools=self._control.protect(json.loads(tools)) if tools else None,
                    add_generation_prompt=not is_complete,
                    tokenize=False,
                    **self._config.chat_template_options,
                )
            )
        except (TemplateError, TypeError) as error:
            raise PoisonSample(f"the chat template rejects the conversation: {error}") from None

    def answer_tokens(self, answer: str) -> NDArray[np.int32]:
        """Render a reference answer as a completion, with the stop token."""
        text = self._control.protect_text(answer, is_turn=True)
        return np.append(self.encode_rendered(text), np.int32(self.stop_token_ids[0]))

    def reply_tokens(
        self, messages: Sequence[ChatMessage], reply: ChatMessage, *, tools: str = ""
    ) -> NDArray[np.int32]:
        """Render the reply of another model as the policy would have written it, with the stop
        token.

        Args:
            messages: The conversation before it.
            reply: The reply.
            tools: As for `prompt_tokens`.
        Raises:
            PoisonSample: It has tool calls, and the template does not show them, or not behind the
                prompt.
        """
        if not reply.tool_calls:
            return self.answer_tokens(reply.text)
        self.require_shown([reply])
        prompt = self.render_prompt(messages, tools=tools)
        whole = self.apply_template([*messages, reply], tools=tools, is_complete=True)
        if not whole.startswith(prompt):
            raise PoisonSample(
                "the chat template writes another prompt before a reply with tool calls; set "
                "data.chat_template_file to a template that does not"
            )
        tokens = self.encode_rendered(whole[len(prompt) :])
        stops = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return tokens[: int(stops[0]) + 1] if len(stops) else tokens

    def completion_text(
        self, tokens: NDArray[np.int32], *, skip_special_tokens: bool = True
    ) -> str:
        """Decode a completion, by default without special tokens; invalid UTF-8 becomes replacement
        characters.
        """
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=skip_special_tokens))

    def turn_text(self, tokens: NDArray[np.int32]) -> str:
        """Decode a turn of a conversation without its stop token; with special tokens where it has
        a tool call or reasoning, whose tags are special in some tokenizers.
        """
        if len(tokens) and int(tokens[-1]) in self.stop_token_ids:
            tokens = tokens[:-1]
        raw = self.completion_text(tokens, skip_special_tokens=False)
        if any(mark in raw for mark in (END_OF_REASONING, *self.tool_format.openers)):
            return raw
        return self.completion_text(tokens)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Tokenize a text without adding special tokens; special tokens in it are tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def encode_rendered(self, text: str) -> NDArray[np.int32]:
        """Tokenize a text of `apply_template`, or a part of it: a control token that a message
        spells becomes ordinary tokens.
        """
        tokens: list[int] = []
        for piece, spelled in self._control.split(text):
            tokens += self._tokenizer.encode(piece, add_special_tokens=False) if piece else ()
            tokens += self._control.as_text(spelled) if spelled else ()
        return np.array(tokens, dtype=np.int32)


def load_judge_renderer(judge: JudgeConfig, data: DataConfig) -> PromptRenderer:
    """Load the renderer of the judge model: its own tokenizer with its own chat template.

    Raises:
        ConfigError: The judge has no model, its tokenizer can't be used, or it reads no media and
            `judge.media` is set.
    """
    if judge.model_path is None:
        raise ConfigError(
            "the judge role has no model; set judge.model_path to the folder of its checkpoint"
        )
    overrides = {
        "chat_template": True,
        "chat_template_file": None,
        "chat_template_options": judge.chat_template_options,
    }
    if judge.media is not None and MediaLayout.from_folder(judge.model_path, judge.media) is None:
        raise ConfigError(
            f"[judge.media] is set, and the model in judge.model_path {judge.model_path} reads "
            "text only; leave the table out, or take a model that reads media"
        )
    return PromptRenderer.from_folder(
        judge.model_path, data.model_copy(update=overrides), media=judge.media
    )


def make_mark(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Make a turn of a character that no message has."""
    texts = list(list_texts(messages))
    mark = next(one for one in TURN_MARKS if not any(one in text for text in texts))
    return ChatMessage.of_text(ASSISTANT, mark)


def join_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation in which a turn that was begun and then sampled is one message."""
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and joined[-1].role == message.role == ASSISTANT:
            message = continue_turn(joined.pop(), message)
        joined.append(message)
    return joined


def _split_at_mark(rendered: str, mark: str) -> tuple[str, str]:
    if rendered.count(mark) != 1:
        raise PoisonSample(
            "the chat template leaves out, or repeats, a turn of the policy; set "
            "data.chat_template_file to a template that keeps it"
        )
    before, _, after = rendered.partition(mark)
    return before, after


def find_reasoning_field(chat_template: str) -> str:
    """Return the name that a chat template has for an assistant's thoughts."""
    names = set(re.findall(r"""[.'"](\w+)""", chat_template))
    return next((field for field in REASONING_FIELDS if field in names), REASONING_FIELDS[0])


def read_chat_template(config: DataConfig) -> str | None:
    """Return the text of `data.chat_template_file`, or None if the tokenizer's template is used.

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


def read_run_template(config: DataConfig, folder: Path) -> str:
    """Return the text of the template that a run's prompts are rendered by; empty without one.

    Args:
        config: Of the run's data.
        folder: Of its model; need not be there.
    Raises:
        ConfigError: A file can't be read.
    """
    if not config.chat_template:
        return ""
    if (template := read_chat_template(config)) is not None:
        return template
    try:
        return read_folder_template(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the chat template of {folder} can't be read: {error}; use the model folder as it was "
            "published"
        ) from None


def _load_tokenizer(path: Path, template: str | None) -> FolderTokenizer | PreTrainedTokenizerBase:
    """Load the tokenizer directly, or by transformers if the folder has an older or richer
    format.
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
            f"chat template of {path} is not a Jinja template: {error}; set data.chat_template_file"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {path} has no usable tokenizer: {error}") from None
    if template is not None:
        loaded.chat_template = template
    return loaded


def _read_generation_stops(path: Path) -> list[int]:
    if not path.is_file():
        return []
    stops = json.loads(path.read_text()).get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
