"""A prompter with a prompt filter and pass rates is killed: no row is issued twice or lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker

from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupEnded, PromptGroupIssued

BLOCK_ROWS = 12
HOOK = """
def choose(prompt, *, answer, metadata, mean_rewards, train_step):
    return None if "tea" in prompt else len(prompt) - len(mean_rewards)
"""


@pytest.mark.long
def test_chosen_prompts_are_each_issued_once_when_the_prompter_dies(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    (directory / "hook.py").write_text(HOOK)
    run = start_run(
        run={"num_steps": 12},
        data={
            "prompt_filter": f"{directory / 'hook.py'}:choose",
            "filter_window_rows": BLOCK_ROWS,
            "pass_rate_range": [0.15, 0.95],
        },
        algorithm={"filter_uniform_rewards": True},
    )
    points = ("prompter.after_issue:2=kill", "trainer.in_transaction:4=kill")
    run.arm(*points)
    assert run.wait_until_ended(run.start()) == 0
    assert run.fired() == {failpoint_marker(point) for point in points}
    assert_ledger_balances(run)

    codec = EventCodec()
    events = [
        codec.decode(record.value)
        for record in run.records("prompt.groups", num_partitions=run.plan.queue_partitions)
    ]
    issued = {
        event.prompt_group_id: event for event in events if isinstance(event, PromptGroupIssued)
    }
    ends = [codec.decode(record.value) for record in run.records("control.prompt-group-outcomes")]
    expired = {
        end.prompt_group_id
        for end in ends
        if isinstance(end, PromptGroupEnded) and end.outcome is Outcome.EXPIRED
    }
    rows = [event.row for name, event in issued.items() if not _replaces_one_of(name, expired)]
    assert len(rows) == len(set(rows))
    passed_over = {
        int(row): reason for event in issued.values() for row, reason in event.skipped_rows.items()
    }
    assert not passed_over.keys() & set(rows)
    assert "prompt_filter" in passed_over.values()
    assert not [event for event in issued.values() if "tea" in event.messages[-1].text]
    begun = max(rows) // BLOCK_ROWS * BLOCK_ROWS
    assert {*rows, *passed_over} >= set(range(begun))
    assert run.report()["prompts_skipped"]["prompt_filter"] == list(passed_over.values()).count(
        "prompt_filter"
    )


def _replaces_one_of(prompt_group_id: str, ended: set[str]) -> bool:
    group_index, _, attempt = prompt_group_id.rpartition("-")
    return f"{group_index}-{int(attempt) - 1}" in ended
