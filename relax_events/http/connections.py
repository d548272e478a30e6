"""The open connections of a server, by caller: none can take all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from relax_events.http.identity import Identity

MAX_UNIDENTIFIED = 64
"""Connections that have sent no request of a known identity yet."""
GRACE_SECONDS = 1.0
"""So long such a connection may stay, however many there are: clients that connect together."""


class ConnectionTable:
    """The connections of a server."""

    def __init__(self) -> None:
        self.unidentified: dict[Connection, None] = {}
        self.by_identity: Counter[str] = Counter()

    def make_room(self, *, now: float) -> None:
        """Close the oldest connections without an identity if there are too many."""
        excess = len(self.unidentified) - MAX_UNIDENTIFIED
        for connection in list(self.unidentified)[: max(0, excess)]:
            if now - connection.opened_at < GRACE_SECONDS:
                return
            connection.hang_up()


class Connection:
    """An open connection."""

    def __init__(self, table: ConnectionTable, close: Callable[[], None], *, now: float) -> None:
        """Enter the table.

        Args:
            table: Of the server.
            close: Closes it.
            now: The event loop's time.
        """
        self._table, self._close, self._name = table, close, ""
        self.opened_at = now
        table.unidentified[self] = None
        table.make_room(now=now)

    def identify(self, identity: Identity) -> bool:
        """Note whose requests come over it; return whether the identity may have one more."""
        if self._name == identity.name:
            return True
        if self._table.by_identity[identity.name] >= identity.max_connections:
            return False
        self.forget()
        self._name = identity.name
        self._table.by_identity[identity.name] += 1
        return True

    def hang_up(self) -> None:
        """Close it."""
        self.forget()
        self._close()

    def forget(self) -> None:
        """Leave the table."""
        self._table.unidentified.pop(self, None)
        if self._name:
            self._table.by_identity[self._name] -= 1
            if not self._table.by_identity[self._name]:
                del self._table.by_identity[self._name]
            self._name = ""
