"""Sessions share the renderer's threads: one session's long or many texts hold up no other one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from gateway_sessions import spoken_turn

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.render_queue import LONG_TEXT_BYTES, RenderQueue
from relax_events.episodes.session import Limit, SessionLimit
from relax_events.errors import EngineFailed
from relax_events.events.parts import ChatMessage
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer
from relax_events.packages.gateway.chat_session import ChatSession

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
SECONDS = 60.0


@contextmanager
def opened(num_threads: int, **settings: Any) -> Iterator[RenderQueue]:
    """Open a queue."""
    queue = RenderQueue(num_threads, **settings)
    try:
        yield queue
    finally:
        queue.close()


def test_session_with_a_queue_of_renderings_lets_others_pass() -> None:
    """The first session has two threads' worth of work: it gets one thread, and the other session
    finishes while the first one's queue still waits."""
    release, running = threading.Event(), threading.Semaphore(0)

    def wait() -> str:
        running.release()
        assert release.wait(SECONDS)
        return "slow"

    async def run(queue: RenderQueue) -> None:
        slow = [asyncio.ensure_future(queue.run("greedy", wait)) for _ in range(5)]
        assert await asyncio.to_thread(running.acquire, timeout=SECONDS)
        assert await queue.run("other", lambda: "quick") == "quick"
        assert not any(one.done() for one in slow)
        assert not running.acquire(blocking=False), "one thread for each session"
        release.set()
        assert await asyncio.gather(*slow) == ["slow"] * 5

    with opened(2) as queue:
        asyncio.run(run(queue))


def test_sessions_take_turns_on_one_thread() -> None:
    order: list[str] = []
    release = threading.Event()

    def work(name: str) -> Callable[[], None]:
        return lambda: (order.append(name), release.wait(SECONDS))[0]

    async def run(queue: RenderQueue) -> None:
        names = ["a", "a", "a", "b", "c", "b"]
        tasks = [asyncio.ensure_future(queue.run(name, work(name))) for name in names]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)

    with opened(1) as queue:
        asyncio.run(run(queue))
    assert order == ["a", "a", "b", "c", "a", "b"]


def test_long_texts_are_rendered_one_at_a_time_and_hold_up_no_short_ones() -> None:
    release, running = threading.Event(), threading.Semaphore(0)

    def wait() -> bool:
        running.release()
        return release.wait(SECONDS)

    async def run(queue: RenderQueue) -> None:
        long = [
            asyncio.ensure_future(queue.run(name, wait, num_bytes=LONG_TEXT_BYTES + 1))
            for name in ("a", "b")
        ]
        assert await asyncio.to_thread(running.acquire, timeout=SECONDS)
        assert await queue.run("c", lambda: "short") == "short"
        assert not running.acquire(blocking=False), "the second one waits, and a thread is free"
        release.set()
        assert await asyncio.gather(*long) == [True, True]

    with opened(3) as queue:
        asyncio.run(run(queue))


def test_rendering_past_its_deadline_fails_and_keeps_only_its_own_thread() -> None:
    release = threading.Event()

    async def run(queue: RenderQueue) -> None:
        try:
            with pytest.raises(EngineFailed, match="not rendered within"):
                await queue.run("stuck", lambda: release.wait(SECONDS))
            with pytest.raises(EngineFailed, match="not rendered within"):
                await queue.run("stuck", lambda: pytest.fail("it ran while the first one does"))
        finally:
            release.set()

    with opened(2, seconds=0.05) as queue:
        asyncio.run(run(queue))


def test_cancelled_rendering_leaves_the_queue() -> None:
    release = threading.Event()

    async def run(queue: RenderQueue) -> None:
        first = asyncio.ensure_future(queue.run("a", lambda: release.wait(SECONDS)))
        gone = asyncio.ensure_future(queue.run("a", lambda: pytest.fail("its call is gone")))
        await asyncio.sleep(0)
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        release.set()
        assert await first
        assert await queue.run("a", lambda: "next") == "next"

    with opened(1) as queue:
        asyncio.run(run(queue))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ChatSession]:
    """Open a session of 512 tokens, whose policy says one word."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    train_tokenizer(["read the file"]).save_pretrained(tmp_path)
    config = DataConfig(source="http", chat_template_file=tmp_path / "template.jinja")
    renderer = PromptRenderer.from_folder(tmp_path, config)

    async def generate(request: GenerationRequest) -> GeneratedSample:
        return spoken_turn(request, [request.stop_token_ids[0]])

    opened = open_session(renderer, generate, max_context_tokens=512)
    yield opened
    opened.queue.close()


def test_text_that_fits_no_context_is_refused_unrendered(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: Any, **__: Any) -> None:
        pytest.fail("it was rendered")

    monkeypatch.setattr(session.renderer, "prompt_tokens", render)
    text = "a" * (512 * session.renderer.longest_token_bytes + 1)
    long, short = [ChatMessage.of_text("user", text)], [ChatMessage.of_text("user", "a")]
    tools = json.dumps([{"function": {"name": "f", "parameters": {"a" * 100_000: {}}}}])
    for messages, offered in ((long, ""), (short, tools)):
        with pytest.raises(SessionLimit, match="holds 8192 at most; shorten it"):
            asyncio.run(session.count_tokens(messages, tools=offered))
    assert session.limit is None, "a count is no turn"
    with pytest.raises(SessionLimit):
        asyncio.run(session.chat(long))
    assert session.limit is Limit.CONTEXT


def test_text_of_the_longest_tokens_is_rendered(session: ChatSession) -> None:
    text = "read the file " * 100
    messages = [ChatMessage.of_text("user", text)]
    assert asyncio.run(session.count_tokens(messages)) > 100
