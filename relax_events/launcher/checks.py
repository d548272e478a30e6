"""The one list of checks of a run, by what they look at: the run file and what it names, this
machine, the broker and other services.

`relax run` refuses a run by the required checks of file and machine before it starts anything, and
by those of the broker once that answers; the doctor reports every check and starts nothing; `relax
plan` prints the parts of the check `devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from relax_events.config import RunConfig
from relax_events.controller.api_server import require_api_port
from relax_events.errors import ConfigError, RelaxError
from relax_events.launcher import broker_checks, file_checks, machine_checks
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.first_row import check_first_rows
from relax_events.launcher.other_hosts import check_hosts
from relax_events.planning.derived import Derived
from relax_events.telemetry.traces import require_tracing
from relax_events.telemetry.trackers import require_trackers


class Level(StrEnum):
    """What a check looks at; checks run in this order."""

    FILE = "file"
    MACHINE = "machine"
    BROKER = "broker"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a run.

    Attributes:
        name: Of its line in the doctor's report.
        level: What it looks at.
        describe: Returns a sentence about what is there; raises a RelaxError with the remedy.
        is_required: Whether `relax run` makes it before it starts anything, and refuses a run that
            fails it.
    """

    name: str
    level: Level
    describe: Callable[[CheckedRun], str]
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    is_good: bool
    text: str


CHECKS = (
    Check("roles", Level.FILE, file_checks.check_roles),
    Check("model", Level.FILE, file_checks.check_model),
    Check("teacher", Level.FILE, file_checks.check_teacher),
    Check("judge", Level.FILE, file_checks.check_judge),
    Check("tensors", Level.FILE, file_checks.check_tensors, is_required=False),
    Check("data", Level.FILE, file_checks.check_data),
    Check("first row", Level.FILE, check_first_rows, is_required=False),
    Check("room", Level.FILE, file_checks.check_context_length),
    Check("reward", Level.FILE, file_checks.check_reward, is_required=False),
    Check("folder", Level.MACHINE, machine_checks.check_folder),
    Check("disk", Level.MACHINE, machine_checks.check_disk, is_required=False),
    Check("hosts", Level.MACHINE, check_hosts),
    Check("metrics", Level.MACHINE, machine_checks.check_metrics_ports),
    Check("traces", Level.MACHINE, lambda run: require_tracing(run.config.telemetry.traces)),
    Check("trackers", Level.MACHINE, lambda run: require_trackers(run.config.telemetry)),
    Check("scaling API", Level.MACHINE, lambda run: require_api_port(run.config)),
    Check("harness", Level.MACHINE, machine_checks.check_harness_address),
    Check("walls", Level.MACHINE, machine_checks.check_walls, is_required=False),
    Check("devices", Level.MACHINE, machine_checks.check_devices, is_required=False),
    Check("broker", Level.BROKER, broker_checks.check_broker, is_required=False),
    Check("schema registry", Level.BROKER, broker_checks.check_registry, is_required=False),
    Check("object store", Level.BROKER, broker_checks.check_store, is_required=False),
    Check("weights", Level.BROKER, broker_checks.check_weights, is_required=False),
    Check("followers", Level.BROKER, broker_checks.check_dependent_runs, is_required=False),
)
"""In the order in which they are made. `relax run` asks the broker by the functions behind
`broker` and `weights`, with its own clients: `require_rollout_capacity` before it creates topics,
`require_fitting_model` once it has read the versions."""


def refuse_run(run: CheckedRun, *, levels: Collection[Level] = tuple(Level)) -> None:
    """Refuse a run that can't work, before anything starts.

    Args:
        run: The run.
        levels: Of the checks to make.
    Raises:
        ConfigError: The run file names a role, a model, a data file or a row that is missing or
            invalid.
        EnvironmentProblem: A package is not installed, or a port is taken.
    """
    for check in CHECKS:
        if check.is_required and check.level in levels:
            check.describe(run)


def check_run(config: RunConfig) -> tuple[list[Finding], list[Derived]]:
    """Make every check on a run file as it was read; a failed check does not stop the others.

    Returns:
        Findings, and the values derived for the keys that the run file leaves out.
    """
    try:
        settings, derived = CheckedRun(config).resolution
    except ConfigError as error:  # no other check is possible without the model
        return [Finding("model", False, str(error))], []
    run = CheckedRun(settings, is_thorough=True)
    return [_find(check, run) for check in CHECKS], derived


def _find(check: Check, run: CheckedRun) -> Finding:
    try:
        return Finding(check.name, True, check.describe(run))
    except ModuleNotFoundError as error:
        text = (
            f"not checked: {error.name} is not installed here; run relax doctor where the model "
            "runs too"
        )
        return Finding(check.name, True, text)
    except RelaxError as error:
        return Finding(check.name, False, str(error))
