"""The MLflow tracker, configured by MLFLOW_TRACKING_URI and MLflow's other variables."""

from __future__ import annotations

import os

from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics

VARIABLE = "MLFLOW_TRACKING_URI"
TAG = "relax.run_id"


class MLflowTracker:
    """Resumes the MLflow run that is tagged with our run's id, in the experiment named after the
    project.
    """

    remembers = True

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Find or create the MLflow run.

        Raises:
            ConfigError: No server is configured.
        """
        del memory
        if not os.environ.get(VARIABLE):
            raise ConfigError(
                f"the tracker 'mlflow' needs its server; set {VARIABLE}, for example to "
                "http://mlflow:5000"
            )
        self._client = MlflowClient()
        project = config.telemetry.tracker_project
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(project)
        )
        runs: list[Run] = self._client.search_runs(
            [experiment_id], f"tags.`{TAG}` = '{config.run.id}'", max_results=1
        )
        run = (
            runs[0]
            if runs
            else self._client.create_run(
                experiment_id, run_name=config.run.id, tags={TAG: config.run.id}
            )
        )
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")

    def write(self, step_metrics: StepMetrics) -> None:
        """Log the metrics of a step together, as `series/name`."""
        at_millis = step_metrics.at // 1000
        metrics = [
            Metric(f"{step_metrics.series}/{name}", value, at_millis, step_metrics.step)
            for name, value in step_metrics.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the MLflow run; a restarted metrics worker resumes it."""
        self._client.set_terminated(self._run_id)
