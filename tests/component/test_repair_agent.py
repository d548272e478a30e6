"""The agent of `configs/repair.toml`, against a model whose answers are written here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.packages.examples.repair import make_bug, write_function

AGENT = Path(__file__).parents[2] / "configs" / "agents" / "repair.py"
RIGHT, WRONG = write_function("a + b"), write_function("a - b")


@contextmanager
def model_that_says(answers: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a chat API with these answers, and the requests that it has got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            requests.append(json.loads(self.rfile.read(length)))
            message = {"role": "assistant", "content": answers[len(requests) - 1]}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
            thread.join()


def run_agent(folder: Path, address: str) -> int:
    """Run the agent on a task whose function must add; return its exit code."""
    task = {
        "messages": [{"role": "user", "content": "f must return the sum"}],
        "metadata": {"visible_test": "assert f(2, 3) == 5"},
    }
    (folder / "task.json").write_text(json.dumps(task))
    variables = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": address,
        "OPENAI_API_KEY": "key",
        "OPENAI_MODEL": "policy",
        "RELAX_TASK_FILE": str(folder / "task.json"),
    }
    command = [sys.executable, "-I", "-S", str(AGENT)]
    return subprocess.run(command, cwd=folder, env=variables, timeout=60).returncode


@pytest.mark.parametrize(
    ("answers", "num_calls"),
    [
        ([RIGHT], 1),
        ([WRONG, RIGHT], 2),
        (["no code", WRONG], 2),
        ([write_function("open('made', 'w').write('x')"), RIGHT], 2),
    ],
)
def test_agent_asks_again_until_the_visible_test_passes_or_the_second_try_is_over(
    answers: list[str], num_calls: int, tmp_path: Path
) -> None:
    with model_that_says(answers) as (address, requests):
        assert run_agent(tmp_path, address) == 0
    assert len(requests) == num_calls
    assert not (tmp_path / "made").exists() or not (tmp_path / "made").read_text()
    said = [message["content"] for message in requests[-1]["messages"]]
    assert said[1:] == [*answers[: num_calls - 1], "A test fails."][: 2 * (num_calls - 1)]


def test_replies_of_the_warm_up_are_those_of_the_agent() -> None:
    generator = np.random.default_rng(0)
    replies = [make_bug(generator)[2]["replies"] for _ in range(20)]
    texts = {reply["content"] for one in replies for reply in one}
    assert texts == {"A test fails."}
    assert 'FAILED = "A test fails."' in AGENT.read_text()
