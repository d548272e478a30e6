"""Sessions with environments of other projects as they are published: a server of OpenEnv, and a
class of skyrl-gym. They are installed apart, by `make openenv`.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.session_pool import EnvironmentSession, SessionPool
from relax_events.errors import EpisodeFailed
from relax_events.events.parts import ChatMessage
from relax_events.http.server import open_listener
from tests.environment_pools import pool_of

PYTHON = Path(__file__).parents[2] / ".venv-openenv" / "bin" / "python"
SERVER = Path(__file__).with_name("openenv_server.py")
SECONDS = 60.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make openenv`"),
]


def session_of(pool: SessionPool, name: str, answer: str = "") -> EnvironmentSession:
    messages = [ChatMessage.of_text("user", "begin")]
    task = EnvironmentContext(messages=messages, answer=answer, metadata='{"seed": 5}')
    return pool.session(name, task)


def said(observation: Any) -> tuple[list[str], float, bool]:
    texts = [reply.message.text for reply in observation.replies]
    return texts, observation.reward, observation.is_over


def test_real_openenv_server_is_reset_and_stepped_for_each_sample(tmp_path: Path) -> None:
    listener = open_listener("127.0.0.1", 0, remedies=(), what="a test")
    port = listener.getsockname()[1]
    listener.close()
    server = subprocess.Popen([PYTHON, SERVER, str(port)])
    options = {"text_field": "text", "reset": {"level": 3}}
    address = f"http://127.0.0.1:{port}"
    try:
        with pool_of(tmp_path, interface="openenv", address=address, options=options) as pool:
            session = _open_when_ready(pool, "g0/0")
            other = _open_when_ready(pool, "g0/1")
            assert said(session.step("go").result(SECONDS)) == (["go 1"], 0.5, False)
            assert said(other.step("no").result(SECONDS)) == (["no 1"], 0.5, False)
            assert said(session.step("go").result(SECONDS)) == ([], 1.0, True)
            with pytest.raises(EpisodeFailed, match="EXECUTION_ERROR: it broke"):
                other.step("crash").result(SECONDS)
            session.close()
            other.close()
    finally:
        server.kill()
        server.wait()


def _open_when_ready(pool: SessionPool, name: str) -> EnvironmentSession:
    deadline = time.monotonic() + SECONDS
    while True:
        session = session_of(pool, name)
        try:
            opening = session.open().result(SECONDS)
        except EpisodeFailed:
            session.close()
            assert time.monotonic() < deadline
            time.sleep(0.2)
            continue
        assert [one.message.text for one in opening.messages] == [f"seed 5, {name}, 3"]
        return session


def test_real_environment_of_skyrl_gym_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages,) = PYTHON.parents[1].glob("lib/python3*/site-packages")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    file = packages / "skyrl_gym" / "envs" / "gsm8k" / "multi_turn_env.py"
    settings = {"interface": "skyrl_gym", "function": f"{file}:GSM8kMultiTurnEnv", "max_turns": 3}
    with pool_of(tmp_path, **settings) as pool:
        session = session_of(pool, "g0/0", answer="4")
        assert session.open().result(SECONDS).messages == ()
        (first,), reward, is_over = said(session.step("hm").result(SECONDS))
        assert "#### ANSWER" in first
        assert (reward, is_over) == (0.0, False)
        assert said(session.step("#### 5").result(SECONDS))[1:] == (pytest.approx(0.2 / 3), False)
        assert said(session.step("#### 4").result(SECONDS)) == ([], 1.0, True)
        session.close()
