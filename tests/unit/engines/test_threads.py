"""The number of CPU threads for `threads = 0`: one per processor, also in a worker whose
environment has `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.sglang.process import ServerProcess
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError
from relax_events.training.backend.determinism import make_deterministic

NOWHERE = Path("nowhere")
THREADS = pytest.mark.parametrize(("threads", "expected"), [(0, 3), (2, 2)])


@pytest.fixture(autouse=True)
def three_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the process have three processors and torch one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    yield
    torch.set_num_threads(before)


@THREADS
def test_trainer_and_scorers_use_the_configured_threads(threads: int, expected: int) -> None:
    make_deterministic(torch.device("cpu"), threads=threads)
    assert torch.get_num_threads() == expected


@THREADS
def test_transformers_engine_uses_the_configured_threads(threads: int, expected: int) -> None:
    with pytest.raises(ConfigError):
        TransformersEngine(
            NOWHERE,
            config=EngineConfig(threads=threads),
            model=ModelConfig(dtype="float32", path=NOWHERE),
        )
    assert torch.get_num_threads() == expected


@THREADS
def test_sglang_server_gets_the_configured_threads(
    threads: int, expected: int, tmp_path: Path
) -> None:
    model = ModelConfig(dtype="float32", path=tmp_path)
    server = ServerProcess.__new__(ServerProcess)
    server._config, server._settings = EngineConfig(threads=threads), model
    assert server._environment()["OMP_NUM_THREADS"] == str(expected)


def test_sglang_server_gets_the_variables_of_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("MY_SECRET", "x")
    server = ServerProcess.__new__(ServerProcess)
    server._config = EngineConfig()
    server._settings = ModelConfig(dtype="float32", path=tmp_path)
    environment = server._environment()
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "MY_SECRET" not in environment
