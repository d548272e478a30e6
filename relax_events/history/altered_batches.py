"""Verifies the record batches of a log on which a worker has met an altered one.

Kafka's client may abort where it reads on behind a batch that fails its checksum, see
`batch_verification`. Workers are restarted and verify from then on; a command that reads the log
ends.
"""

from __future__ import annotations

from collections.abc import Collection

from relax_events.kafka.admin import Admin
from relax_events.kafka.batch_verification import enable_verification, is_verification_enabled
from relax_events.kafka.connection import Connection
from relax_events.kafka.corruption import CHECKSUM_FAILURE
from relax_events.kafka.log_reader import LogReader
from relax_events.topics.plan import DEAD_LETTERS


def verify_altered_log(admin: Admin, connection: Connection, topics: Collection[str]) -> None:
    """Let this process verify record batches from now on, if a dead letter of the run names an
    altered one. Reads the run's dead letters, of which most runs have none.

    Args:
        admin: Looks up the ends of the topics with dead letters.
        connection: How to reach the broker.
        topics: All topics of the run.
    Raises:
        BrokerUnavailable: The dead letters could not be read within the request timeout.
    """
    if is_verification_enabled():
        return
    ends = admin.end_offsets([(topic, 0) for topic in topics if topic.endswith(DEAD_LETTERS)])
    spans = {partition: (0, end) for partition, end in ends.items() if end}
    if not spans:
        return
    reader = LogReader(connection)
    try:
        records = reader.stream(spans)
        if any(record.headers.get("error-text") == CHECKSUM_FAILURE for record in records):
            enable_verification()
    finally:
        reader.close()
