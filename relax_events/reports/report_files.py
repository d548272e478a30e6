"""Writes `report.json` of a run into its directory.

The fields; an unknown or not finite value is None:

run_id, succeeded, reason, num_steps: The run, whether it reached its goal of `num_steps` train
    steps, and why it ended.
verdict: What the run did as of its last step, because of which number: `state`, `text`, `remedy`,
    `runbook` and the `page` of the run that shows it; `name` and `values` for other languages.
ended_at: When this invocation ended, ISO 8601, UTC.
wall_seconds: How long this invocation took.
total_seconds: How long all invocations took together; a killed invocation counts up to its last
    train step.
steps: Distinct committed train steps over the run's whole life; `steps_of_session` of them were
    committed in this invocation.
policy_version: Newest published version; -1 before the first.
reward_first, reward_last: Mean reward over the samples of the first and of the newest train step.
reward_first_10, reward_last_10: Mean of the mean rewards of the first and of the newest 10 steps,
    or of as many as there are.
tokens_trained: Tokens of all trained samples, prompt and completion.
train_seconds: The sum of `curves.step_seconds`.
tokens_per_second, samples_per_second: Tokens and samples trained per second over the newest 20
    steps, as `relax status` and the page show them; the mean over the run is `tokens_trained /
    train_seconds`.
outcomes: Prompt groups: `issued` in all, by outcome (`trained`, `filtered`, `expired`,
    `failed`), and prompt groups `in_flight`.
prompt_groups_too_large: Of those that failed, those with a sample that did not fit the device
    of the trainer, or of a role that scores.
prompt_groups_issued_twice: Prompt groups that were issued again although no worker had lost them:
    generated twice, trained once.
samples_rolled_out, samples_trained: Distinct samples that were generated, and that were trained.
samples_foreign, records_unreadable: Records of unknown producers in the run's topics: samples of
    prompt groups that were never issued, and records that are no event.
samples_lost: Generated samples of a trained prompt group that no step trained.
samples_trained_twice: Samples that more than one step, or one step more than once, trained.
updates_skipped, updates_held: Train steps that made no update of the policy: loss or gradient was
    not finite, or only the critic learned (`critic.warmup_steps`).
rollouts_regenerated: Samples that were generated again after the first time, for example after a
    worker died.
staleness_mean, staleness_max, staleness_counts: Policy versions between a sample's oldest token and
the step that trained it, over
    all trained samples; `staleness_counts[k]` samples were k versions behind. `max_staleness` is
    the bound.
phase_seconds: Trainer's seconds by phase (rank 0), summed over all steps.
curves: Lists with one entry per step in order: `train_step`, every metric of the step (as the
    trainer committed it, floats exact), `staleness_max`, `step_seconds` (the sum of its phases) and
    `tokens_per_second`. `curves.phase_seconds` holds such a list for each phase. The critic's
    metrics are here too.
source: The parent of a replay or fork: its `run_id`, the `from_version`, and its `curves` at
    the same train steps, None at steps that it does not have. None for a run without a parent.
prompts_skipped: Rows of the prompt stream that were not issued, by reason.
evaluations: One for each version and dataset, oldest version first, as `PolicyEvaluated` has it,
    less the digests.
weights_digests: Digest of the weights that each step published, hexadecimal.
export_command: The command that exports the newest version as a model folder.
ledger_problems: Broken promises that the ledger found; an empty list is the proof.
config, config_digest: The run file as resolved, less the raw client settings; SHA-256 of it without
    the broker's address, so that equal digests mean equal runs. These are the last settings:
    `config_changes` has the earlier changes, and from which version on.
machine: The machine that wrote the report: cores, memory_bytes, python, platform.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

from relax_events.config import RunConfig
from relax_events.events.types import PolicyEvaluated, TrainStepCommitted
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState, max_sample_staleness
from relax_events.projections.run_view import read_alarm_settings
from relax_events.projections.step_rates import StepCurves, compute_rates
from relax_events.projections.verdict import decide_verdict
from relax_events.runtime.run_description import digest_config
from relax_events.secret_handling import write_private
from relax_events.session.broker_address import embedded_broker
from relax_events.session.resume import settings_history

DEFAULT_DIRECTORY = Path(".relax")
RUN_FILE = "RUN.toml"
"""Stands for the run file, which a secured cluster's password files make necessary."""

MICROS = 1e6
EDGE_STEPS = 10
SECRET_KEYS = {"broker": {"client"}}


def write_report(config: RunConfig, report: Mapping[str, Any]) -> None:
    """Write a report as `report.json` into the run's directory, atomically; an earlier one is
    replaced.
    """
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2)
    write_private(config.run_directory / "report.json", data)


