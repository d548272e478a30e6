"""Creates a certificate authority and the brokers' certificates, as PEM.

The only module that imports `cryptography`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from relax_events.errors import EnvironmentProblem

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise EnvironmentProblem(
        f"making certificates needs {error.name}; install relax-events[security]"
    ) from None
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

BROKER_NAME = "relax.broker"
"""The common name of brokers' certificates, by which brokers authenticate each other."""
CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and its certificate, both PEM."""

    key: bytes
    certificate: bytes


def make_authority(*, lifetime: timedelta) -> KeyPair:
    """Create a self-signed certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("relax.ca")
    builder = _builder(name, issuer=name, lifetime=lifetime).public_key(key.public_key())
    usage = _usage(certificates=True)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    ).add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return KeyPair(_key_pem(key), builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def make_broker_certificate(
    authority: KeyPair, hosts: Sequence[str], *, lifetime: timedelta
) -> KeyPair:
    """Create a broker's key and certificate, valid as TLS server and as client of other brokers.

    Args:
        authority: The certificate authority that signs.
        hosts: Host names and addresses of the broker; clients reject a certificate without the one
            that they use.
        lifetime: The validity from now on; a negative one creates an expired certificate.
    """
    signer = load_pem_private_key(authority.key, password=None)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(BROKER_NAME), issuer=issuer.subject, lifetime=lifetime).public_key(
        key.public_key()
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_usage(certificates=False), critical=True)
    purposes = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    builder = builder.add_extension(purposes, critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type] # our authorities have EC keys
    builder = builder.add_extension(identifier, critical=False)
    return KeyPair(_key_pem(key), _signed(builder, signer))  # type: ignore[arg-type] # likewise


def _builder(name: x509.Name, *, issuer: x509.Name, lifetime: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begin = min(now, now + lifetime) - CLOCK_SKEW
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
    )
    return builder.not_valid_before(begin).not_valid_after(now + lifetime)


def _signed(builder: x509.CertificateBuilder, signer: CertificateIssuerPrivateKeyTypes) -> bytes:
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )
