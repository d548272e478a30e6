"""The Python client's new request for groups leaves out share groups.

Seen with: confluent-kafka 2.16.1. Report: none.
Test: test_new_request_for_groups_leaves_out_share_groups.

This file uses the old request, which is deprecated and returns groups of all kinds.
"""

from __future__ import annotations

import warnings
from typing import Any

from confluent_kafka import KafkaException

from relax_events.kafka.connection import extract_error, translate


def list_group_names(client: Any, *, timeout_seconds: float) -> list[str]:
    """Return the names of classic, consumer and share groups.

    Raises:
        BrokerError: The request fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            groups = client.list_groups(timeout=timeout_seconds)
        except KafkaException as exception:
            raise translate(extract_error(exception), "listing groups") from exception
    return [str(group.id) for group in groups]
