"""An engine's servers that die, hang, load wrong weights or lose their parent: nothing hangs, and
no token comes from wrong weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_requests import (
    continued,
    finish,
    make_request,
    other_weights,
    plain_logprobs,
    tiny_model,
)
from sglang_servers import command_of, server_processes
from torch import Tensor

from relax_events.config import EngineConfig, ModelConfig, SamplingConfig, SGLangConfig
from relax_events.engines.replicas.replica import Replica
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.lifecycle import ServerLifecycle
from relax_events.engines.sglang.server import SGLangServer
from relax_events.errors import EngineFailed, EnvironmentProblem, WeightsError
from relax_events.events.parts import VersionSegment

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
LONG = 1500
"""Tokens that take a server some seconds."""
ORPHAN_PROGRAM = """
import sys
from pathlib import Path

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.sglang.engine import SGLangEngine

path = Path(sys.argv[1])
sglang = SGLangConfig(python=sys.argv[2], weights_directory=Path(sys.argv[3]))
config = EngineConfig(threads=1, max_running_samples=4, max_context_tokens=64, sglang=sglang)
engine = SGLangEngine(path, config=config, model=ModelConfig(dtype="float32", path=path))
print("ready", flush=True)
sys.stdin.read()
"""


def open_engine(python: str, directory: Path, **settings: Any) -> SGLangEngine:
    """Start a server of the engine's own."""
    path = tiny_model()
    server = SGLangConfig(python=python, weights_directory=directory, **settings)
    return SGLangEngine(
        path,
        config=EngineConfig(
            threads=1, max_running_samples=8, max_context_tokens=2048, sglang=server
        ),
        model=ModelConfig(dtype="float32", path=path),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server's weights and log."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def shared_engine(sglang_python: str, directory: Path) -> Iterator[SGLangEngine]:
    """Yield an engine whose server every test of the file may break."""
    engine = open_engine(sglang_python, directory, stall_seconds=40.0)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: SGLangEngine) -> SGLangEngine:
    """Return the engine with weights of a new version and no running samples."""
    shared_engine.abort()
    shared_engine.load_weights(other_weights(shared_engine.policy_version + 1)[0])
    return shared_engine


def begin(engine: SGLangEngine) -> dict[str, list[int]]:
    """Generate samples until some of their tokens have arrived, and return those."""
    request = make_request(1, num_samples=4, max_new_tokens=LONG)
    engine.submit(request)
    while True:
        assert engine.poll(timeout_seconds=0.3) == []
        partial = engine.abort()
        engine.submit(continued(request, partial))
        if all(len(sample.tokens) > 32 for sample in partial):
            return {sample.sample_id: sample.tokens.tolist() for sample in partial}


def check_whole(engine: SGLangEngine, begun: Mapping[str, list[int]]) -> None:
    """Finish what runs: every sample is whole, keeps its first tokens, and has the
    log-probabilities of the version that served."""
    samples, path = finish(engine), other_weights(0)[1]
    assert samples.keys() == begun.keys()
    for name, sample in samples.items():
        assert (len(sample.tokens), sample.error) == (LONG, "")
        assert sample.tokens[: len(begun[name])].tolist() == begun[name]
        assert sample.segments == (VersionSegment(engine.policy_version, LONG),)
        prompt = make_request(1).prompt_tokens
        np.testing.assert_allclose(
            sample.logprobs, plain_logprobs(prompt, sample.tokens, path=path), atol=1e-5
        )


@pytest.mark.parametrize("name", ["launch.py", "sglang::scheduler"])
def test_samples_continue_after_a_server_process_is_killed(
    engine: SGLangEngine, directory: Path, name: str
) -> None:
    begun = begin(engine)
    victims = server_processes(directory)
    next(victim for victim in victims if name in " ".join(command_of(victim))).kill()
    check_whole(engine, begun)
    assert not {victim.pid for victim in victims} & {
        process.pid for process in server_processes(directory)
    }


def test_samples_continue_after_the_server_hangs(engine: SGLangEngine, directory: Path) -> None:
    begun = begin(engine)
    for process in server_processes(directory):
        process.suspend()
    check_whole(engine, begun)


