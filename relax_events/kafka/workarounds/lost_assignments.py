"""librdkafka loses its partitions, or stops fetching one of them, and never rejoins.

Seen with: librdkafka 2.16.0. Report: none.

After a broker was suspended for longer than the session timeout, a client lost its partitions and
never rejoined; after a broker's container was restarted, it fetched one of eight partitions no
longer. This file compares a quiet client with its group's coordinator, and ends the worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from relax_events.errors import BrokerError, ClientFailed
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.group_membership import list_members
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
CHECK_SECONDS, MAX_MISMATCHES = 6.0, 1
MEMBERS_PER_CHECK = 32
"""A check reads all members of the group: in a group larger than this, members check less often, so
that what all of them read grows with the group and not with its square."""
MIN_UNREAD_CHECKS = 2


def compute_check_seconds(num_members: int) -> float:
    """Return how long a member of a group of this size waits for its next check."""
    return CHECK_SECONDS * max(1.0, num_members / MEMBERS_PER_CHECK)


class MembershipMonitor:
    """Detects that the coordinator no longer knows a quiet client or its assignment, and asks for a
    check of unread records.
    """

    def __init__(self, connection: Connection, consumer_group: str) -> None:
        self._connection, self._consumer_group = connection, consumer_group
        self._num_mismatches = self._num_unread_checks = 0
        self._unread: Mapping[TopicPartition, int] = {}
        self._num_members = 0
        self.mark_active()

    @property
    def is_due(self) -> bool:
        """Whether the client has received no records for so long that a check is due."""
        return time.monotonic() >= self._check_at

    def mark_active(self) -> None:
        """Postpone the next check, after records arrived or after a check."""
        self._check_at = time.monotonic() + compute_check_seconds(self._num_members)

    def check_unread(self, unread: Mapping[TopicPartition, int]) -> bool:
        """Record which positions have unread records although none arrived; return whether to
        verify now.

        Verification is due after several equal checks, then at doubling intervals, because it may
        fail on a busy machine.
        """
        self._num_unread_checks = (
            self._num_unread_checks + 1 if unread and unread == self._unread else 0
        )
        self._unread = unread
        return (
            self._num_unread_checks >= MIN_UNREAD_CHECKS
            and self._num_unread_checks.bit_count() == 1
        )

    def check_assignment(self, member_id: str, held: frozenset[TopicPartition]) -> None:
        """Compare the client's assignment with the coordinator's, if the coordinator is reachable.

        Raises:
            ClientFailed: They differed at the last check too, which is longer than any rebalance.
        """
        self.mark_active()
        try:
            members = list_members(self._connection, self._consumer_group)
        except BrokerError as error:
            log.debug(
                "membership.read_failed", consumer_group=self._consumer_group, error=str(error)
            )
            return
        self._num_members = len(members)
        assigned_partitions = next(
            (member.partitions for member in members if member.member_id == member_id), None
        )
        if assigned_partitions == held:
            self._num_mismatches = 0
            return
        self._num_mismatches += 1
        self._check_at = time.monotonic() + CHECK_SECONDS  # in a large group too
        answer = (
            "does not know this client"
            if assigned_partitions is None
            else f"gave this client {len(assigned_partitions)} partitions"
        )
        log.warning(
            "membership.mismatch",
            consumer_group=self._consumer_group,
            broker=answer,
            num_held=len(held),
        )
        if self._num_mismatches > MAX_MISMATCHES:
            raise ClientFailed(
                f"the coordinator of {self._consumer_group} {answer}, which holds "
                f"{len(held)}; restart the worker"
            )
