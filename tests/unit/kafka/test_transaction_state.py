"""Which of several coordinators' answers counts."""

from __future__ import annotations

import pytest

from relax_events.errors import BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.transaction_state import TransactionState, find_furthest


def answer(name: str, *, epoch: int = 3, producer_id: int = 7) -> TransactionState:
    return TransactionState(name, producer_id, epoch, Connection(f"{name}:{epoch}"))


@pytest.mark.parametrize(
    ("isolated", "true"),
    [
        (answer("PrepareCommit"), answer("CompleteCommit")),
        (answer("Ongoing"), answer("PrepareAbort")),
        (answer("Ongoing"), answer("CompleteAbort")),
        (answer("CompleteCommit"), answer("Ongoing", epoch=4)),
        (answer("PrepareCommit"), answer("Empty", epoch=4)),
    ],
)
def test_furthest_state_is_that_of_the_true_coordinator(
    isolated: TransactionState, true: TransactionState
) -> None:
    assert find_furthest([isolated, true]) is true
    assert find_furthest([true, isolated]) is true


def test_transactional_id_without_an_answer_has_no_state() -> None:
    assert find_furthest([]) is None


def test_answers_about_different_producers_are_not_compared() -> None:
    with pytest.raises(BrokerUnavailable, match="check that all brokers reach each other"):
        find_furthest([answer("CompleteCommit"), answer("Ongoing", producer_id=8)])
