"""Reads secrets from files, writes files for their owner alone, and hides secrets in texts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from relax_events.errors import ConfigError

OWNER_ONLY = 0o600
MAX_SECRET_BYTES = 65_536
HIDDEN = "(hidden)"
MIN_LENGTH = 6
"""Hiding shorter ones would damage ordinary text and protect nothing."""
_lock = threading.Lock()
_secrets: set[str] = set()


def write_private(file: Path, content: bytes, *, mode: int = OWNER_ONLY) -> None:
    """Write a file atomically, readable by its owner only."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)
    draft.replace(file)


def read_configured_file(file: Path, *, key: str) -> bytes:
    """Return the content of a file that a configuration key names.

    Raises:
        ConfigError: The file is missing or unreadable.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{key}: {file} can't be read: {error.strerror}; give a file that this user may read"
        ) from None


def read_secret(file: Path, *, key: str) -> str:
    """Return the secret in a file, without a trailing line end.

    Args:
        file: The file, which holds one secret.
        key: The configuration key that names the file, for errors.
    Raises:
        ConfigError: The file is missing, unreadable or empty; the text never shows its content.
    """
    try:
        text = read_configured_file(file, key=key)[:MAX_SECRET_BYTES].decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{key}: {file} is not UTF-8 text; write only the secret into it"
        ) from None
    if not text:
        raise ConfigError(f"{key}: {file} is empty; write the secret into it")
    return text


def hide(secret: str) -> None:
    """Register a secret to be hidden in all log events and final errors of this process."""
    if len(secret) >= MIN_LENGTH:
        with _lock:
            _secrets.add(secret)


def redact(text: str) -> str:
    """Return a text without registered secrets."""
    with _lock:
        secrets = [secret for secret in _secrets if secret in text]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
