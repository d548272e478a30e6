"""A model folder's tokenizer without transformers, whose import takes seconds and loads torch.

`tokenizer.json` is enough for encoding and decoding; the chat template is rendered as in
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from relax_events.models.chat_template import (
    OWN_TEMPLATE,
    ConfinedTemplate,
    TemplateProgram,
    compile_template,
)
from relax_events.regular_files import read_regular_text

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
BYTE_LEVEL_SPACE, END_OF_BYTE_ALPHABET = "\u0120", "\u0144"


class FolderTokenizer:
    """The tokenizer methods that rendering needs, under transformers' names."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        *,
        name: str,
        chat_template: str | None,
    ) -> None:
        """Create the tokenizer from parsed files.

        Args:
            tokenizer: The content of `tokenizer.json`.
            settings: The content of `tokenizer_config.json`.
            name: Name of the folder, for errors.
            chat_template: Source of the chat template.
        """
        self._tokenizer = tokenizer
        self._specials = {
            key: _text(settings[key]) for key in SPECIAL_NAMES if settings.get(key) is not None
        }
        self.name_or_path = name
        self.chat_template = chat_template
        self._template = open_template(chat_template) if chat_template else None
        self.eos_token_id: int | None = tokenizer.token_to_id(self._specials.get("eos_token", ""))

    @classmethod
    def open(cls, folder: Path, *, chat_template: str | None = None) -> Self | None:
        """Load a folder's tokenizer; None if only transformers can read it.

        Args:
            folder: The model's folder.
            chat_template: Replaces the folder's chat template.
        Raises:
            ValueError: A file is not JSON.
            TemplateError: The chat template is invalid.
        """
        from tokenizers import Tokenizer

        try:
            settings = json.loads(read_regular_text(folder / "tokenizer_config.json"))
            text = read_regular_text(folder / "tokenizer.json")
        except OSError:
            return None
        json.loads(text)  # raises a ValueError; tokenizers would raise a bare Exception
        tokenizer = Tokenizer.from_str(text)
        from_folder = _find_template(folder, settings)
        template = from_folder if chat_template is None else chat_template
        is_supported = template is None or isinstance(template, str)
        if not is_supported or settings.get("clean_up_tokenization_spaces"):
            return None
        return cls(tokenizer, settings, name=str(folder), chat_template=template)

    def apply_chat_template(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Render a conversation; see transformers. `options` are variables of the template."""
        assert self._template is not None
        assert not tokenize
        variables: dict[str, Any] = {"documents": None, **self._specials, **options}
        variables |= {"messages": turns, "tools": tools}
        return self._template.render(variables | {"add_generation_prompt": add_generation_prompt})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids. Other threads run meanwhile, unlike with the library's method
        for a single text, and where each token begins is left out, which takes half of the time.
        """
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def encode_as_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Return texts' token ids by a tokenizer that knows no special tokens."""
        encodings = self._text_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @cached_property
    def _text_tokenizer(self) -> Tokenizer:
        """The tokenizer without special tokens: a copy, which other threads can't change."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Tokens outside of the vocabulary's model, by id; `special` says which are special."""
        tokens: Mapping[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return tokens

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens as the vocabulary spells them, with their ids."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def read_folder_template(folder: Path) -> str:
    """Return a folder's chat template, of several the default; empty if it has none, or there is no
    such folder.

    Raises:
        ValueError: `tokenizer_config.json` is not JSON.
    """
    path = folder / "tokenizer_config.json"
    settings = json.loads(read_regular_text(path)) if path.is_file() else {}
    template = _find_template(folder, settings)
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}.get("default")
    return str(template or "")


def _find_template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the template as transformers chooses it."""
    file = folder / "chat_template.jinja"
    return read_regular_text(file) if file.is_file() else settings.get("chat_template")


def open_template(source: str) -> TemplateProgram:
    """Return a folder's chat template, which is rendered in a confined process unless this package
    wrote it.

    Raises:
        TemplateError: It is not a Jinja template.
    """
    return compile_template(source) if source == OWN_TEMPLATE else ConfinedTemplate(source)


def find_longest_token(vocabulary: Iterable[str]) -> int:
    """Return at most how many bytes of text one token of a vocabulary stands for."""
    tokens = frozenset(vocabulary)
    is_byte_level = BYTE_LEVEL_SPACE in tokens
    return max((_count_token_bytes(one, is_byte_level) for one in tokens), default=0)


def _count_token_bytes(token: str, is_byte_level: bool) -> int:
    """Byte-level vocabularies spell each byte as one character."""
    if is_byte_level and all(character < END_OF_BYTE_ALPHABET for character in token):
        return len(token)
    return len(token.encode("utf-8", "replace"))


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
