"""Write the Grafana dashboards from the metrics: `python -m compose.grafana.generate`.

`--check` fails if a file is out of date. A panel is a title and a query; its description is the
metric's help text of docs/reference/metrics.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.config import RunConfig
from relax_events.controller.metrics import HealthMetrics, RunMetrics, ScaleMetrics
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.projections.health import HealthState
from relax_events.projections.run_state import RunState
from relax_events.projections.scaling import ScaleState
from relax_events.telemetry.metrics import ErrorMetrics, WorkerMetrics

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
RUN = 'run="$run"'
SOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Panel:
    """A graph. `legend` names a series by its labels; `unit` is Grafana's word for it."""

    title: str
    query: str
    legend: str = "{{run}}"
    unit: str = "short"

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics in the query."""
        return list(dict.fromkeys(re.findall(r"\brelax_\w+", self.query)))


def of_step(metric_name: str) -> str:
    """Return the query of a metric of the newest train step."""
    return f'relax_train_step_metric{{{RUN}, metric="{metric_name}"}}'


def quantile(q: float) -> str:
    """Return the query of a quantile of the duration of record batches, by role."""
    return (
        f"histogram_quantile({q}, sum by (role, le) "
        f"(rate(relax_record_batch_duration_seconds_bucket{{{RUN}}}[$__rate_interval])))"
    )


DASHBOARDS: dict[str, Sequence[Panel]] = {
    "Run overview": (
        Panel("Reward", of_step("reward_mean"), "mean reward"),
        Panel("Train steps", f"relax_train_steps_total{{{RUN}}}", "committed"),
        Panel(
            "Share of the goal",
            f"relax_train_steps_total{{{RUN}}} / relax_train_steps_target{{{RUN}}}",
            "done",
            "percentunit",
        ),
        Panel(
            "Train steps a minute",
            f"60 * rate(relax_train_steps_total{{{RUN}}}[$__rate_interval])",
            "steps",
        ),
        Panel(
            "Tokens a second",
            f"sum by (role) (rate(relax_tokens_total{{{RUN}}}[$__rate_interval]))",
            "{{role}}",
        ),
        Panel(
            "Live workers",
            f'sum by (role) (relax_workers{{{RUN}, state!~"silent|stopped"}})',
            "{{role}}",
        ),
        Panel(
            "Oldest sample of a step", f"relax_staleness_max_versions{{{RUN}}}", "versions behind"
        ),
        Panel(
            "Since the newest step",
            f"time() - relax_train_step_timestamp_seconds{{{RUN}}}",
            "seconds",
            "s",
        ),
        Panel("Steps since the checkpoint", f"relax_checkpoint_behind_steps{{{RUN}}}", "to replay"),
    ),
    "Pipeline": (
        Panel(
            "Unread records by role",
            f"sum by (role) (relax_consumer_lag_records{{{RUN}}})",
            "{{role}}",
        ),
        Panel(
            "Unread samples by slot",
            f'sum by (role, slot) (relax_consumer_lag_records{{{RUN}, topic="rollout.samples"}})',
            "{{role}} {{slot}}",
        ),
        Panel(
            "Waiting for the trainer, by slot",
            f'sum by (slot) (relax_consumer_lag_records{{{RUN}, role="trainer"}})',
            "slot {{slot}}",
        ),
        Panel(
            "Records finished a second",
            f"sum by (role) (rate(relax_records_processed_total{{{RUN}}}[$__rate_interval]))",
            "{{role}}",
        ),
        Panel("Records in work", f"sum by (role) (relax_records_in_flight{{{RUN}}})", "{{role}}"),
        Panel("Time of a record batch, median", quantile(0.5), "{{role}}", "s"),
        Panel("Time of a record batch, slowest in twenty", quantile(0.95), "{{role}}", "s"),
        Panel(
            "Expired records",
            f"sum by (role) (increase(relax_records_expired_total{{{RUN}}}[$__rate_interval]))",
            "{{role}}",
        ),
        Panel(
            "Dead letters",
            (
                "sum by (role, reason) "
                f"(increase(relax_dead_letters_total{{{RUN}}}[$__rate_interval]))"
            ),
            "{{role}} {{reason}}",
        ),
    ),
    "Learning": (
        Panel("Loss", of_step("loss"), "loss"),
        Panel("KL estimate", of_step("kl_estimate"), "kl"),
        Panel("Entropy", of_step("entropy"), "entropy"),
        Panel("Gradient norm", of_step("grad_norm"), "norm"),
        Panel("Clipped tokens", of_step("clip_fraction"), "share", "percentunit"),
        Panel("Tokens of a completion", of_step("completion_tokens_mean"), "mean"),
        Panel("Age of samples", of_step("staleness_mean"), "versions behind, mean"),
        Panel("Phases of a step", f"relax_train_step_phase_seconds{{{RUN}}}", "{{phase}}", "s"),
        Panel("Evaluations", f"relax_evaluation_reward_mean{{{RUN}}}", "{{dataset}}"),
    ),
    "Engines and weights": (
        Panel("Newest policy version", f"relax_published_policy_version{{{RUN}}}", "published"),
        Panel("Slowest engine", f"relax_engine_behind_versions{{{RUN}}}", "versions behind"),
        Panel(
            "Policy version by role", f"min by (role) (relax_policy_version{{{RUN}}})", "{{role}}"
        ),
        Panel(
            "Generated tokens a second",
            (
                f"sum by (instance) (rate(relax_tokens_total{{{RUN}, "
                f'role="rollout"}}[$__rate_interval]))'
            ),
            "{{instance}}",
        ),
        Panel(
            "Samples in engines",
            f"sum by (instance, state) (relax_engine_samples{{{RUN}}})",
            "{{instance}} {{state}}",
        ),
        Panel(
            "Room in engines",
            f"sum by (instance) (relax_engine_capacity_samples{{{RUN}}})",
            "{{instance}}",
        ),
        Panel(
            "How engines spend their time",
            (
                "sum by (instance, activity) "
                f"(rate(relax_engine_seconds_total{{{RUN}}}[$__rate_interval]))"
            ),
            "{{instance}} {{activity}}",
            "percentunit",
        ),
        Panel(
            "Tokens of engines a second",
            f"sum by (kind) (rate(relax_engine_tokens_total{{{RUN}}}[$__rate_interval]))",
            "{{kind}}",
        ),
        Panel(
            "Versions that engines refused",
            f"increase(relax_weight_load_failures_total{{{RUN}}}[$__rate_interval])",
            "{{instance}}",
        ),
        Panel(
            "Prompt groups in work",
            f'sum by (instance) (relax_records_in_flight{{{RUN}, role="rollout"}})',
            "{{instance}}",
        ),
        Panel(
            "Prompt groups that failed in a row",
            f"relax_prompt_groups_consecutive_failures{{{RUN}}}",
            "failed",
        ),
        Panel(
            "Weight sync that a step waits for",
            f'relax_train_step_phase_seconds{{{RUN}, phase="weights"}}',
            "exposed",
            "s",
        ),
        Panel(
            "From publication to serving, slowest in twenty",
            (
                "histogram_quantile(0.95, sum by (le) "
                f"(rate(relax_weights_delay_seconds_bucket{{{RUN}}}[$__rate_interval])))"
            ),
            "engines",
            "s",
        ),
        Panel(
            "Versions loaded, by how they came",
            f"sum by (transport) (increase(relax_weights_loaded_total{{{RUN}}}[$__rate_interval]))",
            "{{transport}}",
        ),
        Panel(
            "Engines that are sent versions",
            f'relax_weights_broadcast_engines{{{RUN}, role="trainer"}}',
            "engines",
        ),
        Panel(
            "Weights that arrived by broadcast",
            (
                f"sum by (transport) (rate(relax_weights_broadcast_bytes_total{{{RUN}, "
                f'role="rollout"}}[$__rate_interval]))'
            ),
            "{{transport}}",
            "Bps",
        ),
        Panel(
            "Broadcasts that failed",
            (
                "sum by (role, reason) "
                f"(increase(relax_weights_broadcast_failures_total{{{RUN}}}[$__rate_interval]))"
            ),
            "{{role}} {{reason}}",
        ),
        Panel("Workers that there shall be", f"relax_workers_desired{{{RUN}}}", "{{role}}"),
        Panel(
            "Requests to scale that are open",
            f"sum by (role, status) (relax_scale_requests_open{{{RUN}}})",
            "{{role}} {{status}}",
        ),
        Panel(
            "Requests to scale that ended",
            (
                "sum by (role, direction, status) "
                f"(increase(relax_scale_requests_total{{{RUN}}}[$__rate_interval]))"
            ),
            "{{role}} {{direction}} {{status}}",
        ),
    ),
    "Broker and health": (
        Panel("Unhealthy partitions", f"relax_partitions{{{RUN}}}", "{{state}}"),
        Panel("Prompt groups on the queue", f"relax_prompt_groups_queued{{{RUN}}}", "not finished"),
        Panel(
            "Unread records by topic",
            f"sum by (topic) (relax_consumer_lag_records{{{RUN}}})",
            "{{topic}}",
        ),
        Panel(
            "Errors that clients met",
            f"sum by (error) (increase(relax_broker_errors_total{{{RUN}}}[$__rate_interval]))",
            "{{error}}",
        ),
        Panel(
            "Calls of the object store that failed",
            f"sum by (role) (increase(relax_object_errors_total{{{RUN}}}[$__rate_interval]))",
            "{{role}}",
        ),
        Panel(
            "Free disk", f"relax_disk_free_ratio{{{RUN}}}", "of the run's directory", "percentunit"
        ),
        Panel(
            "Workers with which something is wrong",
            f"sum by (role, symptom) (relax_health_unhealthy_workers{{{RUN}}})",
            "{{role}} {{symptom}}",
        ),
        Panel(
            "Workers that started",
            f"sum by (role) (increase(relax_worker_starts_total{{{RUN}}}[$__rate_interval]))",
            "{{role}}",
        ),
        Panel(
            "Restores of the whole run",
            f"increase(relax_pipeline_restarts_total{{{RUN}}}[$__rate_interval])",
            "pipeline restarts",
        ),
    ),
}


def catalogue() -> dict[str, str]:
    """Return what each metric means, by its name as Prometheus knows it; histograms by that of
    their buckets.
    """
    tree = {
        "run": {"id": "documented"},
        "model": {"path": "model"},
        "data": {"source": "jsonl:rows"},
        "workers": {"drain_seconds": 20.0},
    }
    config = RunConfig.model_validate(tree)
    health = HealthMetrics(HealthState.from_config(config, own_id="controller-0"), config)
    worker = [
        *WorkerMetrics("trainer").registry.collect(),
        *ErrorMetrics("trainer", broker={}, objects={}, away_seconds=float).collect(),
    ]
    scaling = ScaleMetrics(ScaleState(), ScalingBounds.from_config(config, is_supervised=True))
    families = [
        *worker,
        *RunMetrics(config, RunState()).collect(),
        *health.collect(),
        *scaling.collect(),
    ]
    suffixes = {"counter": "_total", "histogram": "_bucket"}
    return {
        family.name + suffixes.get(family.type, ""): family.documentation for family in families
    }


def dashboard(title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Return a dashboard as Grafana reads it."""
    meaning = catalogue()
    return {
        "uid": file_name(title).removesuffix(".json"),
        "title": f"Relax Events: {title}",
        "tags": ["relax-events"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_run_variable()]},
        "panels": [
            _panel(panel, number, " ".join(meaning[name] for name in panel.metrics))
            for number, panel in enumerate(panels)
        ],
    }


def _run_variable() -> dict[str, Any]:
    query = {"query": "label_values(relax_run_ended, run)", "refId": "run"}
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
    }


def _panel(panel: Panel, number: int, description: str) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0 if panel.unit == "s" else None},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {"refId": "A", "datasource": SOURCE, "expr": panel.query, "legendFormat": panel.legend}
        ],
    }


def file_name(title: str) -> str:
    """Return the name of a dashboard's file."""
    return f"relax-{title.lower().replace(' ', '-')}.json"


def files() -> dict[str, str]:
    """Return the text of every dashboard by its file's name."""
    return {
        file_name(title): json.dumps(dashboard(title, panels), indent=1) + "\n"
        for title, panels in DASHBOARDS.items()
    }


def plain_query(panel: Panel, *, run: str, rate: str = "1m") -> str:
    """Return a panel's query with Grafana's own words put in, as Prometheus takes it."""
    return panel.query.replace("$run", run).replace("$__rate_interval", rate)


def main() -> int:
    """Write the files, or with `--check` name those that differ."""
    stale = [
        name
        for name, text in files().items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        print(
            "\n".join(
                f"{name} is out of date; run: python -m compose.grafana.generate" for name in stale
            )
            or "the dashboards are up to date"
        )
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(files()[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
