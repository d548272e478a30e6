"""Programs for the tests of episodes, and the engine that runs them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.episodes.engine import EpisodeEngine
from relax_events.events.parts import ChatMessage
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.gateway.program_driver import ProgramDriver
from relax_events.telemetry.component_metrics import EpisodeMetrics

HEAD = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit
task = json.load(open(os.environ["RELAX_TASK_FILE"]))
def post(path, body, key=os.environ["OPENAI_API_KEY"], header="Authorization", others={}):
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=60)
    headers = {header: key if header == "x-api-key" else "Bearer " + key}
    headers |= {"Content-Type": "application/json"} | others
    connection.request("POST", base.path + path, json.dumps({"model": "any"} | body), headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()
def ask(messages, key=os.environ["OPENAI_API_KEY"], **more):
    return post("/chat/completions", {"messages": messages} | more, key)
def say(messages, **more):
    status, text = ask(messages, **more)
    if status != 200:
        sys.exit(text)
    return json.loads(text)["choices"][0]["message"]
messages = list(task["messages"])
"""
"""What each program begins with."""


def write_program(folder: Path, body: str) -> tuple[str, ...]:
    """Write a program, and return its command."""
    file = folder / "agent.py"
    file.write_text(HEAD + body)
    return (sys.executable, "-I", "-S", str(file))


@contextmanager
def episodes(
    folder: Path,
    body: str,
    *,
    model: Path | None = None,
    command: tuple[str, ...] = (),
    **environment: Any,
) -> Iterator[EpisodeEngine]:
    """Open an engine whose samples are episodes of a program.

    Args:
        folder: For the run's files, and for the program.
        body: What the program does after `HEAD`.
        model: The folder of another model than a tiny one that reads text.
        command: Another command than the program.
        environment: Settings of the section.
    """
    model = model or make_tiny(folder / "model", corpus=["12=21"], hidden_size=32, seed=3)
    if "harness" not in environment:
        command = command or write_program(folder, body)
    config = RunConfig.model_validate(
        {
            "run": {"id": "agents", "directory": folder / "run"},
            "model": {"path": model, "dtype": "float32", "device": "cpu"},
            "data": {"source": "http"},
            "engine": {
                "max_context_tokens": 512,
                "max_running_samples": 16,
                "threads": 1,
                "sampling": {"max_new_tokens": 64},
            },
            "environment": {"command": command, "max_turns": 4} | environment,
            "reward": {"function": "exact_match"},
        }
    )
    renderer = PromptRenderer.from_folder(
        model,
        config.data,
        media=config.model.media,
        tool_format=config.environment.tool_call_format,
    )
    inner = TransformersEngine(model, config=config.engine, model=config.model)
    metrics = EpisodeMetrics("rollout", CollectorRegistry())
    driver = ProgramDriver(config)
    engine = EpisodeEngine(inner, driver, config=config, renderer=renderer, metrics=metrics)
    try:
        yield engine
    finally:
        engine.close()


QUESTION = (ChatMessage.of_text("user", "12"),)


def begin(
    engine: EpisodeEngine,
    *,
    num_samples: int = 1,
    name: str = "000000-0000-0",
    messages: Sequence[ChatMessage] = QUESTION,
) -> None:
    """Submit a prompt group."""
    empty = np.empty(0, np.int32)
    engine.submit(
        GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=np.array([1], np.int32),
            samples=tuple(
                SampleRequest(
                    sample_id=f"{name}/{index}",
                    seed=index,
                    tokens=empty,
                    logprobs=empty.astype(np.float32),
                    segments=(),
                )
                for index in range(num_samples)
            ),
            sampling=engine._config.engine.sampling,
            stop_token_ids=engine._renderer.stop_token_ids,
            environment_context=EnvironmentContext(
                messages=messages, answer="21", metadata='{"a": 1}'
            ),
        )
    )


def finish(engine: EpisodeEngine, *, seconds: float = 60.0) -> list[GeneratedSample]:
    """Return all samples in the engine, by id."""
    found: list[GeneratedSample] = []
    deadline = time.monotonic() + seconds
    while engine.num_running:
        assert time.monotonic() < deadline, "the episodes don't end"
        found += engine.poll(timeout_seconds=0.1)
    return sorted(found, key=lambda sample: sample.sample_id)
