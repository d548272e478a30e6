"""Encryption of our HTTP servers: a certificate and its key, where the address is no loopback."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.config.http import HttpConfig
from relax_events.errors import ConfigError
from relax_events.http.guard import LOOPBACK

RUN_NAMES = "http.certificate_file", "http.key_file", "http.accept_plain = true"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain and its key, both in PEM."""

    certificate: Path
    key: Path

    @property
    def server_settings(self) -> dict[str, Any]:
        """The settings of uvicorn."""
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}


def choose_tls(
    host: str,
    *,
    certificate: Path | None,
    key: Path | None,
    accepts_plain: bool,
    names: tuple[str, str, str],
) -> TlsFiles | None:
    """Return the files for a server on an address; None if it speaks plain HTTP.

    Args:
        host: Where it listens.
        certificate: The certificate's file; None without one.
        key: The key's file.
        accepts_plain: Whether plain HTTP may leave this machine.
        names: The names of the settings of the last three, for errors.
    Raises:
        ConfigError: Tokens and keys would cross the network in clear, or the files can't be used.
    """
    if certificate is not None and key is not None:
        _require_pair(certificate, key, names)
        return TlsFiles(certificate, key)
    if certificate is not None or key is not None:
        raise ConfigError(f"{names[0]} and {names[1]} belong together, and one is missing; set it")
    if host in LOOPBACK or accepts_plain:
        return None
    raise ConfigError(
        f"on {host or 'all addresses'} tokens would cross the network in clear; set {names[0]} and "
        f"{names[1]}, or {names[2]} where a proxy or a mesh encrypts"
    )


def choose_run_tls(section: HttpConfig, host: str) -> TlsFiles | None:
    """Return the files for a server of a run on an address; None where it speaks plain HTTP.

    Raises:
        ConfigError: The address needs encryption, or the files can't be used.
    """
    return choose_tls(
        host,
        certificate=section.certificate_file,
        key=section.key_file,
        accepts_plain=section.accept_plain,
        names=RUN_NAMES,
    )


def _require_pair(certificate: Path, key: Path, names: tuple[str, str, str]) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{names[0]} = {certificate} and {names[1]} = {key} can't be used: "
            f"{error.strerror or error}; give a certificate and its key in PEM"
        ) from None


def open_client_context(ca_file: Path | None, *, name: str) -> ssl.SSLContext:
    """Return a client's TLS context: it trusts the authorities of this machine, or a given one.

    Args:
        ca_file: The authority's certificate in PEM.
        name: The name of the setting, for errors.
    Raises:
        ConfigError: The file can't be used.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{name} = {ca_file} can't be used: {error.strerror or error}; give a certificate in "
            "PEM"
        ) from None
