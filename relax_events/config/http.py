"""The section `http`: encryption of the run's HTTP servers."""

from __future__ import annotations

from relax_events.config.base import Section
from relax_events.config.external_values import FilePath


class HttpConfig(Section):
    """Encryption of the scaling API and of the gateway for harnesses, whose tokens and keys must
    not cross a network in clear. On a loopback address plain HTTP needs no setting.
    """

    certificate_file: FilePath | None = None
    """Certificate of this machine's names, with its chain, in PEM; the servers then speak HTTPS."""
    key_file: FilePath | None = None
    """Its private key, in PEM."""
    ca_file: FilePath | None = None
    """Authority that clients of the run trust, in PEM; None takes those of the machine."""
    accept_plain: bool = False
    """Whether servers on other addresses than loopback may speak plain HTTP: where a proxy or a
    mesh encrypts, or the network is private."""
