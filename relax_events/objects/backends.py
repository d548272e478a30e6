"""Opens the storage behind a URI, and translates its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, MemoryStore, from_url

from relax_events.errors import ConfigError, ObjectError, StoreUnavailable
from relax_events.objects.credentials import read_store_credential

SCHEMES = "file:///directory, memory://, s3://bucket/prefix or gs://bucket/prefix"
errors: Counter[str] = Counter()
"""The number of errors of all stores of this process, by attempted action."""
LOOK_UP = "look up"
NO_SPACE = ("No space left", "os error 28", "quota exceeded", "os error 122")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits of calls to a remote store. A local store needs none."""

    connect_seconds: float = 5.0
    """To open a connection."""
    request_seconds: float = 30.0
    """For one request, its body included; large objects go in parts, so that this bounds a part."""
    retry_seconds: float = 20.0
    """How long one call retries a failed request; a worker sends no heartbeat during a call. See
    `outages` for what follows."""
    max_retries: int = 8
    """The number of retries, with a growing, jittered pause of at most 5 s."""

    def options(self, *, allows_http: bool) -> dict[str, Any]:
        """Return the limits as obstore's options."""
        return {
            "client_options": {
                "connect_timeout": timedelta(seconds=self.connect_seconds),
                "timeout": timedelta(seconds=self.request_seconds),
                "allow_http": allows_http,
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
    """An opened storage; `root` is its URI, with a slash at the end."""

    root: str
    storage: Any
    is_remote: bool
    directory: Path | None = None
    """The directory of a local store."""

    def exists(self) -> bool:
        """Return whether a local store's directory exists; True for a remote store."""
        try:
            return self.directory is None or self.directory.is_dir()
        except OSError:  # for example the stale handle of a network file system
            return False


def open_backend(uri: str, *, deadlines: Deadlines) -> Backend:
    """Open the storage that a URI names; a missing local directory is created, a missing bucket is
    not.

    Credentials, region and endpoint come from the role's file (see `credentials`), or from the
    environment as in the cloud provider's tools; an endpoint without TLS needs
    `AWS_ALLOW_HTTP=true`.

    Raises:
        ConfigError: The URI has an unknown scheme, lacks a part, or can't be opened; the text names
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
                return Backend(f"{root}/", _open_bucket(root, deadlines), is_remote=True)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            f"objects.uri = {uri!r} can't be opened: {first_line(error)}; set objects.uri to "
            f"{SCHEMES}"
        ) from error
    raise ConfigError(f"objects.uri = {uri!r} is no object store; set objects.uri to {SCHEMES}")


def _open_bucket(root: str, deadlines: Deadlines) -> Any:
    credential = read_store_credential()
    options = deadlines.options(allows_http=credential.allows_http)
    config: Any = credential.options  # its keys are those of the bucket's maker
    # Our client options replace the options that obstore would read from the environment.
    return from_url(root, config=config, **options)


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
        LocalStore(directory),
        is_remote=False,
        directory=directory,
    )


@contextmanager
def translate_errors(backend: Backend, action: str, key: str) -> Iterator[None]:
    """Translate storage errors in the block; the text names the action, the object and the remedy.

    Args:
        backend: The storage.
        action: The attempted action, such as `read`.
        key: The object's key.
    Raises:
        ObjectError: The storage responded, and the object is missing or invalid.
        StoreUnavailable: The storage did not respond, denied access, or is full.
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
        errors[action] += action != LOOK_UP  # for a look-up this is a valid result
        raise ObjectError(
            f"can't {action} {backend.root}{key}: there is no such object; was it deleted by "
            "retention, or does objects.uri name another store?"
        ) from error
    except (BaseError, OSError, ValueError) as error:
        errors[action] += 1
        text = first_line(error)
        if any(sign in text for sign in NO_SPACE):
            raise StoreUnavailable(
                f"can't {action} {backend.root}{key}: the object store is full; free space there "
                f"or set objects.uri to a larger one ({text})"
            ) from error
        is_ours = isinstance(
            error, (AlreadyExistsError, InvalidPathError, NotSupportedError, ValueError)
        )
        if is_ours or (not backend.is_remote and backend.exists()):
            raise ObjectError(f"can't {action} {backend.root}{key}: {text}") from error
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            raise StoreUnavailable(
                f"can't {action} {backend.root}{key}: the store refuses it to this process's "
                f"credential ({text}); `relax store` shows what a role needs"
            ) from error
        raise StoreUnavailable(
            f"can't {action} {backend.root}{key}: {text}; is the store up, and may this "
            "process use it?"
        ) from error


def first_line(error: Exception) -> str:
    """Return an error's text without the storage's debug output."""
    return str(error).partition("\n")[0] or type(error).__name__
