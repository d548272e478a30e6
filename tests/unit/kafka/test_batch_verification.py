"""Record batches decoded from their bytes, and detection of altered ones."""

from __future__ import annotations

import pytest

from relax_events.errors import BrokerUnavailable
from relax_events.kafka.base_consumer import build_reader_settings
from relax_events.kafka.batch_verification import (
    VARIABLE,
    BatchVerifier,
    RecordBatch,
    split_batches,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.storage import build_bootstrap_checkpoint

DATA = build_bootstrap_checkpoint({"one": 1, "two": 2, "three": 3}, timestamp_milliseconds=0)
"""Three record batches, as Kafka reads them: offsets 0, 1 to 3, and 4."""
OFFSETS = [(0, 1), (1, 4), (4, 5)]


def standings(data: bytes) -> list[bool]:
    return [batch.has_valid_checksum for batch in split_batches(data)]


def spans(data: bytes) -> list[tuple[int, int]]:
    return [(batch.first, batch.stop) for batch in split_batches(data)]


def test_fetched_data_is_split_into_consecutive_batches() -> None:
    assert (spans(DATA), standings(DATA)) == (OFFSETS, [True] * 3)
    assert list(split_batches(b"")) == list(split_batches(DATA[:60])) == []


@pytest.mark.parametrize("at", [-1, -2, -20])
def test_one_altered_bit_invalidates_only_its_own_batch(at: int) -> None:
    first_bytes = len(DATA) - sum(
        21 - 4 + len(batch.checked) for batch in list(split_batches(DATA))[1:]
    )
    middle = bytearray(DATA)
    end = first_bytes + 17 + len(list(split_batches(DATA))[1].checked)
    middle[end + at] ^= 1
    assert standings(bytes(middle)) == [True, False, True]


def test_truncated_or_malformed_batch_is_invalid_and_ends_the_response() -> None:
    assert (spans(DATA[:-1]), standings(DATA[:-1])) == (OFFSETS, [True, True, False])
    for index, byte in ((8, 0x7F), (8, 0x80), (16, 1)):  # the length's first byte, the format
        data = bytearray(DATA)
        data[index] = byte
        assert standings(bytes(data)) == [False]


class Answers:
    """Replaces the connection to a partition: returns the batches that a test sets."""

    def __init__(self, found: dict[int, RecordBatch]) -> None:
        self.found = found

    def find_batch(self, offset: int) -> RecordBatch | None:
        return next(
            (batch for batch in self.found.values() if batch.first <= offset < batch.stop), None
        )

    def close(self) -> None: ...


def test_verifier_finds_the_offsets_of_an_altered_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intact = {batch.first: batch for batch in split_batches(DATA)}
    altered = RecordBatch(1, 4, intact[1].checked[:-1] + b"\xff")
    answers = Answers(intact | {1: altered})
    monkeypatch.setattr("relax_events.kafka.batch_verification.BatchFetcher", lambda *_: answers)
    examiner = BatchVerifier(lambda *_: Connection("nowhere:1"), timeout_seconds=1.0)
    assert [examiner.find_altered_batch("topic", 0, offset) for offset in range(6)] == [
        None,
        *[range(1, 4)] * 3,
        None,
        range(5, 6),
    ]
    examiner.close()


def test_leader_lookup_is_retried_until_the_timeout() -> None:
    asked: list[str] = []

    def leader(topic: str, partition: int) -> Connection:
        asked.append(topic)
        raise BrokerUnavailable("no leader")

    with pytest.raises(BrokerUnavailable, match="no leader"):
        BatchVerifier(leader, timeout_seconds=0.2).find_altered_batch("topic", 0, 0)
    assert len(asked) > 1


@pytest.mark.parametrize(("asked_for", "checks"), [("", True), ("0", True), ("1", False)])
def test_client_leaves_checksums_to_the_verifier_when_configured(
    asked_for: str, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, asked_for)
    assert build_reader_settings()["check_crcs"] is checks
