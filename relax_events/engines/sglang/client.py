"""HTTP client of an SGLang server; each call has a deadline. Only this module knows SGLang's
API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import orjson

from relax_events.config import SamplingConfig
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.generate_body import add_seeds, build_generate_body
from relax_events.engines.sglang.media_features import FORMAT
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.http.tls import open_client_context

SUPPORTED_VERSIONS = ("0.5.23",)
"""Tested versions; SGLang's API changes monthly, including the start and end of weight updates."""
CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
"""Deadline of a call that touches no weights."""
IDLE_SECONDS = 20.0
"""How long a server may take to be idle after its last request has ended."""
UNAUTHORIZED, NOT_FOUND = 401, 404
END_OF_EVENT, END_OF_STREAM = b"\n\n", b"[DONE]"
EVENT_BYTES, TOKEN_BYTES, TOP_TOKEN_BYTES = 1024**2, 1024, 128
"""Size limits of an event: the base, each token (id, log-probability, version, text), and each of
the most probable tokens.
"""
ERROR_BODY_BYTES = 500
"""Bytes of an error response that are quoted."""
PauseMode = Literal["retract", "in_place"]


class ServerRejected(Exception):
    """The server rejected a call; the text names the call and the response."""


class ServerUnavailable(Exception):
    """The server did not respond within the deadline, or closed the connection."""


