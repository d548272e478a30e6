"""Run the stack with typical misconfigurations, and check the error texts: `make
stack-misconfiguration`.

Each case is one command on the stack's images and its broker. It must fail quickly, with an error
that names the cause and the remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from tests.stack.container_engine import (
    ROOT,
    ContainerEngine,
    StackError,
    exit_code_of,
    open_container_engine,
)
from tests.stack.images import Stopwatch, provide_images

RUN_FILE = "configs/quickstart.toml"
BOUND_SECONDS = 90.0
QUESTION = (
    "Misconfigurations of the stack or its host, one command each, and the error that the "
    "user reads."
)
OVER_EXISTING, OVER_GPU = ROOT / "compose" / "existing-cluster.yml", ROOT / "compose" / "gpu.yml"
PROJECT = "relax-misconfiguration"
"""Separate from a stack that is up."""
CONTAINER_USER = 1000
ONCE = ("run", "--rm", "--no-deps", "-T")


@dataclass(frozen=True)
class Refusal:
    """The error text of a command, and the seconds until it failed."""

    text: str
    seconds: float


@dataclass(frozen=True)
class Misconfiguration:
    """A command that must fail, and a pattern of its error."""

    name: str
    says: str
    make: Callable[[ContainerEngine, Path], Refusal]


def run_refused(engine: ContainerEngine, *words: str) -> Refusal:
    """Run a compose command that must fail, and return its error.

    Raises:
        StackError: It succeeded.
    """
    started = time.monotonic()
    try:
        engine.compose(*words, seconds=BOUND_SECONDS)
    except StackError as error:
        return Refusal(
            str(error).partition("\n")[2], time.monotonic() - started
        )  # without the command itself
    raise StackError(f"{' '.join(words)} was accepted")


def extend_engine(
    engine: ContainerEngine, settings: dict[str, str], *overlays: Path
) -> ContainerEngine:
    """Return a copy of the engine with more settings and overlays."""
    return ContainerEngine(
        engine.host, {**engine.settings, **settings}, [*engine.overlays, *overlays]
    )


def use_taken_port(engine: ContainerEngine, folder: Path) -> Refusal:
    """Start Prometheus on a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"PROMETHEUS_PORT": str(server.getsockname()[1])}
        return run_refused(
            extend_engine(engine, port),
            "up",
            "--detach",
            "--no-deps",
            "--force-recreate",
            "prometheus",
        )


def use_read_only_volume(engine: ContainerEngine, folder: Path) -> Refusal:
    """Prepare the model on a read-only volume."""
    overlay = folder / "read-only.json"
    overlay.write_text(
        json.dumps({"services": {"model": {"volumes": [f"{folder}:/srv/relax/.relax:ro"]}}})
    )
    return run_refused(
        extend_engine(engine, {}, overlay), *ONCE, "model", "models", "prepare", RUN_FILE
    )


def build_secrets_case(
    password: str | None, *, authority: str = "-----BEGIN CERTIFICATE-----"
) -> Callable[[ContainerEngine, Path], Refusal]:
    """Build a case with the secrets of an existing cluster; None leaves the password file out."""

    def make(engine: ContainerEngine, folder: Path) -> Refusal:
        files = {"BROKER_PASSWORDS": folder, "BROKER_CA_FILE": folder / "ca.pem"}
        if password is not None:
            (folder / "relax.quickstart.operator").write_text(password)
        files["BROKER_CA_FILE"].write_text(authority)
        for file in folder.iterdir():
            file.chmod(0o644)
        settings = {name: str(file) for name, file in files.items()}
        return run_refused(
            extend_engine(engine, settings, OVER_EXISTING),
            *ONCE,
            "relax",
            "topics",
            "show",
            RUN_FILE,
        )

    return make


def use_wrong_password(engine: ContainerEngine, folder: Path) -> Refusal:
    """Connect to a secured broker with a wrong password."""
    security = folder / "security"
    command = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "broker",
        "secure",
        str(ROOT / RUN_FILE),
        "--out",
        str(security),
        "--hosts",
        "kafka",
    ]
    subprocess.run(command, check=True, timeout=BOUND_SECONDS, capture_output=True)
    for path in (security, *security.rglob("*")):
        os.chown(path, CONTAINER_USER, CONTAINER_USER)
    secured = extend_engine(
        engine, {"COMPOSE_PROJECT_NAME": f"{PROJECT}-secured"}, *security.glob("compose/*.json")
    )
    try:
        secured.compose("run", "--rm", "-T", "topics")
        (file,) = security.glob("secrets/*.operator")
        file.write_text("not the password")
        return run_refused(secured, *ONCE, "relax", "topics", "show", RUN_FILE)
    finally:
        secured.compose("down", "--volumes")


