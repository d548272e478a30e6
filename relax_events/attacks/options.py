"""Options of a hostile run description, and secrets that a run file must not hold."""

from __future__ import annotations

from typing import Any

UNPROTECTED: tuple[Any, ...] = (1, "yes", "true", 1.5)
"""Values that some code would take for true, of `allow_unprotected`."""

SECRET = "hunter2-hunter2"  # noqa: S105  of no account
SECRET_OPTIONS = (
    f'reward.options={{headers={{Authorization="Bearer {SECRET}"}}}}',
    f'reward.options={{auth="Bearer {SECRET}"}}',
    f'reward.options={{model="sk-proj-{SECRET}"}}',
    f'reward.options={{api_key="{SECRET}"}}',
    f'reward.options={{url="https://svc/score?key={SECRET}"}}',
    f'reward.options={{headers=["X-Api-Key: {SECRET}"]}}',
    f'reward.routes={{math={{options={{password="{SECRET}"}}}}}}',
    f'environment.options={{token="{SECRET}"}}',
    f'environment.options={{settings="user=me;password={SECRET}"}}',
    f'environment.command=["agent", "--api-key={SECRET}"]',
    f'environment.command=["agent", "--api-key", "{SECRET}"]',
    f'environment.command=["sh", "-c", "OPENAI_API_KEY={SECRET} agent"]',
    f'environment.command=["curl", "-H", "Authorization: Basic {SECRET}"]',
    f'environment.tool_servers={{web={{command=["server", "--token", "{SECRET}"]}}}}',
    f'engine.sglang.arguments=["--api-key", "{SECRET}"]',
    f'engine.sglang.arguments=["--admin-api-key={SECRET}"]',
    f'algorithm.options={{table="hf_{SECRET}-{SECRET}"}}',
)
"""Arguments of a command, each with a secret in an option, a header or a program's argument."""
