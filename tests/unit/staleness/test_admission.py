"""Prompt group outcomes derived from ids alone."""

from __future__ import annotations

import pytest

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.staleness import build_group_end


def test_build_group_end_reads_batch_slot_and_attempt_from_the_id() -> None:
    ended = build_group_end(
        "000012-0003-4",
        Outcome.EXPIRED,
        policy_version=9,
        trainer_version=12,
        reason="too old",
        mean_reward=0.5,
    )
    assert (
        ended.prompt_group_id,
        ended.train_step,
        ended.group_index,
        ended.attempt,
        ended.row,
    ) == ("000012-0003-4", 12, 3, 4, -1)
    assert (ended.outcome, ended.policy_version, ended.trainer_version) == (Outcome.EXPIRED, 9, 12)
    assert (ended.reason, ended.mean_reward) == ("too old", 0.5)


@pytest.mark.parametrize("text", ["", "12-3-4", "000012-0003", "000012-0003-4/0"])
def test_build_group_end_rejects_an_invalid_prompt_group_id(text: str) -> None:
    with pytest.raises(
        CorruptRecord, match="is not a prompt group id; an example is 000012-0003-0"
    ):
        build_group_end(text, Outcome.FAILED, policy_version=0, trainer_version=0)
