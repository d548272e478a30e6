"""Opens the storage behind a URI, and turns its errors into ours."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, NotSupportedError
from obstore.store import LocalStore, MemoryStore, from_url

from relax_events.errors import ConfigError, ObjectError, StoreUnavailable

SCHEMES = "file:///directory, memory://, s3://bucket/prefix or gs://bucket/prefix"
errors: Counter[str] = Counter()
"""What went wrong with any store of this process, by what was tried."""
LOOK_UP = "look up"
NO_SPACE = ("No space left", "os error 28", "quota exceeded", "os error 122")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call to a remote store may take. A store on this machine answers or fails by
    itself.
    """

    connect_seconds: float = 5.0
    """To open a connection."""
    request_seconds: float = 30.0
    """For one request, its body included; large objects go in parts, so that this bounds a part."""
    retry_seconds: float = 20.0
    """After which a failed request is not tried again within the call: a worker sends no heartbeat
    during one. See `outages` for what follows."""
    max_retries: int = 8
    """Tries after the first, with a growing, jittered pause of at most 5 s."""

    def options(self) -> dict[str, Any]:
        """Give the same as obstore's options."""
        return {
            "client_options": {
                "connect_timeout": timedelta(seconds=self.connect_seconds),
                "timeout": timedelta(seconds=self.request_seconds),
                # Read here, since options of ours take the place of all those that obstore would
                # read from the environment.
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"},
            },
            "retry_config": {
                "max_retries": self.max_retries,
                "retry_timeout": timedelta(seconds=self.retry_seconds),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        }


@dataclass(frozen=True, slots=True)
class Backend:
    """An opened storage; `root` is the URI of its top, with a slash at the end."""

    root: str
    storage: Any
    is_remote: bool
    directory: Path | None = None
    """Of a store on this machine."""

    def exists(self) -> bool:
        """Tell whether a store on this machine has its directory; of a remote one only its answers
        tell.
        """
        try:
            return self.directory is None or self.directory.is_dir()
        except OSError:  # such as the stale handle of a network file system
            return False


def open_backend(uri: str, *, deadlines: Deadlines) -> Backend:
    """Open the storage that a URI names; a local directory is made if missing, a bucket is not.

    Credentials, region and endpoint come from the environment, as the cloud's own tools take them;
    an endpoint without TLS needs `AWS_ALLOW_HTTP=true`.

    Raises:
        ConfigError: The URI is of no known scheme, lacks a part, or can't be opened; the text names
            it.
    """
    parts = urlsplit(uri)
    try:
        match parts.scheme:
            case "file":
                return _open_directory(uri, parts)
            case "memory":
                return Backend("memory:///", MemoryStore(), is_remote=False)
            case "s3" | "gs" if parts.netloc:
                root = uri.rstrip("/")
                return Backend(f"{root}/", from_url(root, **deadlines.options()), is_remote=True)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            f"objects.uri = {uri!r} can't be opened: {first_line(error)}; set objects.uri to "
            f"{SCHEMES}"
        ) from error
    raise ConfigError(f"objects.uri = {uri!r} is no object store; set objects.uri to {SCHEMES}")


def _open_directory(uri: str, parts: SplitResult) -> Backend:
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise ConfigError(
            f"objects.uri = {uri!r} must name an absolute directory, with three slashes: "
            "file:///directory"
        )
    path.mkdir(parents=True, exist_ok=True)
    directory = path.resolve()
    return Backend(
        f"{directory.as_uri()}/",
        LocalStore(directory, automatic_cleanup=True),
        is_remote=False,
        directory=directory,
    )


@contextmanager
def translate_errors(backend: Backend, action: str, key: str) -> Iterator[None]:
    """Raise storage errors as ours, naming the action, the object and the remedy.

    Args:
        backend: Which storage is asked.
        action: What is tried, such as `read`.
        key: Of the object.
    Raises:
        ObjectError: The storage answered, and there is something wrong with the object.
        StoreUnavailable: The storage did not answer, refused to let us in, or is full.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not backend.exists():
            errors[action] += 1
            raise StoreUnavailable(
                f"can't {action} {backend.root}{key}: the store's directory is gone; mount "
                f"or restore {backend.root}"
            ) from error
        errors[action] += action != LOOK_UP  # where it is an answer
        raise ObjectError(
            f"can't {action} {backend.root}{key}: there is no such object; was it deleted by "
            "retention, or does objects.uri name another store?"
        ) from error
    except (BaseError, OSError, ValueError) as error:
        errors[action] += 1
        text = first_line(error)
        if any(sign in text for sign in NO_SPACE):
            remedy = (
                "the object store is full; free space there or set objects.uri to a larger one "
                f"({text})"
            )
            raise StoreUnavailable(f"can't {action} {backend.root}{key}: {remedy}") from error
        is_ours = isinstance(
            error, (AlreadyExistsError, InvalidPathError, NotSupportedError, ValueError)
        )
        if is_ours or (not backend.is_remote and backend.exists()):
            raise ObjectError(f"can't {action} {backend.root}{key}: {text}") from error
        raise StoreUnavailable(
            f"can't {action} {backend.root}{key}: {text}; is the store up, and may this "
            "process use it?"
        ) from error


def first_line(error: Exception) -> str:
    """Give an error's text without the storage's debug output."""
    return str(error).partition("\n")[0] or type(error).__name__
