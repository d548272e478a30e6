"""A broker that rejects a client is distinguished from an unreachable one, by librdkafka's errors
and a TLS handshake.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from relax_events.errors import AccessDenied, ConfigError
from relax_events.kafka.auth_errors import AuthFailureTracker, explain_refusal
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.partition_leaders import read_metadata
from relax_events.kafka.security.certificates import (
    KeyPair,
    make_authority,
    make_broker_certificate,
)
from relax_events.kafka.workarounds.stale_leaders import LeaderMonitor, leave_out_outdated_brokers

DAY = timedelta(days=1)
PATIENCE_SECONDS = 60.0


@contextmanager
def answering(folder: Path, *, certificate: KeyPair | None, greeting: bytes = b"") -> Iterator[str]:
    """Serve one connection on the loopback interface, by TLS when there is a certificate, and give
    the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_one, args=(listener, folder, certificate, greeting))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_SECONDS)


def serve_one(
    listener: socket.socket, folder: Path, certificate: KeyPair | None, greeting: bytes
) -> None:
    taken, _ = listener.accept()
    with taken:
        if certificate is None:
            taken.recv(1024)
            taken.sendall(greeting)
            return
        (folder / "broker.pem").write_bytes(certificate.key + certificate.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "broker.pem")
        try:
            context.wrap_socket(taken, server_side=True).close()
        except ssl.SSLError:
            return  # the client hung up, as it should


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority(lifetime=DAY)


@pytest.fixture
def tls(authority: KeyPair, tmp_path: Path) -> dict[str, str]:
    """Return the settings of a client that trusts our authority; the address is up to the test."""
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "sasl.username": "me",
    }


def test_error_reports_expired_certificate(
    authority: KeyPair, tls: dict[str, str], tmp_path: Path
) -> None:
    expired = make_broker_certificate(authority, ["127.0.0.1"], lifetime=-DAY)
    with answering(tmp_path, certificate=expired) as address:
        error = explain_refusal(
            "reaching it",
            KafkaError(KafkaError._SSL, "handshake failed"),
            {**tls, "bootstrap.servers": address},
        )
    assert isinstance(error, AccessDenied)
    assert (
        f"certificate of the broker at {address} can't be trusted: certificate has expired"
        in str(error)
    )
    assert "relax broker secure CONFIG --renew-certificates" in str(error)


def test_error_reports_broker_without_tls(tls: dict[str, str], tmp_path: Path) -> None:
    with answering(tmp_path, certificate=None, greeting=b"\0\0\0\4nope") as address:
        error = explain_refusal(
            "reaching it",
            KafkaError(KafkaError._SSL, "handshake failed"),
            {**tls, "bootstrap.servers": address},
        )
    assert error is not None
    assert f"the broker at {address} does not use TLS" in str(error)


def test_error_says_to_plaintext_client_that_broker_requires_tls(
    authority: KeyPair, tmp_path: Path
) -> None:
    with answering(
        tmp_path, certificate=make_broker_certificate(authority, ["127.0.0.1"], lifetime=DAY)
    ) as address:
        error = explain_refusal("reaching it", None, {"bootstrap.servers": address})
    assert error is not None
    assert (
        f"the broker at {address} uses TLS and this client does not; set broker.credentials"
        in str(error)
    )


