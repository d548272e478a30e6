"""What the gateway adds to a call, at 500 sessions at the same time, with an engine that only takes time.

    python -m benchmarks.gateway

The overhead of a call is the time that its client waits beyond the time of the engine: connection,
HTTP, reading and rendering the history, building and sending the answer, and waiting for the gateway's
thread, which all sessions share. The clients run in a process of their own on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.gateway_clients import TURNS
from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.examples.tiny_tokenizer import train_tokenizer
from relax_events.gateway.chat_renderer import ChatRenderer
from relax_events.gateway.graph import path_tokens
from relax_events.gateway.server import GatewayServer
from relax_events.gateway.session import Session
from relax_events.gateway.session_keys import SessionKeys
from tests.gateway_sessions import spoken_turn

NUM_SESSIONS = 500
SECONDS = (5.0, 15.0)
"""Of a turn: its bounds."""
SAMPLED_TOKENS = 256
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "gateway.md"
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class Timer:
    """Samples random tokens, a turn in as many seconds as a seed gives."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self.seconds: list[float] = []

    async def __call__(self, request: GenerationRequest) -> GeneratedSample:
        """Wait for a turn's time, and return it."""
        seconds = self._random.uniform(*SECONDS)
        self.seconds.append(seconds)
        await asyncio.sleep(seconds)
        sampled = np.random.default_rng(len(self.seconds)).integers(97, 123, SAMPLED_TOKENS)
        return spoken_turn(request, np.append(sampled, request.stop_token_ids[0]))


def build_renderer(folder: Path) -> ChatRenderer:
    """Build a renderer whose tokenizer reads bytes, which are more tokens than words are."""
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    train_tokenizer(["read the file"]).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=file)
    return ChatRenderer(PromptRenderer.from_folder(folder, config))


def open_sessions(renderer: ChatRenderer, keys: SessionKeys) -> dict[str, tuple[Session, Timer]]:
    """Open the sessions, and return them by key."""
    found = {}
    for number in range(NUM_SESSIONS):
        timer = Timer(number)
        session = open_session(
            renderer,
            timer,
            name=f"{number:06}-0000-0",
            seed=number,
            max_turns=TURNS,
            max_new_tokens=10_000,
            max_context_tokens=40_000,
        )
        found[keys.open(session)] = session, timer
    return found


class Watch:
    """Samples the memory of this process and the load of the machine while something runs."""

    def __init__(self) -> None:
        self._process, self._stop = psutil.Process(), threading.Event()
        self.resident: list[int] = []
        self.loads: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self.resident.append(self._process.memory_info().rss)
            self.loads.append(os.getloadavg()[0])


def main() -> None:
    """Measure, and write the page."""
    with tempfile.TemporaryDirectory() as name:
        renderer = build_renderer(Path(name))
    keys = SessionKeys()
    sessions = open_sessions(renderer, keys)
    server = GatewayServer(keys, model_name="timed")
    address, process = urlsplit(server.url), psutil.Process()
    before, cpu = process.memory_info().rss, time.process_time()
    with Watch() as watch:
        printed = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.gateway_clients",
                str(address.hostname),
                str(address.port),
            ],
            input=json.dumps(list(sessions)),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    cpu = time.process_time() - cpu
    server.close(seconds=30.0)
    overheads = [
        (waited - engine) * 1000
        for calls, (_, timer) in zip(json.loads(printed), sessions.values(), strict=True)
        for waited, engine in zip(calls, timer.seconds, strict=True)
    ]
    lengths = [len(path_tokens(session.graph.nodes[-1])) for session, _ in sessions.values()]
    assert all(session.graph.num_forks == 0 for session, _ in sessions.values())
    percentiles = np.percentile(overheads, [50, 90, 99, 100])
    text = f"""# The gateway at {NUM_SESSIONS} sessions

{NUM_SESSIONS} sessions at the same time, {TURNS} turns each, in one gateway, which is one thread. The engine takes {SECONDS[0]:g} to
{SECONDS[1]:g} s for a turn of {SAMPLED_TOKENS} tokens and computes nothing. A history grows to {statistics.median(lengths):,.0f} tokens. The overhead of a
call is what its client waits beyond the time of the engine. {os.cpu_count()} CPU cores, shared with the clients and with what
else ran: the load average was {min(watch.loads):.1f} to {max(watch.loads):.1f}, and the benchmark ran at nice {os.nice(0)}. Written by
`python -m benchmarks.gateway`.

| | |
|---|---|
| calls | {len(overheads):,} |
| overhead of a call, median | {percentiles[0]:.1f} ms |
| 90th percentile | {percentiles[1]:.1f} ms |
| 99th percentile | {percentiles[2]:.1f} ms |
| highest | {percentiles[3]:.1f} ms |
| CPU time of the gateway for a call | {cpu / len(overheads) * 1000:.1f} ms |
| memory of the process before | {before / 1e6:.0f} MB |
| highest, with all sessions and their tokens | {max(watch.resident) / 1e6:.0f} MB |
"""
    PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
