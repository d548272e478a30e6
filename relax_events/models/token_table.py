"""Reads token ids and texts from a tokenizer's file, without loading a model library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from relax_events.errors import ConfigError
from relax_events.regular_files import read_regular_text


def require_same_vocabulary(policy: Path, teacher: Path, *, section: str = "teacher") -> None:
    """Reject a teacher whose token ids have other tokens than the policy's: its log-probabilities
    would be of other texts.

    Only ids and tokens are compared. How text is tokenized does not matter, since the teacher reads
    the policy's ids.

    Args:
        policy: Folder of the policy's model.
        teacher: Folder of the teacher's model.
        section: The teacher's section, for errors.
    Raises:
        ConfigError: A folder has no readable tokenizer.json, or the vocabularies differ; the text
            names the first id that differs.
    """
    policy_tokens, teacher_tokens = read_vocabulary(policy), read_vocabulary(teacher)
    if policy_tokens == teacher_tokens:
        return
    at = min(
        number
        for number in policy_tokens.keys() | teacher_tokens.keys()
        if policy_tokens.get(number) != teacher_tokens.get(number)
    )
    raise ConfigError(
        f"teacher and policy must have the same vocabulary: token id {at} is "
        f"{teacher_tokens.get(at)!r} in {section}.model_path = {teacher} and "
        f"{policy_tokens.get(at)!r} in model.path = {policy}; use a teacher of the policy's "
        "family, with the same tokenizer"
    )


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Return the tokens of a model's tokenizer by their ids, including added tokens.

    Raises:
        ConfigError: The folder has no valid tokenizer.json.
    """
    path = folder / "tokenizer.json"
    try:
        tree = orjson.loads(read_regular_text(path))
        vocabulary, added = tree["model"]["vocab"], tree.get("added_tokens") or []
        pairs = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((token, number) for number, (token, _) in enumerate(vocabulary))
        )
        return {number: token for token, number in pairs} | {
            token["id"]: token["content"] for token in added
        }
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no tokenizer.json, which is needed to compare vocabularies; save its "
            "tokenizer as a fast one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a file of the tokenizers library ({error!r}); save the tokenizer again"
        ) from error


def token_texts(folder: Path, tokens: Sequence[int]) -> list[str]:
    """Return the text of each single token; incomplete UTF-8 becomes replacement characters.

    Args:
        folder: The model's folder, which has a `tokenizer.json`.
        tokens: Token ids.
    Raises:
        ConfigError: The folder has no such file, or it can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, so tokens can't be decoded; set model.path")
    tokenizer = Tokenizer.from_file(str(path))
    return tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)
