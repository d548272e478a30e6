"""Trains from Python: `train` starts `relax run` with a run file that it writes, and `Run` is a
handle to a run. Everything that it shows it reads from the run's log (ADR 95).
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from relax_events.config import RunConfig, load_run_config
from relax_events.errors import BrokerError, BrokerUnavailable, ConfigError, RelaxError, RunFailed
from relax_events.events.parts import MediaRef
from relax_events.events.types import TrainStepCommitted
from relax_events.history.live_run import RunFollower, stop_run
from relax_events.history.run_log import RunLog
from relax_events.history.samples.filter import SampleFilter
from relax_events.history.samples.reader import follow_samples, live_starts, read_samples
from relax_events.launcher.own_process import Process, start_module
from relax_events.launcher.run_file.python_arguments import format_value, write_run_file
from relax_events.projections.run_status import RunStatus
from relax_events.projections.run_view import RunView
from relax_events.projections.step_rates import RATES, compute_rates
from relax_events.reports.sample_export import build_row
from relax_events.reports.status import StatusReader
from relax_events.session.broker_address import attach as attach_broker
from relax_events.topics.names import TRAIN_STEPS

COMMAND = "relax_events.cli"
ERROR = "\nerror: "
TURN_SECONDS = 0.5
STOP_SECONDS = 600.0
CURVE_WIDTH, CURVE_HEIGHT = 320, 60
Row = dict[str, Any]
OnStep = Callable[[Row], object]


def train(
    *,
    model: str | Path | None = None,
    data: Any = None,
    reward: str | Callable[..., Any] | None = None,
    steps: int | None = None,
    run_id: str = "",
    directory: str | Path = ".relax",
    on_step: OnStep | None = None,
    accept_changes: bool = False,
    **settings: Any,
) -> Run:
    """Start `relax run` in a process of its own, and return a handle to the run.

    The run file is written into the run's folder, with the rows and the function that were passed
    as objects; `relax run` with it does the same run, also in production. A run that is there
    continues, if its rows and its reward are the same. The run drains when this process ends.

    Args:
        model: `model.path`: a folder in Hugging Face layout, or `hf:org/name`.
        data: Rows as dicts, a `datasets.Dataset`, the path of a file or a folder, or
            `data.source`.
        reward: `reward.function`, or a function: one that takes the completion, or one that takes
            `completions`, see the rewards' page.
        steps: `run.num_steps`.
        run_id: `run.id`; by default a new one from the time.
        directory: `run.directory`.
        on_step: Called with the row of each train step, by `wait` and by `follow_steps`.
        accept_changes: Continue a run also with settings that change what is trained from here on.
        settings: Further keys of the run file: by section, `trainer={"learning_rate": 1e-5}`, or
            dotted, `**{"trainer.learning_rate": 1e-5}`.
    Raises:
        ConfigError: A key, a value, the data or the reward is not allowed, or the run is there with
            others, or is running.
    """
    new_id = f"train-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    named = {
        "run.id": run_id or new_id,
        "run.directory": directory,
        "run.num_steps": steps,
        "model.path": model,
    }
    path = write_run_file(
        named | settings, data=data, reward=reward, accepts_changes=accept_changes
    )
    flags = ["--accept-changes"] if accept_changes else []
    return Run(path, on_step=on_step).start("run", [str(path), *flags])


def attach(run_file: str | Path, *, on_step: OnStep | None = None) -> Run:
    """Return a handle to a run that was started anywhere.

    Args:
        run_file: Of the run.
        on_step: As for `train`.
    Raises:
        ConfigError: The run file is missing or wrong.
    """
    load_run_config(Path(run_file))
    return Run(Path(run_file).resolve(), on_step=on_step)


class Run:
    """A handle to a run.

    Attributes:
        run_file: Its run file, for `relax run` and every other command.
    """

    def __init__(self, run_file: Path, *, on_step: OnStep | None = None) -> None:
        """Start and read nothing yet; see `train` and `attach`."""
        self.run_file, self._on_step = run_file, on_step
        self._process: Process | None = None
        self._output, self._output_start, self._shown_until = Path(), 0, 0
        self._broker = ExitStack()
        self._opened: RunConfig | None = None
        self._next_step = 0

    def start(self, command: str, arguments: list[str]) -> Run:
        """Start a command of `relax` with the run; it drains when this process ends."""
        name = f"relax-{command.replace(' ', '-')}.log"
        self._output = self.run_file.parent / "logs" / name
        self._output_start = self._output.stat().st_size if self._output.exists() else 0
        self._shown_until = self._output_start
        self._process = start_module(COMMAND, [*command.split(), *arguments], output=self._output)
        atexit.register(self._close, os.getpid())
        return self

    @property
    def run_id(self) -> str:
        """`run.id`."""
        return load_run_config(self.run_file).run.id

    @property
    def is_alive(self) -> bool:
        """Whether the process that this handle started runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def view(self) -> RunView | None:
        """The run as `relax status` shows it; None before it has a log."""
        try:
            with StatusReader(self._open()) as reader:
                return reader.read()
        except (BrokerError, ConfigError):
            return None

    def metrics(self) -> Row:
        """Return the row of the newest train step; empty before the first."""
        with self._open_log() as log, StatusReader(log.config) as reader, reader.lock:
            return build_step_row(reader.state.steps[-1]) if reader.state.steps else {}

    def steps(self) -> list[Row]:
        """Return a row for each train step so far: its number, its metrics and its rates."""
        with self._open_log() as log:
            events = log.read_control(TRAIN_STEPS, TrainStepCommitted)
            return [build_step_row(record.event) for record in events]

    def follow_steps(self) -> Iterator[Row]:
        """Yield the row of each train step, from the first one on, until the run ends."""
        for row in self._follow_steps():
            if row is not None:
                self._notify(row)
                yield row

    def samples(self, *, train_step: int | None = None) -> Iterator[Row]:
        """Yield the samples so far, oldest version first: prompt, completion, reward, outcome and
        all other columns of `relax samples --out`.

        Args:
            train_step: Only the samples of this train step.
        """
        with self._open_log() as log:
            for view in read_samples(log, SampleFilter(train_step=train_step)):
                yield build_row(view, newest_version=log.newest_version, save=_name_media)

    def follow_samples(self) -> Iterator[Row]:
        """Yield new samples as they are scored, without prompts, until the run ends."""
        with self._open_log() as log, self._watch_end() as has_ended:
            for line in follow_samples(log, SampleFilter(), live_starts(log), has_ended=has_ended):
                yield asdict(line)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run ends, and return this handle; print what `relax run` prints to stderr.

        An interrupt (Ctrl-C) drains the run, which `relax run` with the run file resumes.

        Args:
            timeout: Seconds.
        Raises:
            RunFailed: The run ended before its goal; the text is that of `relax run`.
            TimeoutError: It has not ended in time; it runs on.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        turns = self._follow_steps() if self._on_step or self._process is None else self._turns()
        try:
            for row in turns:
                self._show_output()
                if row is not None:
                    self._notify(row)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"run {self.run_id} has not ended after {timeout:g} s")
            if self._process is not None:
                self._process.wait()
        except KeyboardInterrupt:
            print("draining; press Ctrl-C again to leave the run to that", file=sys.stderr)
            self.stop()
            raise
        self._show_output()
        self._require_success()
        return self

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Drain the run, wherever it runs, and wait for it; `relax run` with the run file resumes
        it.

        Args:
            timeout: Seconds.
        Raises:
            TimeoutError: It has not drained in time.
        """
        if self._process is None:
            left = stop_run(self._open(), timeout_seconds=timeout).not_drained
            if left:
                raise TimeoutError(f"{', '.join(left)} did not drain within {timeout:g} s")
        elif self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the run did not drain within {timeout:g} s") from None

    def export(self, path: str | Path, **options: Any) -> Path:
        """Write the run's newest model as a folder, as `relax models export` does; return it.

        Args:
            path: The folder to write.
            options: Further options of the command, such as `version=3` or `merged=True`.
        Raises:
            RunFailed: The command failed; the text is its error.
        """
        flags = [_write_option(name, value) for name, value in options.items()]
        child = Run(self.run_file).start(
            "models export", [str(self.run_file), "--to", str(path), *flags]
        )
        child.wait()
        return Path(path)

    def fork(self, run_id: str, *, at_version: int = -1, **settings: Any) -> Run:
        """Start an independent run from this one's weights, as `relax runs fork` does.

        Args:
            run_id: The new run.
            at_version: The version to start from; -1 is the newest.
            settings: Other settings, as for `train`.
        """
        folder = load_run_config(self.run_file).run_directory.with_name(run_id)
        overrides = list(_list_overrides(settings))
        source = ["--at-version", str(at_version), "--config", str(self.run_file)]
        arguments = [self.run_id, run_id, *overrides, *source]
        return Run(folder / "run-file.json", on_step=self._on_step).start("runs fork", arguments)

    def _repr_html_(self) -> str:
        view = self.view
        if view is None:
            return f"<p>run <code>{escape(str(self.run_file))}</code>: no log yet</p>"
        reward = "" if view.reward is None else f", reward {view.reward:.3f}"
        text = f"run {view.run_id} {view.status}: step {view.step} of {view.num_steps}{reward}"
        return f"<p>{escape(text)}</p>{draw_curve(view.rewards)}"

    def _open(self) -> RunConfig:
        """Return the run's settings with the address of its broker, which stays up from now on.

        A broker that is down is started, unless the run does that.
        """
        if self._opened is None:
            self._opened = self._broker.enter_context(
                attach_broker(
                    load_run_config(self.run_file), by="python", brings_up=not self.is_alive
                )
            )
        return self._opened

    def _open_log(self) -> RunLog:
        """Open the run's log; wait for it while the run starts. Errors as for `_find_log`."""
        while (log := self._find_log()) is None:
            self._wait_turn()
        return log

    def _find_log(self) -> RunLog | None:
        """Open the run's log; return None where the run is about to start.

        Raises:
            RunFailed: The run has ended without a log.
        """
        was_alive = self.is_alive
        try:
            return RunLog(self._open(), name="python")
        except (BrokerUnavailable, ConfigError):
            if not was_alive:
                self._require_success()
                raise
        return None

    def _follow_steps(self) -> Iterator[Row | None]:
        """Yield the steps as they come, and None where nothing came for a turn."""
        with self._watch_end() as has_ended:
            is_over = has_ended()
            while (opened := self._find_log()) is None:
                self._wait_turn()
                yield None
            with opened as log:
                spans = log.full_ranges(TRAIN_STEPS, range(1))
                for record in log.read(spans, TrainStepCommitted):
                    yield build_step_row(record.event)
                if is_over:
                    return
                for message in log.follow({one: end for one, (_, end) in spans.items()}):
                    if message is None:
                        if is_over:
                            return
                        is_over = has_ended()
                        yield None
                    for event in () if message is None else log.decode_samples(message):
                        if isinstance(event, TrainStepCommitted):
                            yield build_step_row(event)

    def _turns(self) -> Iterator[None]:
        while self.is_alive:
            self._wait_turn()
            yield None

    def _wait_turn(self) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TURN_SECONDS)

    @contextmanager
    def _watch_end(self) -> Iterator[Callable[[], bool]]:
        """Give a function that says whether the run has ended: that the process of this handle has,
        or by the log that no worker of the run is alive.
        """
        if self._process is not None:
            yield lambda: not self.is_alive
            return
        with RunFollower(self._open(), name="python") as watch:

            def has_ended() -> bool:
                with watch.lock:
                    return watch.status is not RunStatus.RUNNING

            yield has_ended

    def _notify(self, row: Row) -> None:
        """Call `on_step`, once for each step."""
        if self._on_step is not None and row["train_step"] >= self._next_step:
            self._next_step = row["train_step"] + 1
            self._on_step(row)

    def _read_output(self, start: int) -> bytes:
        with self._output.open("rb") as file:
            file.seek(start)
            return file.read()

    def _show_output(self) -> None:
        """Show the whole lines that came since the last call."""
        if self._process is not None:
            lines, newline, _ = self._read_output(self._shown_until).rpartition(b"\n")
            sys.stderr.write((lines + newline).decode(errors="replace"))
            self._shown_until += len(lines) + len(newline)

    def _require_success(self) -> None:
        if self._process is not None:
            if code := self._process.poll():
                output = self._read_output(self._output_start).decode(errors="replace")
                text = f"\n{output}".rpartition(ERROR)[2].strip()
                raise RunFailed(text or f"relax run ended with exit code {code}")
        elif (view := self.view) is not None and not view.succeeded:
            reason = view.reason or f"{view.status} at step {view.step} of {view.num_steps}"
            raise RunFailed(f"run {view.run_id} ended before its goal: {reason}")

    def _close(self, pid: int) -> None:
        """Drain the run, and leave the broker, at the end of the process that started it."""
        if os.getpid() == pid:
            with suppress(RelaxError, TimeoutError):
                self.stop()
            self._broker.close()


def build_step_row(step: TrainStepCommitted) -> Row:
    """Return a train step's number, metrics and rates."""
    rates = asdict(compute_rates([step]))
    return {"train_step": step.train_step, **step.metrics} | {
        name: rates[name] for name in RATES if rates[name] is not None
    }


def draw_curve(values: tuple[float, ...]) -> str:
    """Return the curve of some values as SVG."""
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    points = " ".join(
        f"{CURVE_WIDTH * index / max(len(values) - 1, 1):.1f},"
        f"{CURVE_HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"
        for index, value in enumerate(values)
    )
    return (
        f'<svg viewBox="-2 -2 {CURVE_WIDTH + 4} {CURVE_HEIGHT + 4}" width="{CURVE_WIDTH}">'
        f"<title>mean reward, {low:.3g} to {high:.3g}</title>"
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
    )


def _name_media(media: MediaRef) -> str:
    return str(media)


def _list_overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _list_overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={format_value(value, name)}"


def _write_option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"
