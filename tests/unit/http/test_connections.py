"""The connections of a server: no caller takes all of them."""

from __future__ import annotations

from relax_events.http.identity import Identity
from relax_events.http.server import (
    GRACE_SECONDS,
    MAX_UNIDENTIFIED,
    Connection,
    ConnectionTable,
)


def test_oldest_connections_without_an_identity_make_room() -> None:
    table, closed = ConnectionTable(), list[int]()
    connections = [
        Connection(table, lambda number=number: closed.append(number), now=0.0)
        for number in range(MAX_UNIDENTIFIED + 2)
    ]
    assert closed == [], "many clients that connect together all stay"
    connections[1].identify(Identity(name="a"))
    Connection(table, lambda: None, now=GRACE_SECONDS)
    assert closed == [0, 2], "the oldest ones, but not the one that showed its key"


def test_identity_has_its_number_of_connections() -> None:
    table = ConnectionTable()
    one, other = Identity(name="a", max_connections=2), Identity(name="b")
    connections = [Connection(table, lambda: None, now=0.0) for _ in range(3)]
    assert [connection.identify(one) for connection in connections] == [True, True, False]
    assert connections[0].identify(one), "it has its place already"
    assert connections[2].identify(other)
    connections[0].forget()
    assert connections[2].identify(one), "a proxy's connection changes its identity"
    assert (table.by_identity, table.unidentified) == ({"a": 2}, {})
