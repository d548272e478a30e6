"""Reads addresses of a run file, and keeps secrets out of them and of other values: a run file's
text is written to the log, to reports and to every fork.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from relax_events.config.secret_values import find_secret
from relax_events.errors import ConfigError

_LOGIN = re.compile(r"//(?:[^\s/?#]*@|[^\s/?#@\[]*:(?!\d*(?:[\s/?#]|$))\S*@)")
"""A user before the host, with a password or without, also with a slash in the password."""
_BARE_LOGIN = re.compile(r"^[^\s/?#,]+@|,[^\s/?#,]+@")
"""The same in `host:port` without a scheme."""
_QUERY = re.compile(
    r"://\S*[?&](?:api[_-]?key|access[_-]?token|auth|token|password|passwd|secret|sig|signature|x-amz-signature)=[^&#\s]",
    re.IGNORECASE,
)
_ADDRESS_KEY = re.compile(
    r"(?:url|uri|server|endpoint|address|host|registry|broker\.list)s?$", re.IGNORECASE
)
_TEXT_KEYS = frozenset({"system_prompt", "prompt_template", "template", "rubric"})
"""Texts for a model, which no program takes for an address."""
_REMEDIES = {
    "objects.": (
        "credentials of a store are read from the environment, such as AWS_ACCESS_KEY_ID, or "
        "from the cloud's own files"
    ),
    "broker.schema_registry": (
        "name a file that holds user:password in broker.schema_registry_login_file"
    ),
    "broker.": "set broker.username, and name a file with its password in broker.password_file",
    "telemetry.traces.": "give it as a header by OTEL_EXPORTER_OTLP_HEADERS in the environment",
    "telemetry.": "give it in the environment, or in a file that the run file names",
    "reward.": "put a token into the environment and name its variable in options.token_variable",
}
_FOLDERS_OF_SECRETS = {"broker.credentials"}
"""Keys with the name of a secret that hold a path."""
_USUAL_REMEDY = (
    "put the secret into a file or an environment variable that the program or service reads "
    "itself, and only the rest into the run file"
)


def refuse_secret_values(tree: Mapping[str, Any]) -> None:
    """Refuse an address with a login, or with a secret in its query, and any other value that looks
    like a secret, anywhere in a run file; nothing of its value is shown.

    Raises:
        ConfigError: There is one; the text names its key and where the secret belongs.
    """
    for key, value, name in _strings(tree):
        if (what := secret_in(value, key=key, name=name)) is not None:
            remedy = next(
                (text for begin, text in _REMEDIES.items() if key.startswith(begin)), _USUAL_REMEDY
            )
            raise ConfigError(
                f"{key} holds {what}, which all who read the log or a report would see; {remedy}"
            )


def secret_in(value: str, *, key: str = "", name: str = "") -> str | None:
    """Return what secret a value holds, such as `an address with a login`; None for any other text.

    Args:
        value: Any text.
        key: Of the run file; a key of addresses may hold them without a scheme.
        name: Of the value: the last part of its key, or in a list the argument before it.
    """
    names = [part for part in key.split(".") if not part.isdigit()]
    if names and names[-1] in _TEXT_KEYS:
        return None
    if _LOGIN.search(value) or (
        _ADDRESS_KEY.search(".".join(names)) and "://" not in value and _BARE_LOGIN.search(value)
    ):
        return "an address with a login"
    if _QUERY.search(value):
        return "an address with a secret in its query"
    return find_secret(value, name="" if ".".join(names) in _FOLDERS_OF_SECRETS else name)


def _strings(value: Any, key: str = "", name: str = "") -> Iterator[tuple[str, str, str]]:
    """Give each text with its key and its name."""
    if isinstance(value, str):
        yield key, value, name
    elif isinstance(value, Mapping):
        for inner_name, inner in value.items():
            inner_key = f"{key}.{inner_name}" if key else str(inner_name)
            yield from _strings(inner, inner_key, str(inner_name))
    elif isinstance(value, list | tuple):
        before = name
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{key}.{index}", before)
            before = inner if isinstance(inner, str) and inner.startswith("-") else name


def is_in_clear(url: str) -> bool:
    """Return whether a connection to an address is unencrypted and leaves this machine."""
    parts = urlsplit(url)
    return parts.scheme.lower() not in ("https", "wss") and not is_loopback(parts.hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name or by its number."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


EMBEDDED = "embedded"
"""Stands for the address of the run's embedded broker."""
DEFAULT_PORT = 9092


def list_addresses(bootstrap_servers: str) -> list[str]:
    """Return the addresses of a comma-separated list."""
    return [address.strip() for address in bootstrap_servers.split(",")]


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of a broker's address as librdkafka reads it: `host:port`, `host`,
    `[IPv6]:port`, each also behind `protocol://`.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        parts = urlsplit(f"//{address.strip().rpartition('//')[2]}")
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is no address of a broker ({error}); write host:port"
        ) from error
    return parts.hostname or "", port
