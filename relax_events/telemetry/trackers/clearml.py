"""The ClearML tracker, configured by clearml.conf or CLEARML_* variables; CLEARML_OFFLINE_MODE=1
keeps sessions on this machine.
"""

from __future__ import annotations

from clearml import Task

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics

FRAMEWORKS = (
    "matplotlib",
    "tensorflow",
    "tensorboard",
    "pytorch",
    "xgboost",
    "scikit",
    "fastai",
    "lightgbm",
    "hydra",
    "joblib",
    "tfdefines",
    "megengine",
    "catboost",
    "gradio",
)
NOTHING_AUTOMATIC = dict.fromkeys((*FRAMEWORKS, "detect_repository"), False)
"""With a plain False the repository is read all the same: its address, its uncommitted changes and
the installed packages, for which `close` waits up to five minutes."""


class ClearMLTracker:
    """Continues the task whose id an earlier process stored. Offline sessions can't be continued,
    so a new one receives all metrics.
    """

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Open the task without automatic logging of this process."""
        self.remembers = not Task.is_offline()
        task_id = memory.get_note("task_id") if self.remembers else ""
        self._task: Task = Task.init(
            project_name=config.telemetry.tracker_project,
            task_name=config.run.id,
            continue_last_task=task_id or False,
            reuse_last_task_id=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=NOTHING_AUTOMATIC,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        self._task.set_initial_iteration(0)  # otherwise a continued task adds its last iteration
        memory.set_note("task_id", self._task.id)

    def write(self, step_metrics: StepMetrics) -> None:
        """Report a scalar for each metric; the series is the plot's title."""
        logger = self._task.get_logger()
        for name, value in step_metrics.values.items():
            logger.report_scalar(
                title=step_metrics.series, series=name, value=value, iteration=step_metrics.step
            )

    def close(self) -> None:
        """Send pending metrics and close the task."""
        self._task.close()