def test_unreachable_broker_is_not_reported_as_auth_failure(tls: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        absent = f"127.0.0.1:{listener.getsockname()[1]}"
    assert explain_refusal("reaching it", None, {"bootstrap.servers": absent}) is None
    assert explain_refusal("reaching it", None, {**tls, "bootstrap.servers": absent}) is None
    assert (
        explain_refusal(
            "reaching it",
            KafkaError(KafkaError._SSL, "handshake cut off"),
            {**tls, "bootstrap.servers": absent},
        )
        is None
    )


def test_error_names_broker_requiring_login_when_another_is_unreachable() -> None:
    def hang_up() -> None:
        for _ in ("a greeting by TLS", "a question without a login"):
            taken, _ = listener.accept()
            with taken:
                taken.recv(1024)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        absent = f"127.0.0.1:{closed.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        error = explain_refusal("reaching it", None, {"bootstrap.servers": f"{absent}, {address}"})
        thread.join(PATIENCE_SECONDS)
    assert error is not None
    assert (
        f"the broker at {address} requires authentication, and this client has no credentials"
        in str(error)
    )


def test_error_names_missing_ca_file(tls: dict[str, str], tmp_path: Path) -> None:
    settings = {
        **tls,
        "ssl.ca.location": str(tmp_path / "nowhere.pem"),
        "bootstrap.servers": "127.0.0.1:1",
    }
    error = explain_refusal(
        "reaching it", KafkaError(KafkaError._SSL, "handshake failed"), settings
    )
    assert error is not None
    assert (
        f"broker.ca_file {tmp_path / 'nowhere.pem'} can't be used: No such file or directory"
        in str(error)
    )


def test_wrong_password_names_the_user_and_never_the_password(tls: dict[str, str]) -> None:
    settings = {**tls, "bootstrap.servers": "127.0.0.1:1", "sasl.password": "hunter2-hunter2"}
    error = explain_refusal(
        "writing", KafkaError(KafkaError._AUTHENTICATION, "invalid credentials"), settings
    )
    assert error is not None
    assert (
        "writing: _AUTHENTICATION authentication of user 'me' failed; the broker does not "
        "know this "
        "user, or has another password for it"
    ) in str(error)
    assert "hunter2" not in str(error)


def test_auth_failure_is_kept_until_a_client_connects() -> None:
    refusals = AuthFailureTracker()
    assert (refusals.latest, refusals.seconds) == (None, 0.0)
    refused = KafkaError(KafkaError._AUTHENTICATION, "invalid credentials")
    refusals.record(refused)
    refusals.record(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert refusals.latest is refused
    assert refusals.seconds > 0
    refusals.clear()
    assert (refusals.latest, refusals.seconds) == (None, 0.0)


def test_lost_connection_clears_recorded_auth_failure() -> None:
    refusals = AuthFailureTracker()
    refusals.record(KafkaError(KafkaError._SSL, "handshake cut off"))
    refusals.record(
        KafkaError(KafkaError._TRANSPORT, "Connect to ipv4#127.0.0.1:1 failed: Connection refused")
    )
    assert refusals.latest is None


def test_login_that_a_slow_broker_does_not_answer_is_no_auth_failure() -> None:
    refusals = AuthFailureTracker()
    for text in (
        "SASL SCRAM-SHA-512 mechanism handshake failed: Local: Timed out: broker's supported ...",
        "SASL authentication error: SaslAuthenticateRequest failed: Local: Timed out (after 4006ms",
    ):
        refusals.record(KafkaError(KafkaError._AUTHENTICATION, text))
    assert (refusals.latest, refusals.seconds) == (None, 0.0)


def test_access_denied_in_background_thread_is_raised_in_caller() -> None:
    refusals = AuthFailureTracker()
    refusals.raise_fatal()
    refusals.report_fatal(AccessDenied("leasing records: GROUP_AUTHORIZATION_FAILED"))
    with pytest.raises(AccessDenied, match="leasing records"):
        refusals.raise_fatal()


def test_workers_start_with_a_kind_of_login_by_which_leaders_can_not_be_compared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        unsupported = Connection(
            f"127.0.0.1:{listening.getsockname()[1]}",
            client={"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"},
        )
        with pytest.raises(ConfigError, match="GSSAPI"):
            read_metadata(unsupported, ["t"])
        assert leave_out_outdated_brokers(unsupported, ["t"]) is unsupported
        assert (
            LeaderMonitor(unsupported).find_newer_leaders([("t", 0)], lambda: {("t", 0): 1}) == {}
        )