class SGLangClient:
    """The calls that the engine needs. Used in one event loop."""

    def __init__(
        self,
        url: str,
        *,
        model: ModelFolder,
        weights_seconds: float,
        token: str = "",
        ca_file: Path | None = None,
    ) -> None:
        """Create the client; it connects with the first call.

        Args:
            url: The server's URL, without a path.
            model: The served model.
            weights_seconds: Deadline of a call that loads or hashes all weights.
            token: That the server requires; empty sends none.
            ca_file: The authority that is trusted; None takes the machine's authorities.
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
        self._takes_seeds = False
        # No connection is reused: SGLang closes idle ones after 5 s, and in 100 steps 130 turns
        # were sent on a connection that was just closing.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            limits=limits,
            timeout=CONTROL_SECONDS,
            trust_env=False,
            verify=open_client_context(ca_file, name="engine.sglang.ca_file")
            if ca_file is not None
            else True,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    @property
    def records_experts(self) -> bool:
        """Whether the server records the experts of each token."""
        return self._model.experts is not None

    async def close(self) -> None:
        """Close the client and cancel in-flight calls."""
        await self._client.aclose()

    async def is_ready(self) -> bool:
        """Return whether the server accepts requests.

        Raises:
            ConfigError: It is not a supported SGLang server, it is a router in front of some, or
                it requires another token.
        """
        try:
            response = await self._client.get("/ready", timeout=CONNECT_SECONDS)
        except self._http.RequestError:
            return False
        if response.status_code == UNAUTHORIZED:
            raise ConfigError(
                f"{self.url} requires a token, or another one; name its file as "
                "engine.sglang.token_file"
            )
        if response.status_code == NOT_FOUND:
            raise ConfigError(
                f"{self.url} is not a supported SGLang server, it has no /ready; name servers of "
                f"SGLang {SUPPORTED_VERSIONS[-1]} in engine.sglang.urls, and not a router in "
                "front of them: it forwards no weights"
            )
        return bool(response.status_code == 200)

    async def require_supported(self, *, takes_media: bool) -> None:
        """Reject a server of another version or output format, or a server that accepts no media
        for a model that reads them.

        Raises:
            ConfigError: The text names the problem and the remedy.
            ServerUnavailable, ServerRejected: The call failed.
        """
        info = await self._call("GET", "/server_info")
        if (version := info.get("version")) not in SUPPORTED_VERSIONS:
            raise ConfigError(
                f"engine 'sglang' works with SGLang {', '.join(SUPPORTED_VERSIONS)}, and "
                f"{self.url} is {version}; install sglang=={SUPPORTED_VERSIONS[-1]} where the "
                "server runs"
            )
        if not info.get("incremental_streaming_output"):
            raise ConfigError(
                f"the SGLang server at {self.url} repeats all tokens with each event; start "
                "it with --incremental-streaming-output"
            )
        self._takes_seeds = bool(info.get("enable_deterministic_inference"))
        states = info.get("internal_states") or [{}]
        if takes_media and states[0].get("media_format") != FORMAT:
            raise ConfigError(
                f"the model reads media, and the SGLang server at {self.url} accepts none in "
                f"the format {FORMAT}; install this version of relax-events in the interpreter of "
                "sglang, for its plugin"
            )
        if self.records_experts and not info.get("enable_return_routed_experts"):
            raise ConfigError(
                f"the SGLang server at {self.url} does not record the experts of each token, "
                "which model.routing_replay = 'rollout' needs; start it with "
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
        """Generate for several prompts; yield the events as they arrive. A prompt's last event has
        the experts of its tokens.

        Args:
            prompts: `rid`, `input_ids`, `max_new_tokens`, `stop_token_ids`, `num_routed` and `seed`
                of each; `num_routed` is the number of first tokens whose experts are already
                recorded. A server that is not deterministic is sent no seeds.
            media: The output of `media_features.build_image_data`; empty without media.
            sampling: Sampling parameters.
            extra_key: Prompts with different keys share no cache.
            num_top: Number of most probable tokens to return with each sampled token.
        Raises:
            ServerRejected: The server rejects the request.
            ServerUnavailable: The connection broke.
        """
        body = build_generate_body(
            prompts, media=media, sampling=sampling, extra_key=extra_key, num_top=num_top
        )
        if self._takes_seeds:
            add_seeds(body, [prompt["seed"] for prompt in prompts])
        start = min(prompt["num_routed"] for prompt in prompts)  # one for the whole request
        if self.records_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": start}
        what = f"POST {self.url}/generate"
        async with AsyncExitStack() as stack:
            timeout = self._http.Timeout(
                None, connect=CONNECT_SECONDS
            )  # the lifecycle detects a stalled server
            try:
                opened = self._client.stream(
                    "POST", "/generate", content=orjson.dumps(body), headers=JSON, timeout=timeout
                )
                response = await stack.enter_async_context(opened)
                if response.is_server_error:
                    raise ServerUnavailable(f"{what}: status {response.status_code}")
                if response.is_error:
                    raise ServerRejected(
                        f"{what}: status {response.status_code}: "
                        f"{await _read_beginning(response.aiter_bytes())!r}"
                    )
                async for data in _read_events(
                    response.aiter_bytes(),
                    what=what,
                    max_bytes=self._max_event_bytes(prompts, num_top=num_top),
                ):
                    yield self._parse_event(orjson.loads(data), experts_start=start)
            except (self._http.RequestError, self._http.StreamError) as error:
                raise ServerUnavailable(f"{what}: {type(error).__name__}: {error}") from error

    async def abort(self, rid: str) -> None:
        """Abort a request; its last event has the remaining tokens. An unknown id is ignored."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        """Pause all generation: `retract` drops its cache, `in_place` keeps it."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Wait until no request runs, and drop the prefix cache.

        Raises:
            ServerRejected: Requests still run.
            ServerUnavailable: The result is unknown.
        """
        await self._send("POST", f"/flush_cache?timeout={IDLE_SECONDS:g}")

    async def release_memory(self) -> None:
        """Release the memory of weights, cache and graphs; the server must be idle, or it dies.

        Raises:
            ServerRejected, ServerUnavailable: The result is unknown.
        """
        await self._send("POST", "/release_memory_occupation", {}, seconds=self._weights_seconds)

    async def resume_memory(self) -> None:
        """Take again what `release_memory` released, only once; errors as for it."""
        await self._send("POST", "/resume_memory_occupation", {}, seconds=self._weights_seconds)

    async def load_weights(self, folder: Path, *, name: str, flush_cache: bool) -> None:
        """Load a folder's weights; later tokens carry the name.

        Raises:
            ServerRejected: They are not loaded, or only in part.
            ServerUnavailable: The result is unknown.
        """
        body = {"model_path": str(folder), "weight_version": name, "flush_cache": flush_cache}
        await self._require_success(
            "/update_weights_from_disk", body, seconds=self._weights_seconds
        )

    async def checksums(self) -> list[dict[str, str]]:
        """Return the digest of every tensor that the server holds, for each of its ranks."""
        reply = await self._call(
            "POST", "/weights_checker", {"action": "checksum"}, seconds=self._weights_seconds
        )
        return [rank["checksums"] for rank in reply.get("ranks") or []]

    async def require_one_group(self) -> int:
        """Return the number of tensor-parallel ranks, which are all ranks of the server.

        Raises:
            ConfigError: The server has several pipeline stages, or several data-parallel parts.
            ServerUnavailable, ServerRejected: The call failed.
        """
        info = await self._call("GET", "/server_info")
        for key in ("pp_size", "dp_size"):
            if info.get(key, 1) != 1:
                raise ConfigError(
                    f"engine.sglang.weight_updates = 'distributed' needs {key} = 1, and the server "
                    f"at {self.url} has {info[key]}; set weight_updates = 'disk'"
                )
        return int(info.get("tp_size", 1))

    async def join_weight_group(
        self, host: str, port: int, *, name: str, num_ranks: int, seconds: float
    ) -> None:
        """Have the server's ranks join a group over gloo, after its rank 0.

        Raises:
            ServerRejected: They did not join.
            ServerUnavailable: The result is unknown.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": num_ranks,
            "group_name": name,
            "backend": "gloo",
        }
        await self._require_success("/init_weights_update_group", body, seconds=seconds)

    async def leave_weight_group(self, name: str, *, seconds: float) -> None:
        """Have the server's ranks leave a group; errors as for `join_weight_group`."""
        body = {"group_name": name}
        await self._require_success("/destroy_weights_update_group", body, seconds=seconds)

    async def begin_weight_update(self) -> None:
        """Begin to load weights by `receive_bucket`; errors as for it."""
        await self._require_success("/begin_weight_update", {}, seconds=self._weights_seconds)

    async def end_weight_update(self) -> None:
        """End what `begin_weight_update` began; errors as for `receive_bucket`."""
        await self._require_success("/end_weight_update", {}, seconds=self._weights_seconds)

    async def receive_bucket(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Have the server receive one broadcast of a group, and load its tensors.

        Args:
            names: Of the tensors, in the order of their bytes.
            dtypes: Of each.
            shapes: Of each.
            group: The group's name.
            weight_version: What later tokens carry; None before the last bucket.
            flush_cache: Drop the prefix cache afterwards.
        Raises:
            ServerRejected: The tensors are not loaded.
            ServerUnavailable: The result is unknown.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": flush_cache,
            "load_format": "flattened_bucket",
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._require_success(
            "/update_weights_from_distributed", body, seconds=self._weights_seconds
        )

    async def _require_success(self, path: str, body: dict[str, Any], *, seconds: float) -> None:
        reply = await self._call("POST", path, body, seconds=seconds)
        if not reply.get("success"):
            raise ServerRejected(f"POST {self.url}{path}: {reply.get('message')}")

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        response = await self._send(method, path, body, seconds=seconds)
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = CONTROL_SECONDS,
    ) -> Any:
        try:
            response = await self._client.request(
                method,
                path,
                json=body,
                timeout=self._http.Timeout(seconds, connect=CONNECT_SECONDS),
            )
        except self._http.RequestError as error:
            raise ServerUnavailable(
                f"{method} {self.url}{path} within {seconds:g} s: {type(error).__name__}: {error}"
            ) from error
        if response.is_error:
            raise ServerRejected(
                f"{method} {self.url}{path}: status {response.status_code}: {response.text[:500]}"
            )
        return response

    def _max_event_bytes(self, prompts: Sequence[dict[str, Any]], *, num_top: int) -> int:
        """Return the largest possible size of an event: all tokens of the longest prompt at
        once.
        """
        num_new = max(prompt["max_new_tokens"] for prompt in prompts)
        num_tokens = max(len(prompt["input_ids"]) + prompt["max_new_tokens"] for prompt in prompts)
        most: int = (
            EVENT_BYTES
            + num_new * (TOKEN_BYTES + num_top * TOP_TOKEN_BYTES)
            + num_tokens * self._model.max_expert_bytes_per_token
        )
        return most

    def _parse_event(self, event: dict[str, Any], *, experts_start: int) -> dict[str, Any]:
        """Return a parsed event; the experts as an array, with the index of their first token."""
        if "error" in event:
            error = event["error"]
            raise ServerRejected(
                f"POST {self.url}/generate: "
                f"{error.get('message', error) if isinstance(error, dict) else error}"
            )
        if (experts := event["meta_info"].get("routed_experts")) is not None:
            event["routed_experts"] = experts_start, self._model.decode_experts(experts)
        return event


JSON = {"Content-Type": "application/json"}


async def _read_events(
    chunks: AsyncIterator[bytes], *, what: str, max_bytes: int
) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Each byte is searched once, however many chunks an
    event spans.

    Args:
        chunks: The response's bytes as they arrive.
        what: The request, for errors.
        max_bytes: Limit of an event.
    Raises:
        ServerRejected: An event is larger.
    """
    begun = bytearray()
    """The beginning of an incomplete event."""
    async for chunk in chunks:
        searched = max(0, len(begun) - 1)  # the delimiter may span two chunks
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
        raise ServerRejected(
            f"{what}: an event of the response has {num_bytes} bytes or more, and the requested "
            f"tokens take at most {max_bytes}; is it an SGLang server of {SUPPORTED_VERSIONS[-1]}?"
        )


async def _read_beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the first bytes of a response, for an error."""
    begun = b""
    async for chunk in chunks:
        begun += chunk
        if len(begun) >= ERROR_BODY_BYTES:
            break
    return begun[:ERROR_BODY_BYTES]
