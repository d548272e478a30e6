"""The other hosts of a run, as its first host sees them. A command such as ssh starts a supervisor
on each, whose stdin and stdout are the connection.

The first host sends the resolved run file, then a line every few seconds. A supervisor whose stdin
ends, or is silent for `SILENCE_SECONDS`, drains its workers and ends. When it or its connection
ends, the first host starts it again: a lost host costs its own workers alone.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import orjson
import structlog

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.config.devices import HOST, HostsConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.own_process import Process, start_command
from relax_events.session.gpus import find_gpus

log = structlog.get_logger()
MODULE = "relax_events.launcher.joined_host"
PROBE = "--probe"
ALIVE_SECONDS, SILENCE_SECONDS = 5.0, 60.0
"""How often the first host sends a line, and how long another host waits for the next one."""
AGAIN_SECONDS, MAX_AGAIN_SECONDS = 5.0, 60.0
"""Delay of another attempt to start a supervisor: of the first, and of those after many."""
JOINED = "relax-events: this host has joined"
"""The line of a supervisor that has started its workers."""
CLOCK = "clock"
PROBE_SECONDS, MAX_SKEW_SECONDS = 60.0, 5.0
"""Deadline of a host's answer; difference of clocks from which on times on the log mislead."""
END_SECONDS = 10.0
PASSED_ON = ("GLOO_", "NCCL_")
"""Begin the names of variables that the other hosts take over: which interfaces ranks use."""
Report = Callable[[str], None]


def build_command(hosts: HostsConfig, address: str, *arguments: str) -> list[str]:
    """Return the command that runs this package's supervisor on another host, in the folder that
    is this process's.
    """
    words = ["exec", sys.executable, "-m", MODULE, *arguments]
    line = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
    return [*(word.replace(HOST, address) for word in hosts.command), line]


def check_hosts(run: CheckedRun) -> str:
    """Return what the other hosts have in common with this one.

    Raises:
        EnvironmentProblem: One can't be reached, or has another release, Python, number of GPUs or
            time; the text names the host and the remedy.
    """
    hosts = run.config.hosts
    if not (others := hosts.addresses[1:]):
        return "this machine alone: hosts.addresses is empty"
    mine, started = describe_host(), time.time()
    answers = _probe(hosts, others)
    for address, answer in answers.items():
        for what, value in mine.items():
            if what != CLOCK and answer.get(what) != value:
                raise EnvironmentProblem(
                    f"host {address} has {what} {answer.get(what)}, and this one {value}; all "
                    "hosts of a run need the same"
                )
        skew = max(started - answer[CLOCK], answer[CLOCK] - time.time())
        if skew > MAX_SKEW_SECONDS:
            raise EnvironmentProblem(
                f"the clock of host {address} is {skew:.0f} s off this one's; set both by NTP"
            )
    listed = ", ".join(f"{what} {value}" for what, value in mine.items() if what != CLOCK)
    return f"{', '.join(others)} can be reached, and have {listed}"


def describe_host() -> dict[str, Any]:
    """Return what hosts must have in common, and the time, in seconds since the epoch."""
    return {
        "relax-events": __version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "GPUs": len(find_gpus()),
        CLOCK: time.time(),
    }