MISCONFIGURATIONS = (
    Misconfiguration(
        "port taken", r"(address already in use|port is already allocated)", use_taken_port
    ),
    Misconfiguration("secret missing", r"password", build_secrets_case(None)),
    Misconfiguration(
        "secret empty",
        r"broker\.password_file: /run/secrets/broker_password is empty; write the secret into it",
        build_secrets_case(""),
    ),
    Misconfiguration(
        "authority that is none",
        r"broker\.ca_file: /run/secrets/broker_ca holds no certificate; give the PEM file",
        build_secrets_case("a password", authority="-"),
    ),
    Misconfiguration(
        "password wrong",
        r"authentication of user .relax\.quickstart\.operator. failed; .* or has another password for it",
        use_wrong_password,
    ),
    Misconfiguration(
        "no broker",
        r"no broker answered at kafka-9:9092 within .*; start it, or set broker\.bootstrap_servers",
        lambda engine, folder: run_refused(
            engine,
            *ONCE,
            "-e",
            "RELAX_BROKER__BOOTSTRAP_SERVERS=kafka-9:9092",
            "relax",
            "topics",
            "show",
            RUN_FILE,
        ),
    ),
    Misconfiguration(
        "run file missing",
        r"configs/missing\.toml",
        lambda engine, folder: run_refused(
            engine, *ONCE, "relax", "topics", "show", "configs/missing.toml"
        ),
    ),
    Misconfiguration(
        "volume read-only",
        r"error: model folder \.relax/models can't be written: Read-only file system; set model\.path to a path in a writable folder",
        use_read_only_volume,
    ),
    Misconfiguration(
        "GPU asked of the image for a CPU",
        r"model\.device = 'cuda' asks for a GPU that is not available: .*; give the process a GPU, or set model\.device = 'auto'",
        lambda engine, folder: run_refused(
            engine, *ONCE, "trainer", "worker", "trainer", RUN_FILE, "model.device=cuda"
        ),
    ),
    Misconfiguration(
        "GPU asked of a machine without one",
        r"could not select device driver",
        lambda engine, folder: run_refused(
            extend_engine(engine, {}, OVER_GPU), *ONCE, "trainer", "worker", "trainer", RUN_FILE
        ),
    ),
)


def run_all() -> None:
    """Run every case, check its error message, and write the report.

    Raises:
        StackError: A command succeeded, took too long, or reported something else.
    """
    engine = open_container_engine()
    names = provide_images(engine, Stopwatch())
    engine.settings |= {"GPU_IMAGE": names["model"], "COMPOSE_PROJECT_NAME": PROJECT}
    try:
        engine.compose("run", "--rm", "-T", "topics")  # and the broker that it needs
        engine.compose(*ONCE, "model")
        rows = [_run_case(engine, case) for case in MISCONFIGURATIONS]
    finally:
        engine.compose("down", "--volumes")
    report.write(
        "stack-misconfiguration",
        title="Misconfigurations of the stack",
        question=QUESTION,
        command="python -m tests.stack.misconfiguration",
        conclusion=(
            f"All {len(rows)} are rejected with the cause; none takes longer than "
            f"{max(float(row['seconds']) for row in rows):.0f} s."
        ),
        rows=rows,
        data={"misconfigurations": rows},
    )


def _run_case(engine: ContainerEngine, case: Misconfiguration) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        refusal = case.make(engine, Path(folder))
    line = next((line for line in refusal.text.splitlines() if re.search(case.says, line)), None)
    if line is None:
        raise StackError(f"{case.name}: nothing said matches {case.says!r}:\n{refusal.text}")
    print(f"{case.name:<36}{refusal.seconds:6.1f} s  {line.strip()}", flush=True)
    return {
        "mistake": case.name,
        "what it says": line.strip().replace(folder, "FOLDER"),
        "seconds": f"{refusal.seconds:.1f}",
    }


def main() -> int:
    """Run all cases."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    return exit_code_of(run_all)


if __name__ == "__main__":
    sys.exit(main())
