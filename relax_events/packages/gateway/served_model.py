"""A model without a run: an engine, and a session for each call of a client."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from relax_events.api.drivers import SessionBounds
from relax_events.api.engines import Engine, EngineConfig, GenerationRequest, SampleRequest, Weights
from relax_events.api.errors import ConfigError, EngineFailed
from relax_events.api.training import ModelConfig
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.episodes.call_engine import CallEngine, EngineCall
from relax_events.episodes.render_queue import RenderQueue
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.sampling import CallSampling

CALLERS = "http"
"""Data source of the renderer: HTTP requests."""
TOKENIZER_FILE = "tokenizer_config.json"
POLL_SECONDS = 1.0
CLOSE_SECONDS = 30.0

log = structlog.get_logger()


class ServedEngine(CallEngine):
    """Answers the calls of an event loop from `open` to `close`: a thread of its own polls the
    engine.

    Attributes:
        failure: The error that stopped the engine; every call is answered with it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.failure: EngineFailed | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Fail the calls that wait, and close the engine."""
        self._is_closing = True
        self.interrupt()
        self._thread.join(CLOSE_SECONDS)

    @property
    def _is_waiting(self) -> bool:
        return True

    def _put(self, call: EngineCall | None) -> None:
        super()._put(call)
        if self.failure is not None:  # checked last: nothing takes what is queued after the failure
            self._fail_queued(self.failure)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self.poll(timeout_seconds=POLL_SECONDS)
            failure = EngineFailed("the server has stopped; call again once it is restarted")
        except Exception as error:
            log.exception("engine.failed")
            failure = EngineFailed(f"the engine has failed: {error!r}; restart the server")
        self.failure = failure
        self._fail_calls(failure)
        self._fail_queued(failure)
        self._engine.close()


class ServedModel:
    """See the module's docstring.

    Attributes:
        name: The name that clients call it by.
        engine: Generates; it runs from `engine.open` to `close`.
        max_context_tokens: Prompt and completion together.
        stop_token_ids: The tokens that end a completion.
    """

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, *, name: str, adapters: Path | None = None
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            model: Folder, dtype and device, and whether experts are recorded.
            engine: Bounds on rows and context.
            name: The name that clients call it by.
            adapters: Folder of adapters of `model.lora`, which are loaded into the model.
        Raises:
            ConfigError: The model or the adapters can't be loaded.
            WeightsError: The adapters don't fit the model.
        """
        inner = TransformersEngine(model.path, config=engine, model=model)
        if adapters is not None:
            inner.load_weights(Weights(0, inner.read_weights(adapters), b""))
        has_tokenizer = adapters is not None and (adapters / TOKENIZER_FILE).is_file()
        folder = adapters if adapters is not None and has_tokenizer else model.path
        self.name, self.engine = name, ServedEngine(inner)
        self._renderer = _open_renderer(folder)
        self._queue = RenderQueue.of_renderer(self._renderer)
        self.stop_token_ids = self._renderer.stop_token_ids
        self.max_context_tokens = engine.max_context_tokens
        self._bounds = SessionBounds(
            max_turns=1,
            max_context_tokens=engine.max_context_tokens,
        )

    def close(self) -> None:
        """Stop the engine and the renderer."""
        self.engine.close()
        self._queue.close()

    def open_session(self, sampling: CallSampling) -> ChatSession:
        """Open the session of a call, which samples one turn as the call asks for it."""
        request = self.build_request(
            sampling,
            prompt_tokens=np.empty(0, np.int32),
            max_new_tokens=self.max_context_tokens,
            stop_token_ids=self.stop_token_ids,
        )
        (sample,) = request.samples
        return ChatSession(
            request, sample, self._bounds, self._renderer, self._queue, self.engine.generate
        )

    def build_request(
        self,
        sampling: CallSampling,
        *,
        prompt_tokens: NDArray[np.int32],
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
    ) -> GenerationRequest:
        """Build a request of one sample, whose id is new."""
        name = secrets.token_hex(16)
        sample = SampleRequest(
            sample_id=name,
            seed=sampling.choose_seed(),
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            segments=(),
        )
        return GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=prompt_tokens,
            samples=(sample,),
            sampling=sampling.build_config(max_new_tokens),
            stop_token_ids=stop_token_ids,
        )


def _open_renderer(folder: Path) -> PromptRenderer:
    try:
        return PromptRenderer.from_folder(folder, DataConfig(source=CALLERS))
    except ConfigError:  # without a chat template; any other error repeats below
        return PromptRenderer.from_folder(folder, DataConfig(source=CALLERS, chat_template=False))