def _probe(hosts: HostsConfig, addresses: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what hosts answer; they are asked at the same time."""
    with ExitStack() as stack:
        probes = {}
        for address in addresses:
            probes[address] = _start(hosts, build_command(hosts, address, PROBE))
            stack.callback(_end, probes[address])
        deadline = time.monotonic() + PROBE_SECONDS
        return {
            address: _read_answer(address, process, seconds=deadline - time.monotonic())
            for address, process in probes.items()
        }


def _start(hosts: HostsConfig, command: Sequence[str]) -> Process:
    try:
        return start_command(command)
    except OSError as error:
        raise EnvironmentProblem(
            f"hosts.command = {list(hosts.command)} can't be started on this machine ({error}); "
            "install the program, or set hosts.command to another"
        ) from error


def _end(process: Process) -> None:
    """Kill a command that still runs, and read what it has left."""
    if process.returncode is None:
        process.kill()
        with suppress(TimeoutExpired):
            process.communicate(timeout=END_SECONDS)


def _read_answer(address: str, process: Process, *, seconds: float) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=max(seconds, 0.1))
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
    except TimeoutExpired:
        last = f"no answer within {PROBE_SECONDS:g} s"
    with suppress(orjson.JSONDecodeError):
        answer = orjson.loads(last)
        if isinstance(answer, dict) and CLOCK in answer:
            return answer
    raise EnvironmentProblem(
        f"host {address} can't run relax-events by hosts.command: {last or 'no output'}; it needs "
        f"the folder {Path.cwd()} and the program {sys.executable}, as this one has"
    )


class OtherHost:
    """One other host: its supervisor's connection, which is started again when it ends."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        report: Report,
        *,
        num_gpus: int = 0,
        num_steps: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            config: The resolved run; it names files of secrets, and has none.
            index: Of the host in `hosts.addresses`.
            report: Called with each line that it prints; before it has joined, once with each.
            num_gpus: Of this machine.
            num_steps: Committed train steps when this session began.
        """
        self._hosts = config.hosts
        self.address = config.hosts.addresses[index]
        self._command = build_command(config.hosts, self.address)
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)
        }
        order = {
            "host": index,
            "num_gpus": num_gpus,
            "num_steps": num_steps,
            "variables": variables,
            "config": config.model_dump(mode="json"),
        }
        self._order = orjson.dumps(order) + b"\n"
        self._report = report
        self._process: Process | None = None
        self._reader: threading.Thread | None = None
        self._last_line, self._unsent = "", b""
        self._has_joined = False
        self._reported: set[str] = set()
        self._start_after = self._alive_at = self._delay = 0.0

    def tend(self, now: float) -> None:
        """Start the supervisor where it does not run, and let it know that this host is there.

        Args:
            now: Monotonic seconds.
        Raises:
            ConfigError: It ended with an error that a restart won't fix, and has never joined.
            EnvironmentProblem: The command can't be started, and the host has never joined.
        """
        if self._process is None:
            if now >= self._start_after:
                self._try_to_start(now)
            return
        if (code := self._process.poll()) is None:
            if now - self._alive_at >= ALIVE_SECONDS:
                self._alive_at = now
                self._unsent = self._unsent or b"\n"
            self._send()
            return
        self._close(self._process)
        if code == ConfigError.exit_code and not self._has_joined:
            raise ConfigError(f"host {self.address} can't continue: {self._last_line}")
        self._delay_start(now, f"its supervisor ended with exit code {code}")

    def _try_to_start(self, now: float) -> None:
        try:
            self._start()
        except EnvironmentProblem as error:
            if not self._has_joined:
                raise
            self._delay_start(now, str(error))

    def _delay_start(self, now: float, reason: str) -> None:
        """Start the supervisor again, later from attempt to attempt until it has joined."""
        self._delay = min(2 * self._delay or AGAIN_SECONDS, MAX_AGAIN_SECONDS)
        self._start_after = now + self._delay
        log.warning(
            "host.lost",
            host=self.address,
            reason=reason,
            error=self._last_line,
            restart_in_seconds=self._delay,
        )
        self._report_once(f"host {self.address}: {reason}; it is started again")

    def _report_once(self, text: str) -> None:
        """Report a line that no attempt before this one brought, since the host was last there."""
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def drain(self) -> None:
        """Let the supervisor drain its workers and end: its stdin ends."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the supervisor's connection, and cut it at the deadline."""
        if self._process is None:
            return
        try:
            self._process.wait(max(seconds, 0.0))
        except TimeoutExpired:
            log.warning("host.not_drained", host=self.address, seconds=seconds)
            self._process.kill()
            self._process.wait(END_SECONDS)
        self._close(self._process)

    def _close(self, process: Process) -> None:
        """Read the last lines of a connection that has ended."""
        self._process = None
        if self._reader is not None:
            self._reader.join(END_SECONDS)
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _start(self) -> None:
        self._last_line = ""
        self._process = process = _start(self._hosts, self._command)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        self._unsent = self._order
        self._send()
        self._reader = threading.Thread(
            target=self._read, args=(process,), name=f"host-{self.address}", daemon=True
        )
        self._reader.start()
        log.info("host.started", host=self.address)

    def _send(self) -> None:
        """Send what the pipe has room for; a connection that takes nothing counts as silent, and
        its end is seen later.
        """
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                while self._unsent:
                    size = os.write(self._process.stdin.fileno(), self._unsent)
                    self._unsent = self._unsent[size:]

    def _read(self, process: Process) -> None:
        if process.stdout is None:
            return
        is_there = False
        with process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").strip()
                if text == JOINED:
                    is_there = self._has_joined = True
                    self._delay = 0.0
                    self._reported.clear()
                    self._report(f"host {self.address} has joined")
                elif text:
                    self._last_line = text
                    report = self._report if is_there else self._report_once
                    report(f"host {self.address}: {text}")


class OtherHosts:
    """All other hosts of a run."""

    def __init__(self, config: RunConfig, report: Report, *, num_steps: int) -> None:
        """Start nothing yet; see `OtherHost`."""
        indices = range(1, config.hosts.num_hosts)
        num_gpus = len(find_gpus()) if indices else 0
        self._hosts = [
            OtherHost(config, index, report, num_gpus=num_gpus, num_steps=num_steps)
            for index in indices
        ]

    def tend(self) -> None:
        """Start supervisors that don't run; see `OtherHost.tend`."""
        for host in self._hosts:
            host.tend(time.monotonic())

    def drain(self) -> None:
        """Let all hosts drain at the same time."""
        for host in self._hosts:
            host.drain()

    def wait(self, seconds: float) -> None:
        """Wait until all have drained, and cut the others' connections."""
        deadline = time.monotonic() + seconds
        for host in self._hosts:
            host.wait(deadline - time.monotonic())
