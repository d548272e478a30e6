"""A server of the worker's own that releases its memory while the trainer works, and takes it again:
it serves the version that it had, or the next one, and one that died is not replaced before.

On a CPU the server keeps its memory; the calls and their order are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import structlog
from engine_requests import finish, make_request, other_weights, plain_logprobs, tiny_model
from sglang_servers import command_of, server_processes

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.memory import with_memory_saver
from relax_events.events.parts import VersionSegment

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def engine(sglang_python: str, tmp_path: Path) -> Iterator[SGLangEngine]:
    """Yield an engine whose server frees its memory in its sleep."""
    path = tiny_model()
    sglang = SGLangConfig(python=sglang_python, weights_directory=tmp_path)
    config = EngineConfig(threads=1, max_running_samples=8, max_context_tokens=512, sglang=sglang)
    opened = SGLangEngine(
        path, config=with_memory_saver(config), model=ModelConfig(dtype="float32", path=path)
    )
    yield opened
    opened.close()


def check_samples(engine: SGLangEngine, version: int, path: Path) -> None:
    """Generate: log-probabilities are those of the version's weights."""
    request = make_request(version, max_new_tokens=16)
    engine.submit(request)
    for sample in finish(engine).values():
        assert sample.segments == (VersionSegment(version, len(sample.tokens)),)
        expected = plain_logprobs(request.prompt_tokens, sample.tokens, path=path)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_server_releases_its_memory_and_serves_on(engine: SGLangEngine, tmp_path: Path) -> None:
    weights, first = other_weights(1)
    engine.load_weights(weights)
    engine.submit(running := make_request(9, max_new_tokens=400))
    assert engine.poll(timeout_seconds=0.1) == [], "it is being generated"
    with structlog.testing.capture_logs() as logs:
        engine.sleep()
        engine.sleep()
        engine.wake()
        engine.wake()
    names = [event["event"] for event in logs if event["event"].startswith("engine.memory")]
    assert names == ["engine.memory_released", "engine.memory_resumed"]
    assert finish(engine).keys() == {sample.sample_id for sample in running.samples}
    check_samples(engine, 1, first)

    engine.sleep()
    newer, second = other_weights(2, seed=5)
    engine.load_weights(newer)
    check_samples(engine, 2, second)

    engine.sleep()
    servers = server_processes(tmp_path)
    next(one for one in servers if "launch.py" in " ".join(command_of(one))).kill()
    psutil.wait_procs(servers, timeout=60.0)
    engine._replicas[0].gate.wait_until_left()
    assert server_processes(tmp_path) == [], "the device is the trainer's"
    engine.wake()
    check_samples(engine, 2, second)
