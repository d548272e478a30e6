"""Makes the mistakes that people make with the stack, and shows what they are told: `make
stack-misconfiguration`.

Each is one command on the stack's images and its broker, and has to end at once, with a text that
names the thing and the remedy.
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
from tests.stack.container_engine import ROOT, Engine, StackError, exit_code_of, open_engine
from tests.stack.images import Stopwatch, provide_images

RUN_FILE = "configs/quickstart.toml"
BOUND_SECONDS = 90.0
QUESTION = (
    "A mistake in the stack's settings or surroundings, one command each, and what the person "
    "who made it reads."
)
OVER_EXISTING, OVER_GPU = ROOT / "compose" / "existing-cluster.yml", ROOT / "compose" / "gpu.yml"
PROJECT = "relax-mistakes"
"""Apart from a stack that is up."""
CONTAINER_USER = 1000
ONCE = ("run", "--rm", "--no-deps", "-T")


@dataclass(frozen=True)
class Refusal:
    """What a command said when it failed, and after how many seconds."""

    text: str
    seconds: float


@dataclass(frozen=True)
class Mistake:
    """A command that must fail, and a pattern of what it must say."""

    name: str
    says: str
    make: Callable[[Engine, Path], Refusal]


def refused(engine: Engine, *words: str) -> Refusal:
    """Run a compose command that must fail, and return what it said.

    Raises:
        StackError: It did not.
    """
    started = time.monotonic()
    try:
        engine.compose(*words, seconds=BOUND_SECONDS)
    except StackError as error:
        return Refusal(
            str(error).partition("\n")[2], time.monotonic() - started
        )  # without the command itself
    raise StackError(f"{' '.join(words)} was accepted")


def with_more(engine: Engine, settings: dict[str, str], *overlays: Path) -> Engine:
    """Return the engine with further settings and overlays."""
    return Engine(engine.host, {**engine.settings, **settings}, [*engine.overlays, *overlays])


def a_port_is_taken(engine: Engine, folder: Path) -> Refusal:
    """Start Prometheus where something listens already."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"PROMETHEUS_PORT": str(server.getsockname()[1])}
        return refused(
            with_more(engine, port), "up", "--detach", "--no-deps", "--force-recreate", "prometheus"
        )


def a_volume_is_read_only(engine: Engine, folder: Path) -> Refusal:
    """Make the model where nothing can be written."""
    overlay = folder / "read-only.json"
    overlay.write_text(
        json.dumps({"services": {"model": {"volumes": [f"{folder}:/srv/relax/.relax:ro"]}}})
    )
    return refused(with_more(engine, {}, overlay), *ONCE, "model", "models", "prepare", RUN_FILE)


def with_secrets(
    password: str | None, *, authority: str = "-----BEGIN CERTIFICATE-----"
) -> Callable[[Engine, Path], Refusal]:
    """Return a mistake with the secrets of an existing cluster; None is a password that is not
    there.
    """

    def make(engine: Engine, folder: Path) -> Refusal:
        files = {"BROKER_PASSWORD_FILE": folder / "password", "BROKER_CA_FILE": folder / "ca.pem"}
        if password is not None:
            files["BROKER_PASSWORD_FILE"].write_text(password)
        files["BROKER_CA_FILE"].write_text(authority)
        for file in folder.iterdir():
            file.chmod(0o644)
        settings = {name: str(file) for name, file in files.items()}
        return refused(
            with_more(engine, settings, OVER_EXISTING), *ONCE, "relax", "topics", "plan", RUN_FILE
        )

    return make


def a_password_is_wrong(engine: Engine, folder: Path) -> Refusal:
    """Ask a secured broker with a password that is not the user's."""
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
    secured = with_more(
        engine, {"COMPOSE_PROJECT_NAME": f"{PROJECT}-secured"}, *security.glob("compose/*.json")
    )
    try:
        secured.compose("run", "--rm", "-T", "topics")
        (file,) = security.glob("secrets/*.operator")
        file.write_text("not the password")
        return refused(secured, *ONCE, "relax", "topics", "plan", RUN_FILE)
    finally:
        secured.compose("down", "--volumes")


