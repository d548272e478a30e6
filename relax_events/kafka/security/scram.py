"""The credential that a SCRAM server stores: it verifies a password and cannot be used to log
in.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

ITERATIONS = 8192
SALT_BYTES = 24


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """One user's SCRAM-SHA-512 credential."""

    username: str
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int = ITERATIONS

    @classmethod
    def derive(cls, username: str, password: str, *, salt: bytes | None = None) -> ScramCredential:
        """Derive the credential from a password.

        Source: RFC 5802, section 3 (SaltedPassword, StoredKey, ServerKey); with SHA-512.
        """
        salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        salted = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", "sha512")
        return cls(
            username,
            salt,
            hashlib.sha512(client_key).digest(),
            hmac.digest(salted, b"Server Key", "sha512"),
        )
