"""Evaluations as a table."""

from __future__ import annotations

from relax_events.events.types import PolicyEvaluated
from relax_events.reports.evaluations import build_table
from relax_events.reports.report_files import evaluation_rows


def test_evaluation_table_has_a_column_per_k_and_dashes_for_missing_values() -> None:
    first = PolicyEvaluated(
        policy_version=0, dataset="math", num_prompts=2, samples_per_prompt=16, reward_mean=0.25, reward_stderr=0.125, weights_digest=bytes(32),
        pass_at_k={"16": 1.0, "4": 0.5}, completion_tokens_mean=12.25, num_truncated=1, num_unscored=2, num_failed_prompts=3,
    )  # fmt: skip
    second = PolicyEvaluated(
        policy_version=0,
        dataset="code",
        num_prompts=9,
        samples_per_prompt=1,
        weights_digest=bytes(32),
        pass_at_k={"1": 0.0},
    )
    heads, cells = build_table(evaluation_rows([first, second]))
    assert heads[4:9] == ["reward", "stderr", "pass@1", "pass@4", "pass@16"]
    assert cells == [
        ["0", "code", "9", "1", "-", "-", "0.000", "-", "-", "-", "0", "0", "0"],
        ["0", "math", "2", "16", "0.250", "0.125", "-", "0.500", "1.000", "12.2", "1", "2", "3"],
    ]


def test_empty_evaluation_table_has_only_headers() -> None:
    heads, cells = build_table([])
    assert (heads[0], cells) == ("version", [])
