"""The Weights & Biases tracker, configured by WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL and
WANDB_MODE.
"""

from __future__ import annotations

import wandb

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics

INIT_SECONDS = 60.0


class WandbTracker:
    """Resumes the W&B run with our run's id. Each series has its own axis, because series advance
    independently.
    """

    remembers = True

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Open the run without automatic logging of this machine."""
        del memory
        config.run_directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        folder, project = str(config.run_directory), config.telemetry.tracker_project
        self._run = wandb.init(
            project=project,
            id=config.run.id,
            name=config.run.id,
            resume="allow",
            dir=folder,
            settings=settings,
        )
        self._series: set[str] = set()

    def write(self, step_metrics: StepMetrics) -> None:
        """Log the metrics as `series/name`, over `series/step`."""
        axis = f"{step_metrics.series}/step"
        if step_metrics.series not in self._series:
            self._series.add(step_metrics.series)
            self._run.define_metric(axis)
            self._run.define_metric(f"{step_metrics.series}/*", step_metric=axis)
        self._run.log(
            {
                axis: step_metrics.step,
                **{
                    f"{step_metrics.series}/{name}": value
                    for name, value in step_metrics.values.items()
                },
            }
        )

    def close(self) -> None:
        """Send pending metrics and finish the run."""
        self._run.finish()
