"""An MCP server of tests, by the official package: `python tool_server.py` over stdio, with a port
over HTTP.
"""

import base64
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAK0lEQVR4nO3NQQEAAATAQATRP4pYSvC7BdjldMdn"
    "9XoHAAAAAAAAAAAAhy3gBQFE4naZuwAAAABJRU5ErkJggg=="
)
server = MCPServer("tests")
state = {"total": 0}


@server.tool()
def add(number: int) -> str:
    """Add a number to the total of this session."""
    state["total"] += number
    return f"total {state['total']}"


@server.tool()
def show() -> Image:
    """Show an image."""
    return Image(data=PIXEL, format="png")


@server.tool()
def die(folder: str) -> str:
    """End the server, the first time."""
    mark = Path(folder) / "died"
    if mark.exists():
        return "alive"
    mark.touch()
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
