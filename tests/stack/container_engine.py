"""Use the running container engine, or start a private one with its own socket, data and process
file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_events.kafka.embedded.jars import locate_cache, read_jar_lock

ROOT = Path(__file__).parents[2]
ENGINE = locate_cache(read_jar_lock()).parent / "engine"
COMPOSE_FILE = ROOT / "compose" / "docker-compose.yml"
PINS_FILE = ROOT / "compose" / "images.env"
START_SECONDS = 30.0
COMMAND_SECONDS = 600.0
PROJECT = "relax"


def read_pins(file: Path = PINS_FILE) -> dict[str, str]:
    """Return the images by digest that `make stack-pins` has written, by variable; empty if it has
    not.
    """
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


class StackError(Exception):
    """The engine or the stack failed in a way that a user can fix."""


@dataclass
class ContainerEngine:
    """Runs `docker` and compose. `settings` are environment variables of the compose file,
    `overlays` more compose files.
    """

    host: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    overlays: list[Path] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the commands; images are built by the classic builder, which every engine
        has.
        """
        own = {"DOCKER_HOST": self.host} if self.host else {}
        return {
            **read_pins(),
            **os.environ,
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_PROJECT_NAME": PROJECT,
            **own,
            **self.settings,
        }

    def docker(self, *words: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> str:
        """Run a docker command and return its stdout.

        Raises:
            StackError: It failed, or took longer than `seconds`; the text ends with its output.
        """
        return run(["docker", *words], self.environment, seconds=seconds, check=check)

    def compose(self, *words: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> str:
        """Run a compose command on the stack; see `docker`."""
        files = [word for file in (COMPOSE_FILE, *self.overlays) for word in ("--file", str(file))]
        return run(
            [*compose_command(), *files, *words], self.environment, seconds=seconds, check=check
        )

    def relax(self, *words: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> str:
        """Run a `relax` command in the stack."""
        return self.compose("run", "--rm", "-T", "relax", *words, seconds=seconds, check=check)

    def answers(self) -> bool:
        """Return whether an engine responds."""
        with suppress(StackError):
            self.docker("info", "--format", "{{.ServerVersion}}", seconds=10)
            return True
        return False

    def has_image(self, name: str) -> bool:
        """Return whether an image is present."""
        with suppress(StackError):
            self.docker("image", "inspect", "--format", "{{.Id}}", name, seconds=30)
            return True
        return False

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, those that have ended included."""
        labels = [
            f"label=com.docker.compose.project={PROJECT}",
            f"label=com.docker.compose.service={service}",
            "label=com.docker.compose.oneoff=False",
        ]
        return self.docker(
            "ps",
            "--all",
            "--quiet",
            *(word for label in labels for word in ("--filter", label)),
            seconds=30,
        ).split()

    def logs(self, container: str, *words: str) -> str:
        """Return the log of a container."""
        return run(["docker", "logs", *words, container], self.environment, seconds=60, merged=True)

    def state(self, container: str) -> dict[str, Any]:
        """Return the state of a container: Status, ExitCode, Pid, Health, ... ..."""
        state: dict[str, Any] = json.loads(
            self.docker("inspect", "--format", "{{json .State}}", container, seconds=30)
        )
        return state

    def networks(self, container: str) -> dict[str, dict[str, Any]]:
        """Return the networks of a container by name: IPAddress, Gateway, Aliases, ..."""
        networks: dict[str, dict[str, Any]] = json.loads(
            self.docker(
                "inspect", "--format", "{{json .NetworkSettings.Networks}}", container, seconds=30
            )
        )
        return networks


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    check: bool = True,
    merged: bool = False,
) -> str:
    """Run a command and return its stdout, with `merged` its stderr as well.

    Raises:
        StackError: It is not installed, failed, or took too long.
    """
    line = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise StackError(
            f"{command[0]} is not installed; Debian's packages are docker.io, docker-compose "
            "and debootstrap"
        ) from None
    except subprocess.TimeoutExpired:
        raise StackError(f"{line}: no end within {seconds:g} s") from None
    if check and done.returncode:
        raise StackError(
            f"{line}: exit code {done.returncode}\n{(done.stderr or done.stdout).strip()[-3000:]}"
        )
    return done.stdout


def exit_code_of(work: Callable[[], object]) -> int:
    """Run a command; a `StackError` is printed on stderr and returns 1."""
    try:
        work()
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compose_command() -> list[str]:
    """Return docker-compose, or the compose plugin if only that is installed."""
    return ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]


def open_container_engine() -> ContainerEngine:
    """Return a running engine, or start one.

    Raises:
        StackError: None runs and none can be started; the text says what is missing.
    """
    usual, own = ContainerEngine(), ContainerEngine(host=f"unix://{ENGINE / 'docker.sock'}")
    found = next((engine for engine in (usual, own) if engine.answers()), None)
    if found is not None:
        return found
    _start_daemon()
    deadline = time.monotonic() + START_SECONDS
    while not own.answers():
        if time.monotonic() > deadline:
            raise StackError(
                f"the container engine did not answer within {START_SECONDS:g} s; see "
                f"{ENGINE / 'log'}"
            )
        time.sleep(0.2)
    return own


def _start_daemon() -> None:
    if shutil.which("dockerd") is None:
        raise StackError(
            "no container engine answers and dockerd is not installed; install docker.io, "
            "docker-compose and debootstrap"
        )
    if os.geteuid():
        raise StackError(
            "no container engine answers, and only root can start one; start docker, or run "
            "this as root"
        )
    ENGINE.mkdir(parents=True, exist_ok=True)
    path_options = [
        "--data-root",
        str(ENGINE / "data"),
        "--exec-root",
        str(ENGINE / "exec"),
        "--pidfile",
        str(ENGINE / "pid"),
    ]
    with (ENGINE / "log").open("ab") as log:
        subprocess.Popen(
            ["dockerd", *path_options, "--host", f"unix://{ENGINE / 'docker.sock'}"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
