"""The Python client raises SystemError instead of the exception of a fatal error.

Seen with: confluent-kafka 2.16.1. Report: none.

The client sets its exception and continues with our callbacks. The next call into the client then
fails, or the exception gets lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaException

from relax_events.errors import ClientFailed
from relax_events.kafka.connection import extract_error, translate

EXCEPTION_LOST = "without setting an exception"


@contextmanager
def translate_fatal_errors(what: str) -> Iterator[None]:
    """Translate fatal client errors that surface as SystemError.

    Raises:
        BrokerError: The block met a fatal error.
    """
    try:
        yield
    except SystemError as broken:
        if isinstance(broken.__cause__, KafkaException):
            raise translate(extract_error(broken.__cause__), what) from broken
        if EXCEPTION_LOST in str(broken):
            raise ClientFailed(
                f"{what}: the client met an unnamed fatal error; restart the worker"
            ) from broken
        raise
