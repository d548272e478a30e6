"""MCP servers as the tools of a sample, over streamable HTTP or as programs over stdio, by the
official package `mcp`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from relax_events.environments.interfaces.contents import as_text
from relax_events.environments.interfaces.protocol import Observation, Opening, Task
from relax_events.environments.interfaces.server_bounds import ServerBounds, check_depth
from relax_events.environments.reply import Reply
from relax_events.environments.tool_calls import ToolCall, read_tool_calls
from relax_events.errors import ConfigError, EnvironmentProblem, EpisodeFailed

MAX_CALLS_OF_TURN = 8
CONNECTION_CLOSED, REQUEST_TIMEOUT = -32000, -32001
"""Codes of MCP errors that are not an answer of the server."""
MAX_TOOLS = 256
"""Of all servers together; a prompt has no room for more."""
MAX_PAGES = 64
"""Of one server's list of tools, which is empty pages without end where a server wants it."""


class McpAdapter:
    """Connects each sample to all servers of the run file: a program is started for each sample."""

    is_concurrent = True
    takes_files = False

    def __init__(self, servers: Mapping[str, Mapping[str, Any]], *, bounds: ServerBounds) -> None:
        """Check that the package and the servers' programs are there.

        Args:
            servers: Each with a `command` or an `address`, by name.
            bounds: Of each server's messages.
        Raises:
            ConfigError: There is no such program.
            EnvironmentProblem: The package is not installed.
        """
        try:
            import mcp
        except ImportError as error:
            raise EnvironmentProblem(
                f"environment.interface = 'mcp' needs the package mcp ({error}); install "
                "relax-events[environments]"
            ) from None
        del mcp
        for name, server in servers.items():
            if server["command"] and shutil.which(server["command"][0]) is None:
                raise ConfigError(
                    f"environment.tool_servers.{name}.command: there is no program "
                    f"{server['command'][0]!r}; give its path, or a name on PATH"
                )
        self._servers, self._bounds = servers, bounds

    def begin(self, task: Task) -> McpSession:
        """See `Adapter`."""
        return McpSession(self._servers, task, bounds=self._bounds)


class McpSession:
    """The connections of one sample; see `Session`. One task opens and closes them, as the package
    demands.
    """

    def __init__(
        self, servers: Mapping[str, Mapping[str, Any]], task: Task, *, bounds: ServerBounds
    ) -> None:
        self._servers, self._task, self._bounds = servers, task, bounds
        self._clients: dict[str, Any] = {}
        """The client of each tool."""
        self._is_ending = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def open(self) -> Opening:
        """Connect to the servers and list their tools, which the prompt then shows."""
        opened: asyncio.Future[Opening] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.get_running_loop().create_task(self._hold(opened))
        return await opened

    async def step(self, completion: str) -> Observation:
        """Run the tool calls of a turn; a turn without one ends the sample.

        Raises:
            EpisodeFailed: A server is gone.
        """
        calls = read_tool_calls(completion)[:MAX_CALLS_OF_TURN]
        if not calls:
            return Observation(is_over=True)
        return Observation(replies=[await self._run(call) for call in calls])

    async def close(self) -> None:
        """Disconnect, and end the programs."""
        self._is_ending.set()
        if self._owner is not None:
            await asyncio.gather(self._owner, return_exceptions=True)

    async def _hold(self, opened: asyncio.Future[Opening]) -> None:
        """Hold the connections until the session ends."""
        try:
            async with AsyncExitStack() as stack:
                tools: list[dict[str, Any]] = []
                for name, server in self._servers.items():
                    tools += await self._connect(stack, name, server)
                self._check_tools(tools)
                opened.set_result(Opening(tools=tools))
                await self._is_ending.wait()
        except Exception as error:  # of a server, by any of the package's layers
            if not opened.done():
                opened.set_exception(EpisodeFailed(f"no connection to a tool server: {error!r}"))
            elif not self._is_ending.is_set():
                self._is_ending.set()

    async def _connect(
        self, stack: AsyncExitStack, name: str, server: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        client = await stack.enter_async_context(await self._client(stack, server))
        tools: list[dict[str, Any]] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in self._clients:
                    raise EpisodeFailed(
                        f"two servers have a tool {tool.name!r:.100}, one of them {name}; leave "
                        "one out"
                    )
                self._clients[tool.name] = client
                tools.append(describe_tool(tool))
            if len(tools) > MAX_TOOLS or not (cursor := page.next_cursor):
                return tools
        raise EpisodeFailed(f"tool server {name} lists its tools on more than {MAX_PAGES} pages")

    async def _client(self, stack: AsyncExitStack, server: Mapping[str, Any]) -> Any:
        """Return a client whose requests have a deadline and whose responses a bound."""
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        from relax_events.environments.interfaces.bounded_client import open_bounded_client

        if server["command"]:
            program, *arguments = server["command"]
            where: Any = StdioServerParameters(command=program, args=arguments)
        else:
            http_client = await stack.enter_async_context(open_bounded_client(self._bounds))
            where = streamable_http_client(
                server["address"],
                http_client=http_client,
                max_sse_event_size=self._bounds.max_message_bytes,
            )
        return Client(where, read_timeout_seconds=self._bounds.request_seconds)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse tools that fill the prompt or the pipe to the worker.

        Raises:
            EpisodeFailed: They are too many, too large, or nested too deeply.
        """
        if len(tools) > MAX_TOOLS:
            raise EpisodeFailed(
                f"the tool servers have more than {MAX_TOOLS} tools; leave some out"
            )
        check_depth(list(tools), source="a tool server")
        num_bytes = len(as_text(list(tools)))
        if num_bytes > self._bounds.max_reply_bytes:
            raise EpisodeFailed(
                f"the tools have {num_bytes} characters as JSON; they must have at most "
                f"{self._bounds.max_reply_bytes} bytes"
            )

    async def _run(self, call: ToolCall) -> Reply:
        """Run a tool call. What the policy did wrong is a text for it, not an error."""
        from mcp import MCPError

        if call.error:
            return Reply(call.error, role="tool")
        client = self._clients.get(call.name)
        if client is None:
            names = ", ".join(self._clients)
            return Reply(f"there is no tool {call.name!r}, only {names}", role="tool")
        if self._is_ending.is_set():
            raise EpisodeFailed(f"the server of tool {call.name!r} is gone")
        try:
            result = await client.call_tool(call.name, dict(call.arguments))
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise EpisodeFailed(f"the server of tool {call.name!r} is gone: {error}") from None
            return Reply(f"error: {error!s:.2000}", role="tool")
        return read_result(result.content)


def describe_tool(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's format, which chat templates show."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def read_result(content: Sequence[Any]) -> Reply:
    """Return a tool's result as a message: its texts and images in order, other content as JSON."""
    texts: list[str] = []
    images: list[bytes | str] = []
    for part in content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "image":
            texts.append("<image>")
            images.append(f"data:{part.mime_type};base64,{part.data}")
        else:
            texts.append(as_text(part.model_dump(mode="json", exclude_none=True)))
    return Reply("".join(texts), {"image": images} if images else {}, role="tool")
