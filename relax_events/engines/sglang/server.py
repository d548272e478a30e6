"""One SGLang server as an engine, started by this process or already running. If the server is
lost, the engine fails.

    caller's thread   submit, poll, abort, load_weights --> calls and samples --+
    loop's thread     requests, tokens, lifecycle           <-------------------+--> HTTP --> server

The server samples tokens itself: a sample that is generated again differs, and `SampleRequest.seed`
has no effect. Its log-probabilities are as the protocol says: of the tempered distribution before
top-k and top-p.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.protocol import EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.requests import build_samples
from relax_events.engines.sglang.adapters import AdapterMerge
from relax_events.engines.sglang.checkpoint import ModelFolder, find_non_finite
from relax_events.engines.sglang.client import SGLangClient
from relax_events.engines.sglang.generation import ServedVersion
from relax_events.engines.sglang.lifecycle import ServerLifecycle
from relax_events.engines.sglang.process import ServerProcess, make_weights_folder
from relax_events.events.parts import FinishReason
from relax_events.secret_handling import read_secret
from relax_events.weights import Weights

Result = TypeVar("Result")


class SGLangServer:
    """Implements `engines.protocol.Engine` over one server; see the module's docstring."""

    def __init__(
        self, model_path: Path, *, config: EngineConfig, model: ModelConfig, policy_version: int = 0
    ) -> None:
        """Start a server on the model's folder, or connect to a running one, and wait until it is
        ready.

        Args:
            model_path: A folder in Hugging Face layout.
            config: Limits on samples and context, and the section of this server.
            model: Dtype and device, and the adapters, which are merged into the weights.
            policy_version: Version of the weights in the folder.
        Raises:
            ConfigError: The model can't be served, or the server is not supported.
            EnvironmentProblem: The server does not start; the text ends with its log.
        """
        self.policy_version = policy_version
        self._model = ModelFolder.read(
            model_path, media=model.media, records_experts=model.replays_routing
        )
        self._merge = None if model.lora is None else AdapterMerge.from_folder(self._model, model)
        self._max_context_tokens = config.max_context_tokens
        self._writes_versions = config.sglang.weight_updates == "disk"
        self._results: queue.SimpleQueue[GeneratedSample | None] = queue.SimpleQueue()
        self._running: set[str] = set()
        self._num_submitted = 0
        self._asleep = False
        with ExitStack() as stack:
            self._folder = make_weights_folder(self._model, config.sglang)
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            process = (
                None
                if config.sglang.urls
                else ServerProcess(self._model, self._folder, config=config, settings=model)
            )
            if process is not None:
                stack.callback(process.kill)
            self._loop = stack.enter_context(LoopThread())
            url = process.url if process else config.sglang.urls[0]
            client = SGLangClient(
                url,
                model=self._model,
                weights_seconds=config.sglang.start_seconds,
                token=_read_token(config.sglang) if process is None else "",
                ca_file=config.sglang.ca_file,
            )
            served = ServedVersion.new(policy_version, model_path.absolute())
            self._lifecycle = ServerLifecycle(
                client,
                process,
                config=config.sglang,
                served=served,
                model=self._model,
                on_result=self._results.put,
            )
            stack.callback(lambda: self._loop.run(self._lifecycle.close()))
            self._loop.run(self._lifecycle.open(self._model, model))
            self._cleanup = stack.pop_all()

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned."""
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        """Tokens that the server has sent so far."""
        return self._lifecycle.generation.num_tokens

    @property
    def usage(self) -> EngineUsage:
        """Samples at the server, and its counts of finished requests."""
        return self._lifecycle.generation.usage

    def submit(self, request: GenerationRequest) -> None:
        """Send a prompt group's samples to the server.

        Raises:
            PoisonSample: The request can't be generated; the text says why, and nothing is sent.
            EngineFailed: The server is lost.
        """
        self._require_server()
        samples = build_samples(
            request,
            first_order=self._num_submitted,
            running_ids=self._running,
            model=self._model,
            max_context_tokens=self._max_context_tokens,
        )
        self._num_submitted += len(samples)
        for sample in samples:
            if (reason := sample.finish_reason) is not None:
                self._results.put(sample.to_generated(reason))
        unfinished = [sample for sample in samples if sample.finish_reason is None]
        self._running |= {sample.sample_id for sample in unfinished}
        if unfinished:
            self._loop.call_soon(lambda: self._lifecycle.generation.add(unfinished))

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the finished samples, waiting for the first; at once when nothing runs, the engine
        sleeps or is interrupted.

        Raises:
            EngineFailed: The server is lost.
        """
        deadline = time.monotonic() + timeout_seconds
        finished = self._take_finished()
        while (
            not finished and self._running and not self._asleep and self._lifecycle.failure is None
        ):
            try:
                first = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if first is None:
                break
            finished = [first, *self._take_finished()]
        self._running -= {sample.sample_id for sample in finished}
        if not finished:
            self._require_server()
        return finished

    def interrupt(self) -> None:
        """Make a waiting poll return."""
        self._results.put(None)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`, and return them with their
        tokens so far.
        """
        samples = self._loop.run(self._lifecycle.generation.remove(sample_ids))
        self._running -= {sample.sample_id for sample in samples}
        return [sample.to_generated(FinishReason.ABORT) for sample in samples]

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Load another policy version into the server and verify it; on an error the old one keeps
        serving.

        Raises:
            WeightsError: The weights don't fit the model, or the server rejected them.
            EngineFailed: The server is lost.
        """
        self._require_server()
        version = weights.policy_version
        tensors = (
            self._model.match_tensors(weights.tensors)
            if self._merge is None
            else self._merge.apply(weights)
        )
        if (name := find_non_finite(tensors)) is not None:
            self._loop.run(
                self._lifecycle.reject(f"policy version {version} has a non-finite value in {name}")
            )
        else:
            served = ServedVersion.new(version, self._folder / f"{version}-{time.monotonic_ns()}")
            with ExitStack() as stack:
                stack.callback(shutil.rmtree, served.folder, ignore_errors=True)
                if self._writes_versions:
                    self._model.write_version(tensors, served.folder)
                self._loop.run(self._lifecycle.load(served, tensors, on_running=on_running))
                stack.pop_all()
            for folder in self._folder.iterdir():
                if folder.is_dir() and folder != served.folder:
                    shutil.rmtree(folder)
        self.policy_version = version
        self._asleep = False

    def sleep(self) -> None:
        """Remove the running samples from the server, which releases its memory if it was started
        with `--enable-memory-saver`.
        """
        self._loop.run(self._lifecycle.sleep())
        self._asleep = True

    def wake(self) -> None:
        """Continue the waiting samples; does nothing when awake."""
        self._loop.run(self._lifecycle.wake())
        self._asleep = False

    def close(self) -> None:
        """Drop the running samples, and end the server if this process started it."""
        self._cleanup.close()
        self._running.clear()

    def _require_server(self) -> None:
        if self._lifecycle.failure is not None:
            raise self._lifecycle.failure

    def _take_finished(self) -> list[GeneratedSample]:
        samples = []
        while not self._results.empty():
            if (sample := self._results.get()) is not None:
                samples.append(sample)
        return samples


def _read_token(config: SGLangConfig) -> str:
    """Return the token of running servers; empty where they have none."""
    if config.token_file is None:
        return ""
    return read_secret(config.token_file, key="engine.sglang.token_file")


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and wait for it; its calls have deadlines."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call_soon(self, work: Callable[[], object]) -> None:
        """Schedule a call without waiting for it."""
        self._loop.call_soon_threadsafe(work)