MISTAKES = (
    Mistake("port taken", r"(address already in use|port is already allocated)", a_port_is_taken),
    Mistake("secret missing", r"password", with_secrets(None)),
    Mistake(
        "secret empty",
        r"broker\.password_file: /run/secrets/broker_password is empty; write the secret into it",
        with_secrets(""),
    ),
    Mistake(
        "authority that is none",
        r"broker\.ca_file: /run/secrets/broker_ca holds no certificate; give the PEM file",
        with_secrets("a password", authority="-"),
    ),
    Mistake(
        "password wrong",
        r"user .relax\.quickstart\.operator. was not let in; .* or knows another password",
        a_password_is_wrong,
    ),
    Mistake(
        "no broker",
        r"no broker answered at kafka-9:9092 within .*; start it, or set broker\.bootstrap_servers",
        lambda engine, folder: refused(
            engine,
            *ONCE,
            "-e",
            "RELAX_BROKER__BOOTSTRAP_SERVERS=kafka-9:9092",
            "relax",
            "topics",
            "plan",
            RUN_FILE,
        ),
    ),
    Mistake(
        "run file missing",
        r"configs/missing\.toml",
        lambda engine, folder: refused(
            engine, *ONCE, "relax", "topics", "plan", "configs/missing.toml"
        ),
    ),
    Mistake(
        "volume read-only",
        r"error: model folder \.relax/models can't be written: Read-only file system; give model\.path in one that can",
        a_volume_is_read_only,
    ),
    Mistake(
        "GPU asked of the image for a CPU",
        r"model\.device = 'cuda' asks for a GPU that is not here: .*; give the process one, or set model\.device = 'auto'",
        lambda engine, folder: refused(
            engine, *ONCE, "trainer", "worker", "trainer", RUN_FILE, "model.device=cuda"
        ),
    ),
    Mistake(
        "GPU asked of a machine without one",
        r"could not select device driver",
        lambda engine, folder: refused(
            with_more(engine, {}, OVER_GPU), *ONCE, "trainer", "worker", "trainer", RUN_FILE
        ),
    ),
)


def make_all() -> None:
    """Make every mistake, check what is said, and write the report.

    Raises:
        StackError: One did not fail, took too long, or said something else.
    """
    engine = open_engine()
    names = provide_images(engine, Stopwatch())
    engine.settings |= {"GPU_IMAGE": names["model"], "COMPOSE_PROJECT_NAME": PROJECT}
    try:
        engine.compose("run", "--rm", "-T", "topics")  # and the broker that it needs
        engine.compose(*ONCE, "model")
        rows = [_made(engine, mistake) for mistake in MISTAKES]
    finally:
        engine.compose("down", "--volumes")
    report.write(
        "stack-misconfiguration",
        title="Mistakes with the stack",
        question=QUESTION,
        command="python -m tests.stack.misconfiguration",
        conclusion=(
            f"All {len(rows)} are refused by name, none takes longer than "
            f"{max(float(row['seconds']) for row in rows):.0f} s."
        ),
        rows=rows,
        data={"mistakes": rows},
    )


def _made(engine: Engine, mistake: Mistake) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        refusal = mistake.make(engine, Path(folder))
    line = next((line for line in refusal.text.splitlines() if re.search(mistake.says, line)), None)
    if line is None:
        raise StackError(f"{mistake.name}: nothing said matches {mistake.says!r}:\n{refusal.text}")
    print(f"{mistake.name:<36}{refusal.seconds:6.1f} s  {line.strip()}", flush=True)
    return {
        "mistake": mistake.name,
        "what it says": line.strip().replace(folder, "FOLDER"),
        "seconds": f"{refusal.seconds:.1f}",
    }


def main() -> int:
    """Make them all."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    return exit_code_of(make_all)


if __name__ == "__main__":
    sys.exit(main())