def test_engine_serves_the_old_version_after_truncated_weight_files(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ModelFolder.write_version

    def torn(model: ModelFolder, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        whole(model, tensors, folder)
        for file in folder.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size - 100)
        return folder

    begun = begin(engine)
    served = engine.policy_version
    weights, _ = other_weights(served + 1, seed=5)
    monkeypatch.setattr(ModelFolder, "write_version", torn)
    with pytest.raises(WeightsError, match=f"policy version {served + 1} is not served"):
        engine.load_weights(weights)
    monkeypatch.undo()
    assert engine.policy_version == served
    check_whole(engine, begun)


def test_engine_detects_that_the_server_loaded_wrong_weights(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ModelFolder.write_version

    def wrong(model: ModelFolder, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        name = "model.layers.1.self_attn.k_proj.weight"
        return whole(model, {**tensors, name: tensors[name] + 1e-6}, folder)

    begun = begin(engine)
    served = engine.policy_version
    weights, _ = other_weights(served + 1, seed=5)
    monkeypatch.setattr(ModelFolder, "write_version", wrong)
    with pytest.raises(
        WeightsError,
        match=r"the server has other values in model.layers.1.self_attn.qkv_proj.weight",
    ):
        engine.load_weights(weights)
    monkeypatch.undo()
    check_whole(engine, begun)


def test_engine_fails_after_repeated_server_crashes(engine: SGLangEngine, directory: Path) -> None:
    begin(engine)

    def kill_while_it_runs() -> None:
        while engine.poll(timeout_seconds=0.5) == []:
            for process in server_processes(directory):
                process.kill()

    with pytest.raises(
        EngineFailed, match="every engine was lost 4 times without a finished sample in between"
    ):
        kill_while_it_runs()


def await_servers(engine: SGLangEngine, count: int) -> None:
    """Wait until so many servers serve, while nothing runs."""
    pause = threading.Event()
    while len(engine._serving) < count:
        assert engine.poll(timeout_seconds=0.0) == []
        pause.wait(0.2)


def test_samples_of_a_killed_server_continue_on_the_other_server(
    sglang_python: str, tmp_path: Path
) -> None:
    engine = open_engine(sglang_python, tmp_path, num_servers=2)
    await_servers(engine, 2)
    weights, path = other_weights(1)
    engine.load_weights(weights)
    requests = [make_request(number, max_new_tokens=LONG) for number in range(4)]
    for request in requests:
        engine.submit(request)
    victim, other = sorted(engine._replicas, key=lambda member: member.num_samples, reverse=True)
    assert other.num_samples
    while victim.usage.num_generated < 1000:
        assert engine.poll(timeout_seconds=0.3) == []
    begun = {name: tokens for name, tokens in begun_in(victim).items() if tokens}
    assert begun
    process = lifecycle_of(victim)._process
    assert process is not None
    assert process._process is not None
    os.killpg(process._process.pid, signal.SIGKILL)
    samples = finish(engine)
    assert len(samples) == 8
    for request in requests:
        for sample in request.samples:
            whole = samples[sample.sample_id]
            kept = begun.get(sample.sample_id, [])
            assert whole.tokens[: len(kept)].tolist() == kept
            assert whole.segments == (VersionSegment(1, LONG),)
            np.testing.assert_allclose(
                whole.logprobs,
                plain_logprobs(request.prompt_tokens, whole.tokens, path=path),
                atol=1e-5,
            )
    await_servers(engine, 2)
    for request in requests:
        engine.submit(replace(request, sampling=SamplingConfig(max_new_tokens=20)))
    assert {sample.segments for sample in finish(engine).values()} == {(VersionSegment(1, 20),)}
    engine.close()
    assert server_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def lifecycle_of(member: Replica) -> ServerLifecycle:
    """Return the server lifecycle of a replica."""
    server = member._engine
    assert isinstance(server, SGLangServer)
    return server._lifecycle


def begun_in(member: Replica) -> dict[str, list[int]]:
    """Return the received tokens of each sample of a replica."""
    requests = lifecycle_of(member).generation._requests.values()
    return {
        request.sample.sample_id: [*request.sample.tokens.tolist(), *request.tokens]
        for request in requests
    }


def test_server_exits_when_the_worker_that_started_it_is_killed(
    sglang_python: str, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        ORPHAN_PROGRAM,
        str(tiny_model()),
        sglang_python,
        str(tmp_path),
    ]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdin is not None
    assert worker.stdout.readline() == "ready\n"
    processes = server_processes(tmp_path)
    assert len(processes) >= 2
    worker.send_signal(signal.SIGKILL)
    worker.wait(60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    worker.stdin.close()
    worker.stdout.close()
    assert alive == []
    assert list(tmp_path.iterdir()) == []


def test_server_that_fails_to_start_reports_the_reason(sglang_python: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"(?s)ended with code \d.*--no-such-flag"):
        open_engine(sglang_python, tmp_path, arguments=("--no-such-flag",))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EnvironmentProblem, match=r"has no sglang; install relax-events\[sglang\]"):
        open_engine(str(Path(sys.base_prefix) / "bin" / "python3"), tmp_path)
    with pytest.raises(EnvironmentProblem, match="'no-python' can't be run"):
        open_engine("no-python", tmp_path)
