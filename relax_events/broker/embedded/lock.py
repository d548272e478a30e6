"""The frozen list of jars that make up the embedded broker: path, size and SHA-256 of each, shipped beside this file."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Jar:
    """One artifact, by its path inside any Maven repository."""

    path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """File name without folders."""
        return self.path.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Lock:
    """All jars of one Kafka version, in class path order."""

    kafka_version: str
    jars: tuple[Jar, ...]

    @property
    def size_bytes(self) -> int:
        """Sum of all jars."""
        return sum(jar.size_bytes for jar in self.jars)


@cache
def read_lock() -> Lock:
    """Return the shipped lock.

    It holds the runtime dependencies of `kafka_2.13` plus `slf4j-simple`, without the twelve jars that a plaintext or TLS broker never loads
    (reflection, OAuth tokens, command-line parsers, YAML and CSV). `hash4j` looks idle as well and is not: KIP-848 groups fail without it.
    """
    document = json.loads(resources.files(__package__).joinpath("kafka.lock.json").read_text(encoding="utf-8"))
    return Lock(document["kafka_version"], tuple(Jar(**row) for row in document["jars"]))
