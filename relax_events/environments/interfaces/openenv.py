"""Environments on a server of OpenEnv, over its WebSocket protocol: one connection for each sample,
with `reset`, `step` and `close`. The server's HTTP routes keep no state between two requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from relax_events.environments.interfaces.contents import read_observation
from relax_events.environments.interfaces.protocol import (
    Observation,
    Opening,
    Task,
    read_reward,
)
from relax_events.environments.interfaces.server_bounds import ServerBounds, read_object
from relax_events.environments.reply import Reply
from relax_events.errors import ConfigError, EnvironmentProblem, EpisodeFailed

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed

SCHEMES = {"http://": "ws://", "https://": "wss://", "ws://": "ws://", "wss://": "wss://"}
MISTAKES = ("VALIDATION_ERROR",)
"""Errors that an action of the policy causes; it reads them."""
MESSAGE_TOO_BIG = 1009
"""Code with which the client closes a connection on a message beyond its bound."""


class OpenEnvAdapter:
    """Connects to one server. Options: `action_field`, the field of an action that a turn's text
    becomes (`message`); or `actions = "json"`, where a turn is the JSON of an action.
    `text_field` and `image_field` name what the policy is shown of an observation; without them it
    is shown as JSON. `reset` has arguments for each reset.
    """

    is_concurrent = True
    takes_files = False

    def __init__(self, address: str, options: Mapping[str, Any], *, bounds: ServerBounds) -> None:
        """Check the address and the package.

        Args:
            address: Of the server: http or https, or ws or wss.
            options: See the class.
            bounds: Of the server's messages.
        Raises:
            ConfigError: The address or an option is unknown.
            EnvironmentProblem: The package websockets is not installed.
        """
        try:
            import websockets
        except ImportError as error:
            raise EnvironmentProblem(
                f"environment.interface = 'openenv' needs the package websockets ({error}); "
                "install relax-events[environments]"
            ) from None
        del websockets
        allowed_options = ("action_field", "actions", "text_field", "image_field", "reset")
        if unknown := [name for name in options if name not in allowed_options]:
            raise ConfigError(
                f"environment.options.{unknown[0]} is unknown to interface 'openenv', which takes "
                f"{', '.join(allowed_options)}"
            )
        self._options, self._url, self._bounds = options, build_url(address), bounds

    def begin(self, task: Task) -> OpenEnvSession:
        """See `Adapter`."""
        return OpenEnvSession(self._url, self._options, task, bounds=self._bounds)


class OpenEnvSession:
    """A sample's connection; see `Session`."""

    def __init__(
        self, url: str, options: Mapping[str, Any], task: Task, *, bounds: ServerBounds
    ) -> None:
        self._url, self._options, self._task, self._bounds = url, options, task, bounds
        self._socket: Any = None

    async def open(self) -> Opening:
        """Connect and reset; `seed` and `reset` of the row's metadata are given to the reset.

        Raises:
            EpisodeFailed: The server does not answer, is full, or fails.
        """
        from websockets.exceptions import WebSocketException

        try:
            self._socket = await _connect(self._url, self._bounds)
        except (OSError, WebSocketException) as error:
            raise EpisodeFailed(f"no connection to {self._url}: {error}") from None
        metadata = self._task.metadata
        arguments = {
            "seed": metadata.get("seed", self._task.seed),
            "episode_id": self._task.sample_id[-255:],
            **self._options.get("reset", {}),
            **metadata.get("reset", {}),
        }
        result = await self._exchange({"type": "reset", "data": arguments})
        reply = self._read(result.get("observation"))
        return Opening(messages=[] if reply is None else [reply])

    async def step(self, completion: str) -> Observation:
        """Take a turn as an action; the policy reads why the server refuses an action.

        Raises:
            EpisodeFailed: The server is gone or fails.
        """
        action = self._read_action(completion)
        if isinstance(action, Reply):
            return Observation(replies=[action], reward=0.0)
        result = await self._exchange({"type": "step", "data": action})
        if "refused" in result:
            return Observation(replies=[Reply(result["refused"])], reward=0.0)
        reply = self._read(result.get("observation"))
        return Observation(
            replies=[] if reply is None else [reply],
            is_over=bool(result.get("done")),
            reward=read_reward(result.get("reward")),
        )

    async def close(self) -> None:
        """End the session on the server."""
        if self._socket is not None:
            from websockets.exceptions import ConnectionClosed

            try:
                await self._socket.send('{"type": "close"}')
                await self._socket.close()
            except ConnectionClosed:  # the server was faster
                return

    def _read_action(self, completion: str) -> dict[str, Any] | Reply:
        if self._options.get("actions") != "json":
            return {self._options.get("action_field", "message"): completion}
        try:
            action = orjson.loads(completion)
        except orjson.JSONDecodeError:
            action = None
        if not isinstance(action, dict):
            return Reply("the action is not the JSON of an object")
        return action

    def _read(self, observation: Any) -> Reply | None:
        if not isinstance(observation, dict):
            raise EpisodeFailed(
                f"the server {self._url} sent {type(observation).__name__} as observation; it must "
                "be an object"
            )
        text, image = (
            self._options.get(name) and observation.get(self._options[name])
            for name in ("text_field", "image_field")
        )
        if text is None and image is None and not self._names_fields:
            return read_observation(observation)
        if image is not None and image != "":
            return read_observation({"text": text, "image": image})
        return read_observation(text)

    @property
    def _names_fields(self) -> bool:
        return "text_field" in self._options or "image_field" in self._options

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(orjson.dumps(message).decode())
            text = await self._socket.recv()
        except ConnectionClosed as error:
            raise EpisodeFailed(self._describe_end(error)) from None
        answer = read_object(text, source=f"the server {self._url}")
        data = answer.get("data") or {}
        if not isinstance(data, dict):
            raise EpisodeFailed(f"the server {self._url} sent {type(data).__name__} as data")
        if answer.get("type") != "error":
            return data
        message_text = f"{data.get('message')!s:.1000}"
        if message["type"] == "step" and data.get("code") in MISTAKES:
            return {"refused": f"error: {message_text}: {data.get('errors', '')!s:.1000}"}
        raise EpisodeFailed(
            f"the server {self._url} failed on {message['type']}: {data.get('code')!s:.100}: "
            f"{message_text}"
        )

    def _describe_end(self, error: ConnectionClosed) -> str:
        if error.sent is not None and error.sent.code == MESSAGE_TOO_BIG:
            return f"the server {self._url} sent a message of more than {self._bounds.describe()}"
        return f"the server {self._url} is gone: {error}"


async def _connect(url: str, bounds: ServerBounds) -> ClientConnection:
    """Connect to a server; a redirect is an error, because it may lead to any address."""
    from websockets.asyncio.client import connect

    class DirectConnection(connect):
        def process_redirect(self, exc: Exception) -> Exception:
            return exc

    return await DirectConnection(
        url,
        max_size=bounds.max_message_bytes,
        max_queue=1,
        compression=None,
        open_timeout=bounds.open_seconds,
    )


def build_url(address: str) -> str:
    """Return the address of a server's WebSocket.

    Raises:
        ConfigError: It has another scheme.
    """
    for scheme, other in SCHEMES.items():
        if address.startswith(scheme):
            url = other + address.removeprefix(scheme).rstrip("/")
            return url if url.endswith("/ws") else f"{url}/ws"
    raise ConfigError(
        f"environment.address = {address!r} must begin with http://, https://, ws:// or wss://"
    )
