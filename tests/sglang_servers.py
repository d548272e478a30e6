"""Real SGLang servers that tests start, and engines on servers that run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
from engine_requests import MakeEngine, tiny_model

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.protocol import Engine
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.process import ServerProcess

START_SECONDS = 600.0
BOUNDS: dict[str, Any] = {"max_running_samples": 16, "max_context_tokens": 512}


@contextmanager
def started_server(
    path: Path, folder: Path, *, python: str, arguments: tuple[str, ...] = ()
) -> Iterator[str]:
    """Start a server on a model, and give its address.

    Args:
        path: The model's folder.
        folder: For its files.
        python: Of the environment that SGLang is installed in.
        arguments: Further ones of the server's.
    """
    config = EngineConfig(
        threads=1, **BOUNDS, sglang=SGLangConfig(python=python, arguments=arguments)
    )
    process = ServerProcess(
        ModelFolder.read(path),
        folder,
        config=config,
        settings=ModelConfig(dtype="float32", path=path),
    )
    process.start(path, name="session")
    try:
        await_ready(process)
        process.record_shared_memory()
        yield process.url
    finally:
        process.kill()


@contextmanager
def engines_at(
    url: str, *, path: Path | None = None, **model_settings: Any
) -> Iterator[MakeEngine]:
    """Yield a maker of engines that attach to a server, and close them.

    Args:
        url: The server's.
        path: The model's folder where a caller gives none; a tiny one of the tests'.
        model_settings: Further keys of the section `model`.
    """
    engines: list[SGLangEngine] = []

    def make(model: Path | None = None, **settings: Any) -> Engine:
        folder = model or path or tiny_model()
        config = EngineConfig(
            **{"threads": 1} | BOUNDS | settings, sglang=SGLangConfig(urls=(url,))
        )
        engines.append(
            SGLangEngine(
                folder,
                config=config,
                model=ModelConfig(dtype="float32", path=folder, **model_settings),
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.abort()
        engine.close()


def await_ready(process: ServerProcess) -> None:
    """Wait until a server takes requests."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (ending := process.describe_exit()) is not None:
            raise AssertionError(ending)
        try:
            if httpx2.get(f"{process.url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass
    raise AssertionError(f"not ready within {START_SECONDS:g} s: {process.log_tail()}")


def server_processes(directory: Path) -> list[psutil.Process]:
    """Find all processes of the servers that write into a folder."""
    commands = {one: " ".join(command_of(one)) for one in psutil.process_iter()}
    mains = [
        one
        for one, command in commands.items()
        if "launch.py" in command and str(directory) in command
    ]
    return [process for main in mains for process in (main, *main.children(recursive=True))]


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; none of one that has ended."""
    try:
        command: list[str] = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []
    return command
