"""Environments on a server of OpenEnv, over its WebSocket protocol: one connection for each sample,
with `reset`, `step` and `close`. The server's HTTP routes keep no state between two requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from relax_events.environments.interfaces.contents import read_observation
from relax_events.environments.interfaces.protocol import (
    Observation,
    Opening,
    Task,
    read_reward,
)
from relax_events.environments.reply import Reply
from relax_events.errors import ConfigError, EnvironmentProblem, EpisodeFailed

MAX_MESSAGE_BYTES = 100 * 1024**2
SCHEMES = {"http://": "ws://", "https://": "wss://", "ws://": "ws://", "wss://": "wss://"}
MISTAKES = ("VALIDATION_ERROR",)
"""Errors that an action of the policy causes; it reads them."""


class OpenEnvAdapter:
    """Connects to one server. Options: `action_field`, the field of an action that a turn's text
    becomes (`message`); or `actions = "json"`, where a turn is the JSON of an action.
    `text_field` and `image_field` name what the policy is shown of an observation; without them it
    is shown as JSON. `reset` has arguments for each reset.
    """

    is_concurrent = True
    takes_files = False

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        """Check the address and the package.

        Args:
            address: Of the server: http or https, or ws or wss.
            options: See the class.
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
        known = ("action_field", "actions", "text_field", "image_field", "reset")
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(
                f"environment.options.{unknown[0]} is unknown to interface 'openenv', which takes "
                f"{', '.join(known)}"
            )
        self._options, self._url = options, build_url(address)

    def begin(self, task: Task) -> OpenEnvSession:
        """See `Adapter`."""
        return OpenEnvSession(self._url, self._options, task)


class OpenEnvSession:
    """A sample's connection; see `Session`."""

    def __init__(self, url: str, options: Mapping[str, Any], task: Task) -> None:
        self._url, self._options, self._task = url, options, task
        self._socket: Any = None

    async def open(self) -> Opening:
        """Connect and reset; `seed` and `reset` of the row's metadata are given to the reset.

        Raises:
            EpisodeFailed: The server does not answer, is full, or fails.
        """
        from websockets.asyncio.client import connect

        try:
            self._socket = await connect(self._url, max_size=MAX_MESSAGE_BYTES, open_timeout=None)
        except OSError as error:
            raise EpisodeFailed(f"no connection to {self._url}: {error}") from None
        metadata = self._task.metadata
        arguments = {
            "seed": metadata.get("seed", self._task.seed),
            "episode_id": self._task.sample_id[-255:],
            **self._options.get("reset", {}),
            **metadata.get("reset", {}),
        }
        result = await self._exchange({"type": "reset", "data": arguments})
        reply = self._read(result["observation"])
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
        reply = self._read(result["observation"])
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

    def _read(self, observation: Mapping[str, Any]) -> Reply | None:
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
            answer = orjson.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise EpisodeFailed(f"the server {self._url} is gone: {error}") from None
        data: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return data
        if message["type"] == "step" and data.get("code") in MISTAKES:
            return {"refused": f"error: {data.get('message')}: {data.get('errors', '')}"[:2000]}
        raise EpisodeFailed(
            f"the server {self._url} failed on {message['type']}: {data.get('code')}: "
            f"{data.get('message')}"
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
