"""What a caller without a key, and one with a huge text, cost the other callers of a gateway.

    python -m benchmarks.http_front [SECONDS]

Pairs of windows: the same calls of a session with and without attackers, on one gateway. The
latencies of the calls are printed, and how much the memory has grown.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from relax_events.attacks.gateway_session import open_session
from relax_events.attacks.http_requests import Target, http_attacks
from relax_events.attacks.http_sender import send
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.examples.tiny_tokenizer import train_tokenizer
from relax_events.gateway.chat_renderer import ChatRenderer
from relax_events.gateway.server import GatewayServer
from relax_events.gateway.session_keys import SessionKeys
from tests.gateway_sessions import spoken_turn

WINDOW_SECONDS, NUM_PAIRS, NUM_ATTACKERS = 5.0, 3, 4
START_SECONDS = 3.0
"""Until all attackers attack."""
MAX_CONTEXT_TOKENS, LONGEST_TOKEN_BYTES = 32_768, 16
UNREAD, COUNTED = "64 MB without a key", "count_tokens of a whole context"
COUNT = "/v1/messages/count_tokens"
QUESTION = {"model": "any", "messages": [{"role": "user", "content": "read the file"}]}


TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def build_renderer(folder: Path) -> ChatRenderer:
    """Build a renderer whose tokenizer reads bytes, which are more tokens than words are."""
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    train_tokenizer(["read the file"]).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=file)
    return ChatRenderer(PromptRenderer.from_folder(folder, config))


async def say_nothing(request: GenerationRequest) -> GeneratedSample:
    """Sample an empty turn."""
    return spoken_turn(request, [request.stop_token_ids[0]])


def call(port: int, key: str, body: bytes) -> int:
    """Count the tokens of a conversation; return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(
            "POST", COUNT, body, {"x-api-key": key, "Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def measure(port: int, key: str, seconds: float) -> list[float]:
    """Return the latencies of calls, one after the other."""
    body, latencies = json.dumps(QUESTION).encode(), list[float]()
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        began = time.monotonic()
        assert call(port, key, body) == 200
        latencies.append(time.monotonic() - began)
    return latencies


def attack_forever(kind: str, port: int, key: str) -> None:
    """Attack a gateway until this process is ended: without a key, or with that of a session."""
    longest = MAX_CONTEXT_TOKENS * LONGEST_TOKEN_BYTES
    target = Target(f"127.0.0.1:{port}", COUNT, "Authorization: Bearer x", longest)
    unread = next(one for one in http_attacks(target) if one.name == UNREAD)
    text = {"messages": [{"role": "user", "content": "read the file " * (longest // 15)}]}
    body = json.dumps(QUESTION | text).encode()
    while True:
        with contextlib.suppress(OSError):
            if kind == UNREAD:
                send(unread, port=port)
            else:
                call(port, key, body)


@contextmanager
def attackers(kind: str, port: int, key: str) -> Iterator[None]:
    """Attack from several processes during the block."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=attack_forever, args=(kind, port, key), daemon=True)
        for _ in range(NUM_ATTACKERS)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def describe(latencies: list[float]) -> str:
    """Return the median and the 99th percentile."""
    median, high = np.quantile(latencies, [0.5, 0.99]) * 1000
    return f"{len(latencies):5} calls, median {median:7.1f} ms, p99 {high:7.1f} ms"


def main(seconds: float = WINDOW_SECONDS) -> None:
    """Measure, and print the latencies."""
    with tempfile.TemporaryDirectory() as name:
        renderer = build_renderer(Path(name))
    keys = SessionKeys()
    server = GatewayServer(keys, model_name="quiet")
    port = int(server.url.rpartition(":")[2])
    quiet, greedy = (
        keys.open(open_session(renderer, say_nothing, max_context_tokens=MAX_CONTEXT_TOKENS))
        for _ in range(2)
    )
    process = psutil.Process()
    measure(port, quiet, 1.0)
    for kind in (UNREAD, COUNTED):
        for _ in range(NUM_PAIRS):
            before = process.memory_info().rss
            print(f"{'alone':28} {describe(measure(port, quiet, seconds))}")
            with attackers(kind, port, greedy):
                measure(port, quiet, START_SECONDS)
                attacked = measure(port, quiet, seconds)
            grown = (process.memory_info().rss - before) / 1e6
            print(f"{kind:28} {describe(attacked)}, memory {grown:+.1f} MB", flush=True)
    server.close(seconds=30.0)
    renderer.close()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
