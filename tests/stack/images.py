"""Provide the images of the stack: build ours; pull third-party images, or build them from Debian
packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from tests.stack.container_engine import (
    COMPOSE_FILE,
    ROOT,
    ContainerEngine,
    StackError,
    read_pins,
    run,
)

BASE_IMAGE = {**read_pins(), **os.environ}.get("BASE_IMAGE", "debian:bookworm-slim")
SUITE = "bookworm"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
OURS = {"light": "LIGHT_IMAGE", "model": "MODEL_IMAGE"}
OTHERS = {
    "kafka": "KAFKA_IMAGE",
    "prometheus": "PROMETHEUS_IMAGE",
    "alertmanager": "ALERTMANAGER_IMAGE",
}
DOCKERFILE = ROOT / "compose" / "Dockerfile"
BUILD_SECONDS = 1800.0
PULL_SECONDS = 300.0


class Stopwatch:
    """Measures the seconds of named steps, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Measure a block, and print its name."""
        print(f"{what} ...", flush=True)
        started = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - started


def image_names() -> dict[str, str]:
    """Return the image of each stand-in and of each of our targets in the compose file, by service
    or target.
    """
    services = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    named = {
        target: services["controller" if target == "light" else "trainer"]["image"]
        for target in OURS
    }
    named |= {service: services[service]["image"] for service in OTHERS}
    chosen = {**read_pins(), **os.environ}
    return {
        what: chosen.get(variable) or default_of(named[what])
        for what, variable in (OURS | OTHERS).items()
    }


def default_of(value: str) -> str:
    """Return the default of `${NAME:-default}`."""
    return value.partition(":-")[2].removesuffix("}")


def provide_images(engine: ContainerEngine, watch: Stopwatch) -> dict[str, str]:
    """Build or pull missing images, and return the image names by target; ours are always built,
    with the engine's cache.

    Raises:
        StackError: An image could neither be pulled nor built.
    """
    names = image_names()
    _provide(engine, BASE_IMAGE, lambda: _make_base(engine), watch)
    for target in OTHERS:
        _provide(
            engine, names[target], partial(_build_standin, engine, target, names[target]), watch
        )
    for target in OURS:
        with watch.measure(f"build {names[target]}"):
            _build(engine, ROOT, names[target], file=DOCKERFILE, target=target)
    for target, name in further_targets(engine.overlays).items():
        with watch.measure(f"build {name}"):
            _build(engine, ROOT, name, file=DOCKERFILE, target=target)
    return names


def further_targets(overlays: Iterable[Path]) -> dict[str, str]:
    """Return the images of the Dockerfile targets that only these overlays use, by target."""
    services = [
        service
        for file in overlays
        for service in yaml.safe_load(file.read_text())["services"].values()
    ]
    wanted = {
        service["build"]["target"]: default_of(service["image"])
        for service in services
        if "target" in service.get("build", {})
    }
    return {target: name for target, name in wanted.items() if target not in OURS}


def _provide(
    engine: ContainerEngine, name: str, make: Callable[[], None], watch: Stopwatch
) -> None:
    if engine.has_image(name):
        return
    with watch.measure(f"provide {name}"):
        try:
            engine.docker("pull", "--quiet", name, seconds=PULL_SECONDS)
        except StackError as error:
            if "@" in name:
                raise StackError(
                    f"{name} can't be pulled, and nothing made here has its digest; drop its "
                    f"line of compose/images.env: {error}"
                ) from error
            print(
                f"  {name} can't be pulled, so it is made here: {str(error).splitlines()[-1]}",
                flush=True,
            )
            make()


def _build(engine: ContainerEngine, context: Path, name: str, *, file: Path, target: str) -> None:
    network = ["--network", "host"]  # packages are fetched as this machine fetches them
    engine.docker(
        "build", *network, "--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "--file", str(file), "--target", target, "--tag", name, str(context),
        seconds=BUILD_SECONDS,
    )  # fmt: skip


def _build_standin(engine: ContainerEngine, target: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder) / "standins"
        shutil.copytree(ROOT / "compose" / "standins", context)
        lock = read_jar_lock()
        jars = context / "jars"
        jars.mkdir()
        for jar in ensure_jars(lock, locate_cache(lock)):
            shutil.copyfile(jar, jars / jar.name)  # readable by all, as those of the cache are not
        _build(engine, context, name, file=context / "Dockerfile", target=target)


def _make_base(engine: ContainerEngine) -> None:
    """Build the base image from Debian packages, with the CA certificates of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, folder],
            os.environ,
            seconds=BUILD_SECONDS,
        )
        if CA_BUNDLE.exists():
            shutil.copy(CA_BUNDLE, folder + str(CA_BUNDLE))
        with subprocess.Popen(
            ["tar", "--directory", folder, "--create", "."], stdout=subprocess.PIPE
        ) as archive:
            subprocess.run(
                ["docker", "import", "-", BASE_IMAGE],
                env=engine.environment,
                stdin=archive.stdout,
                check=True,
                timeout=BUILD_SECONDS,
            )
