"""The bootstrap checkpoint, read back by a parser written from Kafka's message specifications, not
from the writer."""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from io import BytesIO

import pytest

from relax_events.kafka.embedded.storage import (
    FEATURE_LEVELS,
    build_bootstrap_checkpoint,
    compute_crc32c,
)
from relax_events.kafka.security.scram import ScramCredential

NOW_MILLISECONDS = 1_700_000_000_123


@dataclass
class Batch:
    base_offset: int
    attributes: int
    crc: int
    covered: bytes
    timestamp: int
    records: list[tuple[bytes | None, bytes]]


def read_varint(stream: BytesIO) -> int:
    shift = value = 0
    while True:
        byte = stream.read(1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value // 2 if value % 2 == 0 else -(value + 1) // 2
        shift += 7


def read_batches(content: bytes) -> list[Batch]:
    stream = BytesIO(content)
    batches = []
    while header := stream.read(12):
        base_offset, length = struct.unpack(">qi", header)
        body = stream.read(length)
        assert len(body) == length
        _, magic, crc = struct.unpack_from(">ibI", body)
        assert magic == 2
        covered = body[9:]
        attributes, last_delta, timestamp, _, _, _, _, count = struct.unpack_from(
            ">hiqqqhii", covered
        )
        assert last_delta == count - 1
        rest = BytesIO(covered[40:])
        batches.append(
            Batch(
                base_offset,
                attributes,
                crc,
                covered,
                timestamp,
                [read_record(rest, index) for index in range(count)],
            )
        )
        assert rest.read() == b""
    return batches


def read_record(stream: BytesIO, index: int) -> tuple[bytes | None, bytes]:
    length = read_varint(stream)
    record = BytesIO(stream.read(length))
    assert record.read(1) == b"\0"
    assert read_varint(record) == 0
    assert read_varint(record) == index
    key_length = read_varint(record)
    key = None if key_length < 0 else record.read(key_length)
    value = record.read(read_varint(record))
    assert record.read() == b"\0"
    return key, value


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c_agrees_with_published_vectors(data: bytes, expected: int) -> None:
    """RFC 3720, appendix B.4, and the check value of the CRC catalogue."""
    assert compute_crc32c(data) == expected


def test_bootstrap_checkpoint_frames_features_between_header_and_footer() -> None:
    header, levels, footer = read_batches(
        build_bootstrap_checkpoint(timestamp_milliseconds=NOW_MILLISECONDS)
    )
    assert [batch.base_offset for batch in (header, levels, footer)] == [0, 1, 7]
    assert [batch.attributes for batch in (header, levels, footer)] == [0x20, 0, 0x20]
    assert {batch.timestamp for batch in (header, levels, footer)} == {NOW_MILLISECONDS}
    assert header.records == [(b"\0\0\0\3", bytes(11))]
    assert footer.records == [(b"\0\0\0\4", bytes(3))]


def test_bootstrap_checkpoint_names_every_feature_level() -> None:
    _, levels, _ = read_batches(build_bootstrap_checkpoint())
    read = {}
    for key, value in levels.records:
        assert key is None
        assert value[:3] == b"\x01\x0c\x00"
        name_end = 4 + value[3] - 1
        read[value[4:name_end].decode()] = struct.unpack(">h", value[name_end : name_end + 2])[0]
        assert value[name_end + 2 :] == b"\0"
    assert read == FEATURE_LEVELS
    assert read["share.version"] == read["group.version"] == 1
    assert read["transaction.version"] == 2


def test_bootstrap_checkpoint_batches_have_valid_checksums() -> None:
    for batch in read_batches(build_bootstrap_checkpoint()):
        assert bitwise_crc32c(batch.covered) == batch.crc


def bitwise_crc32c(data: bytes) -> int:
    """Without a table, most significant bit first, reflected at both ends."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= int(f"{byte:08b}"[::-1], 2) << 24
        for _ in range(8):
            register = (
                register << 1 ^ 0x1EDC6F41 if register >> 31 else register << 1
            ) & 0xFFFFFFFF
    return int(f"{register:032b}"[::-1], 2) ^ 0xFFFFFFFF


def test_bootstrap_checkpoint_contains_the_initial_scram_users() -> None:
    user = ScramCredential("relax.admin", b"salt" * 6, b"s" * 64, b"k" * 64, 8192)
    _, records, footer = read_batches(
        build_bootstrap_checkpoint({"metadata.version": 30}, users=[user])
    )
    assert (len(records.records), footer.base_offset) == (2, 3)
    stream = BytesIO(records.records[1][1])
    assert (
        stream.read(3) == b"\x01\x0b\x00"
    )  # frame version, UserScramCredentialRecord, its version
    assert stream.read(stream.read(1)[0] - 1) == b"relax.admin"
    assert stream.read(1) == b"\x02"  # SCRAM-SHA-512
    assert [stream.read(stream.read(1)[0] - 1) for _ in range(3)] == [
        b"salt" * 6,
        b"s" * 64,
        b"k" * 64,
    ]
    assert struct.unpack(">ib", stream.read()) == (8192, 0)


def test_scram_credential_verifies_only_the_right_password() -> None:
    """The server's check of RFC 5802, section 3: it recovers the client's key from its proof and
    compares what it hashes to."""
    kept = ScramCredential.derive("me", "right", salt=b"0123456789abcdef")
    signature = hmac.digest(kept.stored_key, b"the messages so far", "sha512")
    for password, accepted in (("right", True), ("wrong", False)):
        salted = hashlib.pbkdf2_hmac(
            "sha512", password.encode(), b"0123456789abcdef", kept.iterations
        )
        client_key = hmac.digest(salted, b"Client Key", "sha512")
        own_signature = hmac.digest(
            hashlib.sha512(client_key).digest(), b"the messages so far", "sha512"
        )
        proof = bytes(a ^ b for a, b in zip(client_key, own_signature, strict=True))
        recovered = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        assert (hashlib.sha512(recovered).digest() == kept.stored_key) is accepted