def build_report(
    config: RunConfig,
    state: RunState,
    ledger: Ledger,
    *,
    wall_seconds: float,
    succeeded: bool,
    reason: str,
    ended_at: int,
    total_seconds: float | None = None,
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the report of a run; the module's docstring lists the fields.

    Args:
        config: The run, as it was started.
        state: The folded control log.
        ledger: Of the whole run.
        wall_seconds: See the module's docstring, as for `succeeded` and `reason`.
        succeeded: Whether the run's goal was reached.
        reason: Why it ended.
        ended_at: Microseconds since the epoch.
        total_seconds: See the module's docstring; None if this is the only invocation.
        source: Curves of the parent run.
    """
    steps = state.steps
    started_at = ended_at - int(wall_seconds * MICROS)
    curves, rates = step_curves(steps) | critic_curves(state), compute_rates(steps)
    return {
        "run_id": config.run.id,
        "succeeded": succeeded,
        "reason": reason,
        "verdict": asdict(decide_verdict(read_alarm_settings(config), state, now=ended_at)),
        "ended_at": datetime.fromtimestamp(ended_at / MICROS, UTC).isoformat(timespec="seconds"),
        "wall_seconds": wall_seconds,
        "total_seconds": wall_seconds if total_seconds is None else total_seconds,
        "steps_of_session": sum(step.committed_at >= started_at for step in steps),
        "num_steps": config.num_train_steps,
        "policy_version": state.policy_version,
        **reward_summary(curves["reward_mean"]),
        "tokens_trained": math.fsum(step.metrics.get("num_tokens", 0.0) for step in steps),
        "train_seconds": math.fsum(seconds or 0.0 for seconds in curves["step_seconds"]),
        "tokens_per_second": rates.tokens_per_second,
        "samples_per_second": rates.samples_per_second,
        **ledger.totals(),
        "max_staleness": ledger.max_staleness,
        "phase_seconds": {
            phase: math.fsum(seconds) for phase, seconds in curves["phase_seconds"].items()
        },
        "curves": curves,
        "source": source,
        "evaluations": evaluation_rows(state.evaluations.values()),
        "weights_digests": [step.weights_digest.hex() for step in steps],
        "export_command": build_export_command(config),
        "ledger_problems": ledger.problems(),
        "config": config.model_dump(mode="json", exclude=SECRET_KEYS),
        "config_digest": digest_config(config),
        "config_changes": _list_changes(config, state),
        "machine": machine(),
    }


def _list_changes(config: RunConfig, state: RunState) -> list[dict[str, Any]]:
    return [
        {"from_version": version, "changes": [str(change) for change in changes]}
        for version, changes in settings_history(state.descriptions, run_id=config.run.id)
    ]


def reward_summary(rewards: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean rewards of the first and the newest steps; see the module's docstring."""
    return {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "reward_first_10": mean(rewards[:EDGE_STEPS]),
        "reward_last_10": mean(rewards[-EDGE_STEPS:]),
    }


def evaluation_rows(evaluations: Iterable[PolicyEvaluated]) -> list[dict[str, Any]]:
    """Return evaluations as they are shown, by version and then by dataset."""
    rows = []
    for event in sorted(evaluations, key=lambda event: (event.policy_version, event.dataset)):
        row = asdict(event)
        for name in ("weights_digest", "reward_digest"):
            del row[name]
        rows.append(row)
    return rows


def step_curves(steps: Sequence[TrainStepCommitted]) -> dict[str, Any]:
    """Return the run's curves, one entry per step; see the module's docstring."""
    curves = StepCurves("d")
    for step in steps:
        curves.apply(step)
    curves.columns.pop("samples_per_second", None)
    missing = [None] * len(steps)
    return {
        "train_step": curves.steps.tolist(),
        **dict.fromkeys(("reward_mean", "step_seconds", "tokens_per_second"), missing),
        **{name: list(map(finite, column)) for name, column in curves.columns.items()},
        "staleness_max": [max_sample_staleness(step) for step in steps],
        "phase_seconds": {
            phase: [0.0 if math.isnan(seconds) else seconds for seconds in column]
            for phase, column in curves.phases.items()
        },
    }


def critic_curves(state: RunState) -> dict[str, Any]:
    """Return the critic's curves, one entry per train step, None for a step that it has not learned
    from; empty without a critic.
    """
    names = dict.fromkeys(name for metrics in state.critic_metrics.values() for name in metrics)
    return {
        name: [
            finite(state.critic_metrics.get(step.train_step, {}).get(name)) for step in state.steps
        ]
        for name in names
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None without a known value."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def finite(value: float | None) -> float | None:
    """Return a metric, or None if JSON can't hold it."""
    return value if value is not None and math.isfinite(value) else None


def machine() -> dict[str, str | int]:
    """Describe this machine."""
    return {
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def build_export_command(config: RunConfig) -> str:
    """Return the shell command that exports the newest version of a run, from the folder in which
    the run was started.

    Args:
        config: The run, with or without the broker's address filled in.
    """
    run_id, broker = config.run.id, config.broker
    words = ["relax", "models", "export", run_id, "--to", f"{run_id}-model"]
    if embedded_broker(config) is not None:
        if config.run.directory != DEFAULT_DIRECTORY:
            words += ["--directory", str(config.run.directory)]
    elif broker.credentials is None and not broker.client:
        words += ["--bootstrap-servers", broker.bootstrap_servers]
    else:
        words += ["--config", RUN_FILE]
    return shlex.join(words)
