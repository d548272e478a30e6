"""Token ids as text, without loading a model library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from relax_events.errors import ConfigError


def token_texts(folder: Path, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token for itself; bytes that are no UTF-8 alone become replacement characters.

    Args:
        folder: Of the model; its `tokenizer.json` is read.
        tokens: Token ids.
    Raises:
        ConfigError: The folder has no such file, or it can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, so tokens have no text; set model.path")
    tokenizer = Tokenizer.from_file(str(path))
    return tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
