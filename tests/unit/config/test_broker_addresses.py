"""Addresses of brokers, as librdkafka reads them."""

from __future__ import annotations

import pytest

from relax_events.config.addresses import split_address
from relax_events.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("kafka-1:9094", ("kafka-1", 9094)),
        (" kafka-1.example.org ", ("kafka-1.example.org", 9092)),
        ("SASL_SSL://kafka-1:9094", ("kafka-1", 9094)),
        ("[::1]:9094", ("::1", 9094)),
        ("127.0.0.1:28082", ("127.0.0.1", 28082)),
    ],
)
def test_address_is_split_into_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["kafka-1:abc", "kafka-1:99999", "[::1"])
def test_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        split_address(address)
