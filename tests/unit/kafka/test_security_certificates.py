"""Certificates that TLS accepts or rejects, by Python's own implementation in memory."""

from __future__ import annotations

import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest

from relax_events.kafka.security.certificates import (
    KeyPair,
    make_authority,
    make_broker_certificate,
)

DAY = timedelta(days=1)


def shake_hands(broker: KeyPair, authority: KeyPair, host: str, folder: Path) -> ssl.SSLObject:
    """Let a client that trusts an authority meet a broker under a host name; return the client's
    side."""
    (folder / "broker.pem").write_bytes(broker.key + broker.certificate)
    (folder / "ca.pem").write_bytes(authority.certificate)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "broker.pem")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = ssl.create_default_context(cafile=str(folder / "ca.pem")).wrap_bio(
        to_client, to_server, server_hostname=host
    )
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority(lifetime=DAY)


@pytest.mark.parametrize("host", ["127.0.0.1", "kafka-1.example", "::1"])
def test_client_trusts_a_broker_under_the_hosts_of_its_certificate(
    authority: KeyPair, tmp_path: Path, host: str
) -> None:
    broker = make_broker_certificate(
        authority, ["127.0.0.1", "kafka-1.example", "::1"], lifetime=DAY
    )
    shake_hands(broker, authority, host, tmp_path)


@pytest.mark.parametrize(
    ("host", "lifetime", "text"),
    [
        ("kafka-2.example", DAY, "Hostname mismatch"),
        ("127.0.0.2", DAY, "IP address mismatch"),
        ("kafka-1.example", -DAY, "certificate has expired"),
    ],
)
def test_client_rejects_a_wrong_host_name_and_an_expired_certificate(
    authority: KeyPair, tmp_path: Path, host: str, lifetime: timedelta, text: str
) -> None:
    broker = make_broker_certificate(authority, ["127.0.0.1", "kafka-1.example"], lifetime=lifetime)
    with pytest.raises(ssl.SSLCertVerificationError, match=text):
        shake_hands(broker, authority, host, tmp_path)


def test_client_refuses_a_broker_of_another_authority(authority: KeyPair, tmp_path: Path) -> None:
    broker = make_broker_certificate(make_authority(lifetime=DAY), ["localhost"], lifetime=DAY)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(broker, authority, "localhost", tmp_path)


def test_certificate_expires_at_the_given_time(authority: KeyPair, tmp_path: Path) -> None:
    broker = make_broker_certificate(authority, ["localhost"], lifetime=timedelta(days=30))
    seen = shake_hands(broker, authority, "localhost", tmp_path).getpeercert()
    assert seen is not None
    assert abs(ssl.cert_time_to_seconds(str(seen["notAfter"])) - time.time() - 30 * 86_400) < 60
