"""The report: metrics worked out by hand, complete files, and a page that escapes hostile text."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_samples import ended, rolled_out

from relax_events.config import RunConfig
from relax_events.events.parts import ObjectRef, Outcome
from relax_events.events.types import PolicyEvaluated, PolicyVersionPublished, PromptGroupIssued
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState
from relax_events.reports.report_files import build_report, write_report
from relax_events.runtime.run_description import digest_config
from tests.unit.run_events import at, records_of, run_config, train_step

END_SECONDS = 2000.0
HOSTILE = '</pre><script>alert("x")</script> & co'


def issued(group: str) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=group,
        train_step=0,
        group_index=0,
        attempt=0,
        row=0,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[],
        seed=0,
    )


def recorded_run(num_steps: int, **values: Any) -> tuple[RunState, Ledger]:
    """Return a valid run: a prompt group of two samples a step, one step every two seconds, reward
    growing by 0.1.

    One prompt group more was filtered and one is in flight; one sample was generated twice.
    """
    state, ledger = RunState(keeps_all=True, policy_version=num_steps), Ledger(max_staleness=2)
    for version in range(num_steps + 1):
        publication = PolicyVersionPublished(
            policy_version=version,
            artifact=ObjectRef("file:///w", b"", 1),
            transports=["store"],
            start_offsets=[],
        )
        ledger.apply(publication, at("control.policy-versions", version))
    for index in range(num_steps):
        seconds, staleness = END_SECONDS - 2.0 * (num_steps - index), (0, 2) if index else (2,)
        step = train_step(
            index, at_seconds=seconds, staleness=staleness, reward_mean=index / 10, **values
        )
        state.apply(step)
        for event, location in records_of(step, version=max(index - 1, 0)):
            ledger.apply(event, location)
    for event in (issued("000099-0000-0"), issued("000099-0001-0")):
        ledger.apply(event, at("prompt.groups"))
    ledger.apply(ended("000099-0000-0", Outcome.FILTERED), at("control.prompt-group-outcomes"))
    for _ in range(2):
        ledger.apply(rolled_out("000099-0001-0", 0), at("rollout.samples"))
    return state, ledger


def built(
    state: RunState,
    ledger: Ledger,
    *,
    wall_seconds: float = 100.0,
    config: RunConfig | None = None,
    reason: str = "done",
    succeeded: bool = True,
) -> dict[str, Any]:
    config = config or run_config()
    ended_at = int(END_SECONDS * 1e6)
    return build_report(
        config,
        state,
        ledger,
        wall_seconds=wall_seconds,
        succeeded=succeeded,
        reason=reason,
        ended_at=ended_at,
    )


def test_report_contains_the_metrics_of_the_run() -> None:
    report = built(*recorded_run(12))
    assert (
        report["run_id"],
        report["succeeded"],
        report["reason"],
        report["steps"],
        report["num_steps"],
    ) == ("shown", True, "done", 12, 4)
    assert (report["reward_first"], report["reward_last"]) == (0.0, 1.1)
    assert report["reward_first_10"] == pytest.approx(0.45)  # 0.0 to 0.9
    assert report["reward_last_10"] == pytest.approx(0.65)  # 0.2 to 1.1
    assert report["outcomes"] == {
        "issued": 14,
        "trained": 12,
        "filtered": 1,
        "expired": 0,
        "failed": 0,
        "in_flight": 1,
    }
    assert (
        report["samples_lost"],
        report["samples_trained_twice"],
        report["rollouts_regenerated"],
    ) == (0, 0, 1)
    assert (report["samples_rolled_out"], report["samples_trained"]) == (25, 24)
    assert (report["staleness_max"], report["staleness_mean"], report["staleness_counts"]) == (
        1,
        22 / 24,
        [2, 22],
    )
    assert report["phase_seconds"] == {"wait": 12 * 0.375, "update": 12 * 0.125}
    assert report["ledger_problems"] == []
    assert report["weights_digests"][3] == "03" * 32
    assert report["ended_at"] == "1970-01-01T00:33:20+00:00"
    assert report["machine"]["cores"] >= 1


def test_report_shows_the_loss_of_a_run_that_rewards_nothing() -> None:
    state, ledger = recorded_run(3)
    for index, step in enumerate(state.steps):
        del step.metrics["reward_mean"]
        step.metrics.update(loss=3.0 - index, preference_accuracy=0.5)
    report = built(state, ledger)
    assert (report["reward_first"], report["reward_last_10"], state.reward) == (None, None, None)


def test_report_sums_the_time_of_all_steps() -> None:
    report = built(*recorded_run(12), wall_seconds=7.0)
    assert report["curves"]["step_seconds"] == [0.5] * 12
    assert (report["train_seconds"], report["tokens_trained"]) == (6.0, 1200)
    assert report["steps_of_session"] == 3


def test_report_curves_have_an_entry_per_step_and_exact_losses(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    state, ledger = recorded_run(5, loss=0.1 + 0.2)
    state.steps[2].metrics["grad_norm"] = math.nan
    state.steps[3].metrics["grad_norm"] = 1.5
    write_report(config, built(state, ledger, config=config))
    curves = json.loads((config.run_directory / "report.json").read_text())["curves"]
    assert curves["train_step"] == [0, 1, 2, 3, 4]
    assert curves["loss"] == [0.30000000000000004] * 5
    assert curves["grad_norm"] == [None, None, None, 1.5, None]
    assert curves["staleness_max"] == [0, 1, 1, 1, 1]
    assert curves["phase_seconds"]["wait"] == [0.375] * 5
    assert {len(curve) for name, curve in curves.items() if name != "phase_seconds"} == {5}


def test_report_is_written_atomically_and_matches_the_returned_value(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    for reason in ("first", "second"):
        report = built(*recorded_run(3), config=config, reason=reason)
        write_report(config, report)
    assert json.loads((config.run_directory / "report.json").read_text()) == report
    assert report["reason"] == "second"
    assert [path.name for path in config.run_directory.iterdir()] == ["report.json"]


def test_report_works_when_no_step_was_made(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    report = built(RunState(), Ledger(2), config=config, succeeded=False)
    write_report(config, report)
    empty = (
        "reward_first",
        "reward_last",
        "reward_first_10",
        "reward_last_10",
        "tokens_per_second",
        "samples_per_second",
    )
    assert [report[name] for name in empty] == [None] * 6
    assert (report["steps"], report["tokens_trained"], report["curves"]["reward_mean"]) == (
        0,
        0,
        [],
    )


def test_report_shows_ledger_problems() -> None:
    state, ledger = recorded_run(3)
    ledger.apply(
        train_step(1, at_seconds=END_SECONDS, staleness=(0, 2)), at("control.train-steps", 3)
    )
    report = built(state, ledger)
    assert report["samples_trained_twice"] == 2
    assert report["ledger_problems"][0].startswith("sample trained twice: 2, for example")


def test_report_omits_broker_client_settings() -> None:
    config = run_config()
    client = {"sasl.password": "hunter2"}
    secret = config.model_copy(
        update={
            "broker": config.broker.model_copy(
                update={"client": client, "bootstrap_servers": "elsewhere:1"}
            )
        }
    )
    report = built(*recorded_run(1), config=secret)
    assert "hunter2" not in json.dumps(report)
    assert report["config_digest"] == digest_config(config)
    assert digest_config(run_config(seed=5)) != digest_config(config)


def evaluated(version: int, dataset: str, reward: float | None) -> PolicyEvaluated:
    return PolicyEvaluated(
        policy_version=version, dataset=dataset, num_prompts=3, samples_per_prompt=2, reward_mean=reward, pass_at_k={"2": 0.75},
        weights_digest=bytes(32), evaluated_at=5,
    )  # fmt: skip


def test_report_lists_evaluations_by_version_and_counts_skipped_rows(
    tmp_path: Path,
) -> None:
    state, ledger = recorded_run(2)
    for event in (
        evaluated(2, "b", 0.5),
        evaluated(0, "b", None),
        evaluated(2, "a", 0.25),
        evaluated(2, "a", 0.99),
    ):
        state.apply(event)
    ledger.apply(
        replace(issued("000099-0000-0"), skipped_rows={"3": "too_long", "4": HOSTILE}),
        at("prompt.groups"),
    )
    ledger.apply(
        replace(issued("000099-0000-0"), skipped_rows={"3": "too_long", "5": "too_long"}),
        at("prompt.groups"),
    )
    report = build_report(
        run_config(tmp_path),
        state,
        ledger,
        wall_seconds=1.0,
        succeeded=True,
        reason="",
        ended_at=int(END_SECONDS * 1e6),
    )
    rows = [
        (row["policy_version"], row["dataset"], row["reward_mean"]) for row in report["evaluations"]
    ]
    assert rows == [
        (0, "b", None),
        (2, "a", 0.25),
        (2, "b", 0.5),
    ]  # an evaluation that is reported twice counts once
    assert report["evaluations"][0]["pass_at_k"] == {"2": 0.75}
    assert report["prompts_skipped"] == {HOSTILE: 1, "too_long": 2}
    assert json.loads(json.dumps(report["evaluations"])) == report["evaluations"]
