"""Named crash points: instants at which a process can be configured to kill or stop itself, so that
tests can break a run exactly there.

    RELAX_FAILPOINTS="reward.before_commit:3=kill,trainer.after_weights=stop"

This kills the process at the third pass of the first point, and stops it at the first pass of the
second.

An armed point fires once in a run, in any process. Before it fires it writes a marker file into the
run's folder, so that the restarted worker passes it. Without the variable a pass costs one lookup
in an empty table.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from relax_events.errors import ConfigError
from relax_events.topics.names import PER_SAMPLE_ROLES

log = structlog.get_logger()
VARIABLE = "RELAX_FAILPOINTS"
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ARMING = re.compile(r"(?P<name>[a-z_.-]+)(:(?P<nth_pass>[1-9][0-9]*))?=(?P<action>[a-z]+)")
EXAMPLE = f'for example {VARIABLE}="reward.before_commit:3=kill"'

SAMPLE_LOOP_POINTS = {
    "before_flush": "outputs are handed to the client, none is known to be safe",
    "before_commit": "outputs are acknowledged, the input offsets are not committed",
    "after_commit": "the commit of the input offsets is under way, no later input was read",
}
POINTS = {
    "prompter.after_claim": "the prompter has taken over, and not read what was issued",
    "prompter.before_issue": "prompt groups are due, the log was looked at, none is on the queue",
    "prompter.after_issue": "prompt groups are on the queue, the prompter has not recorded them",
    "rollout.before_load": "a version's tensors are fetched, the engine has the version before",
    "rollout.generating": "prompt groups are leased and half generated",
    "rollout.before_flush": "samples are handed to the client, none is known to be safe",
    "rollout.before_settle": "samples are acknowledged, their leases are open",
    **{
        f"{role}.{name}": text
        for role in PER_SAMPLE_ROLES
        for name, text in SAMPLE_LOOP_POINTS.items()
    },
    "judge.at_work": "samples are at the judge's engine, their input offsets are not committed",
    "critic.learning": "the critic is trained on a committed step, others may be left",
    "critic.out_of_memory": "a pass that learns did not fit, the gradients are not discarded",
    "scorer.out_of_memory": "a pass that scores did not fit, no half of it has run",
    "advantage.before_flush": "joined samples are handed to the client, none is known to be safe",
    "advantage.before_commit": (
        "joined samples are acknowledged, the input offsets are not committed"
    ),
    "advantage.handing_over": (
        "partitions are being taken away, offsets are committed, open joins are not dropped"
    ),
    "trainer.after_accumulate": "a step's gradients are complete, the weights are old",
    "trainer.out_of_memory": "a pass did not fit the device, the gradients are not discarded",
    "trainer.step_out_of_memory": "an optimizer step did not fit, its bound is not written",
    "trainer.after_optimizer_step": (
        "an optimizer step is done, others of the train step may be left"
    ),
    "weights.before_manifest": "a version's tensors are in the store, its manifest is not",
    "weights.broadcasting": (
        "a bucket of a version is being sent to an engine, its artifact may be incomplete"
    ),
    "weights.receiving": ("a bucket of a version has arrived, the engine has the version before"),
    "trainer.after_weights": "a version's artifact is complete, the step is not committed",
    "trainer.in_transaction": "the step and its offsets are in an open transaction",
    "trainer.after_commit": "the step is committed, its follow-up work is not done",
    "trainer.after_ends": (
        "ends of untrained prompt groups are committed, the assembler has not recorded them"
    ),
    "trainer.replaying": "a recorded step is trained again, others are left",
    "checkpoint.before_shard": "a checkpoint is copied, nothing of it is in the store",
    "checkpoint.before_manifest": "a checkpoint's shards are in the store, its manifest is not",
    "evaluator.before_load": "a version's tensors are fetched, the engine has the version before",
    "evaluator.generating": "a version is partly evaluated on a dataset",
    "evaluator.after_write": "an evaluation is on the log, the evaluator has not recorded it",
    "controller.before_command": "the controller has decided, no process has read it",
    "controller.after_command": "the command is on the log, the controller has not recorded it",
    "metrics.before_write": "metrics are received, they are not in the file",
}
"""Every point, with the state of the run there."""


@dataclass(slots=True)
class ArmedPoint:
    """A point that fires at its n-th pass in one process."""

    name: str
    nth_pass: int
    action: str
    num_passes: int = 0

    @property
    def mark_name(self) -> str:
        """Name of the marker file of a point that has fired."""
        return f"{self.name}:{self.nth_pass}"


@dataclass(slots=True)
class Failpoints:
    """The armed points of this process."""

    armed: dict[str, list[ArmedPoint]] = field(default_factory=dict)
    folder: Path = Path()

    def arm(self, text: str, *, folder: Path) -> None:
        """Replace the armed points by the points of the text.

        Args:
            text: `name[:n]=action,...`; empty disarms.
            folder: Folder of the marker files.
        Raises:
            ConfigError: A name, a count or an action is invalid; the text lists the valid ones.
        """
        self.armed, self.folder = {}, folder
        for point in parse_failpoints(text):
            self.armed.setdefault(point.name, []).append(point)

    def reach(self, name: str) -> None:
        """Fire the point if it is due and has not fired before in this run."""
        for point in self.armed.get(name, ()):
            point.num_passes += 1
            if point.num_passes == point.nth_pass and self._leave_mark(point):
                log.warning(
                    "failpoint.reached",
                    failpoint=name,
                    nth_pass=point.nth_pass,
                    action=point.action,
                )
                signal.pthread_kill(
                    threading.get_ident(), ACTIONS[point.action]
                )  # to this thread, which executes no further instruction

    def _leave_mark(self, point: ArmedPoint) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / point.mark_name).open("x") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True


_failpoints = Failpoints()


def failpoint(name: str) -> None:
    """Pass a point of `POINTS`; it does nothing unless the point is armed."""
    if _failpoints.armed:
        _failpoints.reach(name)


def arm_failpoints(run_directory: Path, environment: Mapping[str, str]) -> None:
    """Arm the points of the environment variable in this process.

    Raises:
        ConfigError: See `Failpoints.arm`.
    """
    _failpoints.arm(environment.get(VARIABLE, ""), folder=marks_folder(run_directory))


def marks_folder(run_directory: Path) -> Path:
    """Return the folder of a run's marker files; each holds the id of the process in which its
    point fired.
    """
    return run_directory / "failpoints"


def parse_failpoints(text: str) -> list[ArmedPoint]:
    """Parse the variable's text; raises as `Failpoints.arm`."""
    return [_parse_failpoint(part.strip()) for part in text.split(",") if part.strip()]


def _parse_failpoint(text: str) -> ArmedPoint:
    match = ARMING.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {text!r} is not of the form name=action or name:n=action with n >= "
            f"1; {EXAMPLE}"
        )
    name, action = match["name"], match["action"]
    if name not in POINTS:
        close = difflib.get_close_matches(name, POINTS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(POINTS)}"
        raise ConfigError(f"{VARIABLE}: there is no point {name!r}; {hint}")
    if action not in ACTIONS:
        raise ConfigError(
            f"{VARIABLE}: the action at {name} must be {' or '.join(ACTIONS)}, got "
            f"{action!r}; {EXAMPLE}"
        )
    return ArmedPoint(name, int(match["nth_pass"] or 1), action)
