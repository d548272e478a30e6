"""Speaks to an SGLang server over HTTP, each call within a deadline. What SGLang's API is like is
known here alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import orjson

from relax_events.config import SamplingConfig
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.media_features import FORMAT
from relax_events.errors import ConfigError, EnvironmentProblem

SUPPORTED = ("0.5.23",)
"""Versions whose behaviour is measured; others change the API within the month, begin and end of
weight updates among it."""
CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
"""Of a call that touches no weights."""
NOT_FOUND = 404
END_OF_EVENT, END_OF_STREAM = b"\n\n", b"[DONE]"
EVENT_BYTES, TOKEN_BYTES, TOP_TOKEN_BYTES = 1024**2, 1024, 128
"""The most that an event has: besides its tokens, with each token (id, log-probability, version,
text), and with each of the most probable ones."""
SHOWN_BYTES = 500
"""Of an answer that is an error."""
PauseMode = Literal["retract", "in_place"]


class ServerRefused(Exception):
    """The server answered no; the text says what to what."""


class ServerGone(Exception):
    """The server did not answer within the deadline, or broke off."""


class SGLangClient:
    """The calls that the engine needs. Used within one event loop."""

    def __init__(self, url: str, *, model: ModelFolder, weights_seconds: float) -> None:
        """Connect when first needed.

        Args:
            url: Of the server, without a path.
            model: That it serves.
            weights_seconds: Deadline of a call that loads or hashes all weights.
        Raises:
            EnvironmentProblem: The HTTP client is not installed.
        """
        try:
            import httpx2
        except ImportError as error:
            raise EnvironmentProblem(
                f"engine 'sglang' needs httpx2 ({error}); install relax-events[sglang]"
            ) from None
        self._http = httpx2
        self.url = url.rstrip("/")
        self._model, self._weights_seconds = model, weights_seconds
        # No connection is used twice: SGLang closes one that is idle for 5 s, and 130 turns of a
        # talk in 100 steps were sent into one just then.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx2.AsyncClient(
            base_url=self.url, limits=limits, timeout=CONTROL_SECONDS, trust_env=False
        )

    @property
    def records_experts(self) -> bool:
        """Whether the server tells which experts tokens go through."""
        return self._model.experts is not None

    async def close(self) -> None:
        """Break off what is under way."""
        await self._client.aclose()

    async def is_ready(self) -> bool:
        """Tell whether the server takes requests.

        Raises:
            ConfigError: It is no server of a version that we know, or a router before some.
        """
        try:
            response = await self._client.get("/ready", timeout=CONNECT_SECONDS)
        except self._http.RequestError:
            return False
        if response.status_code == NOT_FOUND:
            remedy = (
                f"name servers of SGLang {SUPPORTED[-1]} in engine.sglang.urls, and not a router "
                "before them: it passes no weights on"
            )
            raise ConfigError(
                f"{self.url} is no SGLang server that we know, it has no /ready; {remedy}"
            )
        return bool(response.status_code == 200)

    async def require_supported(self, *, takes_media: bool) -> None:
        """Refuse a server whose API is another, that answers in another form, or that can't be sent
        media though the model reads them.

        Raises:
            ConfigError: The text names what it is and what to do.
            ServerGone, ServerRefused: It could not be asked.
        """
        info = await self._call("GET", "/server_info")
        if (version := info.get("version")) not in SUPPORTED:
            remedy = f"install sglang=={SUPPORTED[-1]} where the server runs"
            raise ConfigError(
                f"engine 'sglang' works with SGLang {', '.join(SUPPORTED)}, and {self.url} "
                f"is {version}; {remedy}"
            )
        if not info.get("incremental_streaming_output"):
            raise ConfigError(
                f"the SGLang server at {self.url} repeats all tokens with each event; start "
                "it with --incremental-streaming-output"
            )
        states = info.get("internal_states") or [{}]
        if takes_media and states[0].get("media_format") != FORMAT:
            remedy = (
                "install relax-events of this version beside sglang there, which brings the plugin"
            )
            raise ConfigError(
                f"the model reads media, and the SGLang server at {self.url} takes none in "
                f"the form {FORMAT}; {remedy}"
            )
        if self.records_experts and not info.get("enable_return_routed_experts"):
            need = (
                "does not tell which experts tokens go through, which model.routing_replay = "
                "'rollout' needs"
            )
            raise ConfigError(
                f"the SGLang server at {self.url} {need}; start it with "
                "--enable-return-routed-experts"
            )

    async def generate(
        self,
        prompts: Sequence[dict[str, Any]],
        *,
        media: Sequence[str],
        sampling: SamplingConfig,
        extra_key: str,
        num_top: int,
    ) -> AsyncIterator[dict[str, Any]]:
        """Generate for several prompts; give what comes for each, as it comes. Which experts its
        tokens went through comes with the last of it.

        Args:
            prompts: `rid`, `input_ids`, `max_new_tokens`, `stop_token_ids` and `num_routed` of
                each, the last for how many of its first tokens the experts are known.
            media: What `media_wire` says of the media of each; none where there are none.
            sampling: How tokens are drawn.
            extra_key: Prompts with another one share no cache with these.
            num_top: How many most probable tokens are wanted with each.
        Raises:
            ServerRefused: The server does not take the request.
            ServerGone: It broke off.
        """
        drawn = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "skip_special_tokens": False,
        }
        body = {
            "input_ids": [prompt["input_ids"] for prompt in prompts],
            "rid": [prompt["rid"] for prompt in prompts],
            "sampling_params": [
                drawn
                | {
                    "max_new_tokens": prompt["max_new_tokens"],
                    "stop_token_ids": prompt["stop_token_ids"],
                }
                for prompt in prompts
            ],
            "extra_key": [extra_key] * len(prompts),
            "return_logprob": True,
            "top_logprobs_num": num_top,
            "stream": True,
            **({"image_data": [[one] for one in media]} if media else {}),
        }
        start = min(prompt["num_routed"] for prompt in prompts)  # one for the whole request
        if self.records_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": start}
        what = f"POST {self.url}/generate"
        async with AsyncExitStack() as stack:
            timeout = self._http.Timeout(
                None, connect=CONNECT_SECONDS
            )  # what comes too slowly is noticed by whoever waits for all of it
            try:
                opened = self._client.stream(
                    "POST", "/generate", content=orjson.dumps(body), headers=JSON, timeout=timeout
                )
                response = await stack.enter_async_context(opened)
                if response.is_server_error:
                    raise ServerGone(f"{what}: status {response.status_code}")
                if response.is_error:
                    raise ServerRefused(
                        f"{what}: status {response.status_code}: "
                        f"{await _beginning(response.aiter_bytes())!r}"
                    )
                async for data in _server_sent(
                    response.aiter_bytes(),
                    what=what,
                    max_bytes=self._max_event_bytes(prompts, num_top=num_top),
                ):
                    yield self._checked(orjson.loads(data), experts_start=start)
            except (self._http.RequestError, self._http.StreamError) as error:
                raise ServerGone(f"{what}: {type(error).__name__}: {error}") from error

    async def abort(self, rid: str) -> None:
        """End a request before its time; its last answer brings what it has. An unknown one is
        passed over.
        """
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        """Hold all generation: `retract` gives its cache up, `in_place` keeps it."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        """Undo `pause`."""
        await self._call("POST", "/continue_generation", {})

    async def load_weights(self, folder: Path, *, name: str, flush_cache: bool) -> None:
        """Load a folder's weights; tokens from here on say the name.

        Raises:
            ServerRefused: They are not loaded, or only in part.
            ServerGone: Nobody knows.
        """
        body = {"model_path": str(folder), "weight_version": name, "flush_cache": flush_cache}
        reply = await self._call(
            "POST", "/update_weights_from_disk", body, seconds=self._weights_seconds
        )
        if not reply.get("success"):
            raise ServerRefused(f"POST {self.url}/update_weights_from_disk: {reply.get('message')}")

    async def checksums(self) -> dict[str, str]:
        """Return the digest of every tensor that the server holds; of several ranks, none, since
        each has a part.
        """
        reply = await self._call(
            "POST", "/weights_checker", {"action": "checksum"}, seconds=self._weights_seconds
        )
        ranks = reply.get("ranks") or []
        found: dict[str, str] = ranks[0]["checksums"] if len(ranks) == 1 else {}
        return found

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        try:
            response = await self._client.request(
                method,
                path,
                json=body,
                timeout=self._http.Timeout(seconds, connect=CONNECT_SECONDS),
            )
        except self._http.RequestError as error:
            raise ServerGone(
                f"{method} {self.url}{path} within {seconds:g} s: {type(error).__name__}: {error}"
            ) from error
        if response.is_error:
            raise ServerRefused(
                f"{method} {self.url}{path}: status {response.status_code}: {response.text[:500]}"
            )
        found: dict[str, Any] = response.json() if response.content else {}
        return found

    def _max_event_bytes(self, prompts: Sequence[dict[str, Any]], *, num_top: int) -> int:
        """Return the most bytes that an event can have: that of the longest prompt, if all its
        tokens came at once.
        """
        num_new = max(prompt["max_new_tokens"] for prompt in prompts)
        num_tokens = max(len(prompt["input_ids"]) + prompt["max_new_tokens"] for prompt in prompts)
        most: int = (
            EVENT_BYTES
            + num_new * (TOKEN_BYTES + num_top * TOP_TOKEN_BYTES)
            + num_tokens * self._model.told_expert_bytes
        )
        return most

    def _checked(self, event: dict[str, Any], *, experts_start: int) -> dict[str, Any]:
        """Return what came for a prompt; the experts as an array, with the number of the first
        token that they are of.
        """
        if "error" in event:
            said = event["error"]
            raise ServerRefused(
                f"POST {self.url}/generate: "
                f"{said.get('message', said) if isinstance(said, dict) else said}"
            )
        if (experts := event["meta_info"].get("routed_experts")) is not None:
            event["routed_experts"] = experts_start, self._model.chosen_experts(experts)
        return event


JSON = {"Content-Type": "application/json"}


async def _server_sent(
    chunks: AsyncIterator[bytes], *, what: str, max_bytes: int
) -> AsyncIterator[bytes]:
    """Give the data of each event of a stream. Each byte is searched once and copied as often as
    any other, in however many pieces an event comes.

    Args:
        chunks: As they come.
        what: The request, for errors.
        max_bytes: That an event may have.
    Raises:
        ServerRefused: One has more.
    """
    begun = bytearray()
    """What has come of an event that has not ended."""
    async for chunk in chunks:
        searched = max(0, len(begun) - 1)  # the end may be cut in two
        begun += chunk
        start = 0
        while (end := begun.find(END_OF_EVENT, max(start, searched))) >= 0:
            _require_fits(end - start, max_bytes, what)
            data = bytes(begun[start:end]).removeprefix(b"data: ")
            start = end + len(END_OF_EVENT)
            if data and data != END_OF_STREAM:
                yield data
        del begun[:start]
        _require_fits(len(begun), max_bytes, what)


def _require_fits(num_bytes: int, max_bytes: int, what: str) -> None:
    if num_bytes > max_bytes:
        most = f"the tokens that were asked for take at most {max_bytes}"
        raise ServerRefused(
            f"{what}: an event of the answer has {num_bytes} bytes or more, and {most}; is "
            f"it an SGLang server of {SUPPORTED[-1]}?"
        )


async def _beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the first bytes of an answer, for an error."""
    begun = b""
    async for chunk in chunks:
        begun += chunk
        if len(begun) >= SHOWN_BYTES:
            break
    return begun[:SHOWN_BYTES]
