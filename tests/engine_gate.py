"""A gate before engines: samples stay in flight for as long as a test needs, however fast the
machine is.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from relax_events.engines.protocol import GeneratedSample
from relax_events.engines.transformers.engine import TransformersEngine

HELD_POLL_SECONDS, LOOK_SECONDS = 0.05, 0.002


class Gate:
    """While it is shut, every engine stops sampling once each of its samples has some tokens; a
    sample that joins later gets as many.

    It stands in `TransformersEngine.poll`, so it holds our own servers and routed engines too as
    far as they run in this process. SGLang's servers, which run in processes of their own, look at
    a file and continue by a few steps a second while it is there (`sglang_gate`).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self._file = file
        self._num_tokens: int | None = None
        self._engine: TransformersEngine | None = None
        self.reached = threading.Event()
        """Set once an engine has all the tokens that the gate grants."""
        poll = TransformersEngine.poll

        def held_poll(
            engine: TransformersEngine, *, timeout_seconds: float
        ) -> list[GeneratedSample]:
            if self._num_tokens is None:
                return poll(engine, timeout_seconds=timeout_seconds)
            if not self.is_reached_by(engine):
                return poll(engine, timeout_seconds=0.0)
            self._engine = engine
            self.reached.set()
            end = time.monotonic() + min(timeout_seconds, HELD_POLL_SECONDS)
            while not engine._is_interrupted and time.monotonic() < end:
                time.sleep(LOOK_SECONDS)
            engine._is_interrupted = False
            return []

        monkeypatch.setattr(TransformersEngine, "poll", held_poll)

    def shut(self, num_tokens: int = 4) -> None:
        """Stop the sampling of engines once each sample has so many tokens."""
        self._num_tokens = num_tokens
        self.reached.clear()
        unseen = self._file.with_suffix(".new")
        unseen.write_text(str(num_tokens))
        unseen.rename(self._file)

    def open(self) -> None:
        """Let engines continue."""
        self._num_tokens = None
        self._file.unlink(missing_ok=True)

    @property
    def num_running(self) -> int:
        """Samples of the engine that reached the gate last."""
        return self._engine.num_running if self._engine else 0

    def is_reached_by(self, engine: TransformersEngine) -> bool:
        """Return whether an engine runs samples, none waits, and each has the tokens that the gate
        grants."""
        table, num_tokens = engine._table, self._num_tokens or 0
        return (
            table.num_rows > 0
            and not engine._waiting
            and int(table._counts[: table.num_rows].min()) >= num_tokens
        )
