"""Brokers with stale information: they still load their groups, or list deleted topics."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relax_events.errors import BrokerRefused, BrokerUnavailable
from relax_events.kafka import admin, inventory, offset_admin
from relax_events.kafka.connection import Connection

LOADING = KafkaException(KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))
DENIED = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))


def done(result: Any) -> Future[Any]:
    """Return a future that is over."""
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


class Loading:
    """A client whose broker responds with errors a given number of times, and then with the group
    `relax.t.reward`."""

    def __init__(self, num_errors: int, error: KafkaException = LOADING) -> None:
        self.num_errors, self.error = num_errors, error

    def _is_bad(self) -> bool:
        self.num_errors -= 1
        return self.num_errors >= 0

    def list_groups(self, *, timeout: float) -> list[Any]:
        if self._is_bad():
            raise self.error
        return [SimpleNamespace(id="other"), SimpleNamespace(id="relax.t.reward")]

    def list_consumer_groups(self, *, request_timeout: float) -> Future[Any]:
        return done(
            SimpleNamespace(valid=[], errors=[self.error])
            if self._is_bad()
            else SimpleNamespace(valid=self.list_groups_found(), errors=[])
        )

    def list_groups_found(self) -> list[Any]:
        return [SimpleNamespace(group_id="relax.t.reward")]

    def describe_consumer_groups(
        self, names: list[str], *, request_timeout: float
    ) -> dict[str, Future[Any]]:
        described = SimpleNamespace(
            group_id=names[0], state=SimpleNamespace(name="EMPTY"), members=[]
        )
        return {name: done(self.error if self._is_bad() else described) for name in names}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(offset_admin, "LEADER_CHANGE_SECONDS", 0.0)


def listed(
    monkeypatch: pytest.MonkeyPatch, client: Loading, kind: str, seconds: float = 10.0
) -> list[str]:
    """List groups over a client as either class does."""
    connection = Connection("127.0.0.1:1", request_timeout_seconds=seconds, client_id="test")
    module, face = (
        (inventory, inventory.Inventory) if kind == "inventory" else (offset_admin, admin.Admin)
    )
    monkeypatch.setattr(module, "AdminClient", lambda settings: client)
    return list(face(connection).groups("relax."))


@pytest.mark.parametrize("num_errors", [1, 2])
@pytest.mark.parametrize("kind", ["inventory", "admin"])
def test_group_listing_is_retried_while_the_coordinator_loads(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_errors: int
) -> None:
    assert listed(monkeypatch, Loading(num_errors), kind) == ["relax.t.reward"]


@pytest.mark.parametrize("kind", ["inventory", "admin"])
def test_group_listing_fails_at_the_deadline(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"listing .*groups: COORDINATOR_LOAD_IN_PROGRESS"):
        listed(monkeypatch, Loading(1_000_000_000), kind, seconds=0.01)


@pytest.mark.parametrize("kind", ["inventory", "admin"])
def test_denied_group_listing_fails_without_retry(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    client = Loading(1, DENIED)
    with pytest.raises(BrokerRefused, match=r"listing .*groups"):
        listed(monkeypatch, client, kind)
    assert client.num_errors == 0


class Late:
    """A client whose broker names a topic that was deleted for so many calls more."""

    def __init__(self, num_named: int) -> None:
        self.num_named, self.num_asked = num_named, 0

    def delete_topics(
        self, names: list[str], *, operation_timeout: float
    ) -> dict[str, Future[Any]]:
        return {name: done(None) for name in names}

    def list_topics(self, *, timeout: float) -> Any:
        self.num_asked += 1
        named = ["other", "relax.t.one"] if self.num_asked <= self.num_named else ["other"]
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions={0: None}) for name in named}
        )


def deleting(
    monkeypatch: pytest.MonkeyPatch, client: Late, *names: str, seconds: float = 10.0
) -> None:
    monkeypatch.setattr(inventory, "AdminClient", lambda settings: client)
    inventory.Inventory(
        Connection("127.0.0.1:1", request_timeout_seconds=seconds, client_id="test")
    ).delete_topics(names)


@pytest.mark.parametrize("num_named", [0, 3])
def test_delete_waits_until_topics_are_no_longer_listed(
    monkeypatch: pytest.MonkeyPatch, num_named: int
) -> None:
    client = Late(num_named)
    deleting(monkeypatch, client, "relax.t.one", "relax.t.two")
    assert client.num_asked == num_named + 1


def test_delete_fails_naming_the_topic_that_is_still_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        BrokerUnavailable, match=r"topic relax\.t\.one is deleted and still listed after 0\.01 s"
    ):
        deleting(monkeypatch, Late(1_000_000_000), "relax.t.one", seconds=0.01)


def test_delete_of_no_topics_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Late(1)
    deleting(monkeypatch, client)
    assert client.num_asked == 0
