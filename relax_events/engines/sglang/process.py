"""Start, watch and kill a server process; it ends with the worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.confinement.variables import build_child_environment
from relax_events.engines.sglang import launch as serve
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded.ports import HOST, choose_port
from relax_events.model_folder.tensors import list_weight_files
from relax_events.planning.inventory import num_threads
from relax_events.runtime.device_turn import turn_files

MEMORY = Path("/dev/shm")  # noqa: S108 holds the weights of a version, if they fit into memory
MODELS_IN_MEMORY = 3.0
"""Models that must fit into memory: the served version, the next one, and a reserve."""
LOG_NAME = "server.log"
LOG_TAIL_BYTES = 4000
SERVER_PREFIXES = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "SGLANG_",
    "SGL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "FLASHINFER_",
)
"""Prefixes of environment variables passed to a server."""
CONTEXT_MARGIN = 16
"""Tokens of context that a server needs in addition to a request's tokens."""


class ServerProcess:
    """One server at a time. Its log is in `folder`, which is deleted when both server and worker
    have ended.
    """

    def __init__(
        self, model: ModelFolder, folder: Path, *, config: EngineConfig, settings: ModelConfig
    ) -> None:
        self._model, self._config, self._settings, self._folder = model, config, settings, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory: set[Path] = set()
        self._port = choose_port()
        self.url = f"http://{HOST}:{self._port}"

    def start(self, path: Path, *, name: str) -> None:
        """Start a server on a folder of weights; it reports `name` with its tokens. It is not ready
        yet.

        Raises:
            EnvironmentProblem: The interpreter can't be run.
        """
        python = self._config.sglang.python or sys.executable
        self._temporary = Path(mkdtemp(prefix="relax-sglang-"))
        command = [
            python,
            "-P",
            serve.__file__,
            str(self._folder),
            str(self._temporary),
            *self._arguments(path, name),
        ]
        try:
            with (self._folder / LOG_NAME).open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=self._environment(),
                    pass_fds=turn_files(),
                )
        except OSError as error:
            self._temporary.rmdir()
            raise EnvironmentProblem(
                f"engine.sglang.python = {python!r} can't be run: {error}; set it to an "
                "interpreter that has SGLang"
            ) from error

    def describe_exit(self) -> str | None:
        """Describe how the server ended, with the end of its log; None while it runs."""
        assert self._process is not None
        code = self._process.poll()
        return (
            None
            if code is None
            else f"the SGLang server ended with code {code}; the end of its log:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        return (self._folder / LOG_NAME).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def record_shared_memory(self) -> None:
        """Record the shared memory of a ready server, so that it can be deleted even if another
        process kills the server.
        """
        assert self._process is not None
        self._shared_memory |= serve.find_shared_memory(self._process.pid)

    def kill(self) -> None:
        """Kill the server with all its processes, and delete its temporary files and shared
        memory.
        """
        if self._process is not None:
            self.record_shared_memory()
            serve.kill_processes(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None
            shutil.rmtree(self._temporary, ignore_errors=True)
            while self._shared_memory:
                self._shared_memory.pop().unlink(missing_ok=True)

    def _arguments(self, path: Path, name: str) -> Sequence[str]:
        config = self._config
        limit = config.max_context_tokens + CONTEXT_MARGIN
        model_limit = self._model.max_context_tokens
        flags = {
            "--model-path": path,
            "--weight-version": name,
            "--host": HOST,
            "--port": self._port,
            "--dtype": self._settings.dtype,
            "--context-length": min(limit, model_limit) if model_limit else limit,
            "--max-running-requests": config.max_running_samples,
            "--max-total-tokens": config.max_running_samples * limit,
            "--stream-interval": config.sglang.stream_interval_tokens,
            "--log-level": "warning",
        }
        switches = (
            "--incremental-streaming-output",
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--enable-metrics",
        )
        routing = ("--enable-return-routed-experts",) if self._settings.replays_routing else ()
        return [
            *(str(word) for flag in flags.items() for word in flag),
            *switches,
            *routing,
            *config.sglang.arguments,
        ]

    def _environment(self) -> dict[str, str]:
        variables = build_child_environment(prefixes=SERVER_PREFIXES)
        variables["OMP_NUM_THREADS"] = str(num_threads(self._config.threads))
        if self._settings.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables


def make_weights_folder(model: ModelFolder, config: SGLangConfig) -> Path:
    """Create the folder for a server's weights: in `weights_directory` if that is set, else in
    memory if there is room.
    """
    num_bytes = sum(file.stat().st_size for file in list_weight_files(model.path))
    has_room = (
        MEMORY.is_dir()
        and os.access(MEMORY, os.W_OK)
        and shutil.disk_usage(MEMORY).free > MODELS_IN_MEMORY * num_bytes * config.num_servers
    )
    return Path(
        mkdtemp(
            prefix="relax-sglang-", dir=config.weights_directory or (MEMORY if has_room else None)
        )
    )
