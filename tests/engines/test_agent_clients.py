"""The real clients of OpenAI and Anthropic against the gateway, with tools and streams.

They are installed in an environment of their own, `make agents`. What the policy says is given, so
that it calls tools; its tokens are those of the tokenizer.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.graph import path_tokens
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.server import GatewayServer
from relax_events.packages.gateway.session_keys import SessionKeys
from tests.gateway_sessions import spoken_turn

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
CLIENT = Path(__file__).with_name("agent_clients.py")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SAID = (
    '<think>So.</think><tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>',
    "It is 42.",
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make agents`"),
]


class SpokenEngine:
    """Says the given turns one after another, and remembers what it read."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._turns = [renderer.encode(text) for text in SAID]
        self.read: list[NDArray[np.int32]] = []

    async def __call__(self, request: GenerationRequest) -> GeneratedSample:
        """Say the next turn."""
        turn = self._turns[len(self.read) % len(SAID)]
        tokens = np.append(turn, np.int32(request.stop_token_ids[0]))
        self.read.append(request.prompt_tokens)
        return spoken_turn(request, tokens)


def open_spoken_session(folder: Path) -> tuple[ChatSession, SpokenEngine]:
    """Open a session whose policy says the given turns."""
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    train_tokenizer(list(SAID)).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=file)
    plain = PromptRenderer.from_folder(folder, config)
    engine = SpokenEngine(plain)
    session = open_session(plain, engine, max_new_tokens=4000, max_context_tokens=2000)
    return session, engine


def test_the_clients_of_openai_and_anthropic_call_tools_and_keep_the_tokens(tmp_path: Path) -> None:
    session, engine = open_spoken_session(tmp_path)
    keys = SessionKeys()
    server = GatewayServer(keys, model_name="tiny")
    try:
        printed = subprocess.run(
            [PYTHON, CLIENT, server.url, keys.open(session)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=200,
        ).stdout
    finally:
        server.close()
    found = json.loads(printed.splitlines()[-1])
    assert found["answers"] == ["It is 42."] * 8
    assert found["errors"] == ["AuthenticationError", "BadRequestError", "BadRequestError"]
    assert found["models"] == ["tiny", "tiny"]
    rows = session.graph.rows()
    assert len(rows) == 8
    assert all(len(row.nodes) == 2 for row in rows)
    for node, read in zip(session.graph.nodes, engine.read, strict=True):
        np.testing.assert_array_equal(path_tokens(node)[: len(read)], read)
