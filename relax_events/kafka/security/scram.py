"""What a SCRAM server keeps of a password: enough to check it, too little to log in with it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

ITERATIONS = 8192
SALT_BYTES = 24


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """One user's entry for SCRAM-SHA-512."""

    username: str
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int = ITERATIONS

    @classmethod
    def of(cls, username: str, password: str, *, salt: bytes | None = None) -> ScramCredential:
        """Derive the entry from a password.

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
