"""The section `environment`: who answers the policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import (
    Address,
    Code,
    FilePath,
    Listener,
    Options,
    Program,
)
from relax_events.config.resume_rules import SPEED, free
from relax_events.errors import ConfigError


class ToolServerConfig(Section):
    """An MCP server: a program or an address."""

    command: Program = ()
    """A program and its arguments, started for each sample; it speaks MCP on stdin and stdout."""
    address: Address = ""
    """The URL of a server that speaks MCP over streamable HTTP, such as
    `http://127.0.0.1:8000/mcp`."""

    @model_validator(mode="after")
    def _is_one(self) -> ToolServerConfig:
        if bool(self.command) == bool(self.address):
            raise ValueError("a tool server needs either command or address; set one of them")
        return self


class HarnessConfig(Section):
    """Harnesses that people start, on any machine: they take sessions from the rollout workers,
    each of which serves them at an address of its own (ADR 35).
    """

    host: Annotated[Listener, free("where harnesses take their sessions")] = "127.0.0.1"
    """Address on which each rollout worker listens, as harnesses write it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of rollout worker 0; worker i listens on port + i. 0 serves no harness."""
    token_file: Annotated[FilePath | None, free("who may take sessions")] = None
    """File with the token that a harness must have to take a session."""

    @model_validator(mode="after")
    def _is_safe(self) -> HarnessConfig:
        if self.port and self.token_file is None:
            raise ValueError(
                "harnesses need a token to take sessions; set environment.harness.token_file"
            )
        if self.host in ("", "0.0.0.0", "::"):  # noqa: S104 compared, not bound
            raise ValueError(
                f"host = {self.host!r} is no address that a harness could write; set "
                "environment.harness.host to one of this machine"
            )
        return self

    @property
    def is_served(self) -> bool:
        """Whether harnesses drive the episodes."""
        return self.port > 0


class EnvironmentConfig(Section):
    """Who answers the policy: a function called after each turn (ADR 17), a stateful environment of
    a known interface (ADR 36), or a program that drives the policy through a model API. Without one
    a sample is a single turn.
    """

    function: Code = ""
    """A name in the entry point group `relax_events.environments`, such as `zoom`, or
    `path/to/file.py:function`; empty for none."""
    interface: Literal["function", "interaction", "gymnasium", "skyrl_gym", "openenv", "mcp"] = (
        "function"
    )
    """What `function` names: a stateless function; or a class, or a function that builds an object,
    with the methods of Relax's `BaseInteractionEnv` (`interaction`), of Gymnasium or of skyrl-gym.
    `openenv` is a server at `address`, `mcp` the tools of `tool_servers`. All but `function` have a
    state for each sample, called a session."""
    address: Address = ""
    """The server of interface `openenv`, such as `http://127.0.0.1:8000`."""
    tool_servers: dict[str, ToolServerConfig] = Field(default_factory=dict)
    """The MCP servers of interface `mcp`, by name."""
    command: Program = ()
    """A program and its arguments, such as `["python", "agents/mine.py"]`; each sample is one run
    of it. It finds the model at `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`, and its task in
    the file `RELAX_TASK_FILE`. Paths must be absolute or of programs on `PATH`, or of files that
    exist where `relax` is called. Empty for none."""
    options: Options = Field(default_factory=dict)
    """Settings of the function or class, passed as keyword arguments; to `skyrl_gym` as
    `env_config`."""
    max_turns: Positive = 4
    """Maximum assistant turns of a sample; a function is not called after the last, a session is.
    `engine.sampling.max_new_tokens` bounds all of them together. A program that asks for more turns
    or tokens is refused."""
    processes: Annotated[Positive, free(SPEED)] = 1
    """Child processes that run the function, or hold the sessions."""
    timeout_seconds: Annotated[Seconds, free("when an answer counts as failed")] = 10.0
    """Deadline of a call, and of closing a session. After it the process of a function is killed
    and the sample fails; the episode of a session is begun again."""
    memory_bytes: Annotated[Positive, free("when an answer counts as failed")] = 4 * 1024**3
    """Address space limit of one child process."""
    concurrency: Annotated[Positive, free(SPEED)] = 64
    """Programs, or sessions, that one rollout worker runs at the same time."""
    start_seconds: Annotated[Seconds, free("when an episode counts as failed")] = 60.0
    """Deadline for the start of an episode: for the set-up of a session with its first observation,
    or for a program's first call of the model (`command`)."""
    episode_seconds: Annotated[Seconds, free("when an episode counts as failed")] = 900.0
    """Deadline of a program after that (`command`), without the time in which its calls wait for
    the policy."""
    idle_seconds: Annotated[float, Field(ge=0), free("when an episode counts as failed")] = 300.0
    """Deadline from an answer of the policy to the program's next call, or its end (`command`, or a
    harness): a program that is gone is then noticed. The slowest tool must be faster. 0 for
    none."""
    attempts: Annotated[Positive, free("how often a failed episode is begun again")] = 3
    """How often an episode is begun in all if its program or session fails or is late, its program
    calls no model, or the engine fails. After the last attempt the prompt becomes a dead letter,
    and its prompt group fails without a score."""
    tool_call_format: Literal[
        "auto", "hermes", "qwen3_coder", "glm", "llama3", "mistral", "deepseek"
    ] = "auto"
    """How the policy writes tool calls, which programs receive as such (`command`); `auto` chooses
    by the chat template, and `hermes`, which Qwen3 has, where that shows none."""
    trained_paths: Literal["all", "last"] = "all"
    """Which paths of an episode are trained whose program edited its history, shortened it or asked
    twice (`command`): all, each sampled token once, or that of the last turn."""

    harness: HarnessConfig = HarnessConfig()
    """Programs that people start instead of the rollout workers."""

    @model_validator(mode="after")
    def _one_answers(self) -> EnvironmentConfig:
        if self.harness.is_served and (self.function or self.command or self.holds_sessions):
            raise ValueError(
                "harness.port is one way to answer the policy, and a function, command or "
                "interface another; leave one of them out"
            )
        if self.function and self.command:
            raise ValueError(
                "function and command are two ways to answer the policy; leave one of them out"
            )
        required_key = {"openenv": "address", "mcp": "tool_servers"}.get(self.interface, "function")
        keys = [key for key in ("address", "tool_servers", "function") if getattr(self, key)]
        if self.holds_sessions and keys != [required_key]:
            names = ", ".join(keys) or "nothing"
            raise ValueError(
                f"interface = {self.interface!r} needs {required_key} alone, got {names}; set "
                f"environment.{required_key}"
            )
        if not self.holds_sessions and keys not in ([], ["function"]):
            raise ValueError(
                f"{keys[0]} is for interface 'openenv' or 'mcp', got {self.interface!r}; set "
                "environment.interface"
            )
        if self.holds_sessions and self.command:
            raise ValueError(
                f"command and interface = {self.interface!r} are two ways to answer the policy; "
                "leave one of them out"
            )
        return self

    @property
    def holds_sessions(self) -> bool:
        """Whether each sample has an environment with a state."""
        return self.interface != "function"

    @property
    def has_episodes(self) -> bool:
        """Whether a sample whose environment failed is begun again."""
        return self.holds_sessions or self.has_programs

    @property
    def name(self) -> str:
        """The environment, for texts; empty without one."""
        servers, harness = ", ".join(self.tool_servers), "harness" * self.harness.is_served
        return self.function or self.address or servers or " ".join(self.command) or harness

    def resolve_command(self) -> tuple[str, ...]:
        """Return a command that can be started in any folder: the program's path, and absolute
        paths of arguments that are files here; empty without a command.

        Raises:
            ConfigError: There is no such program.
        """
        if not self.command:
            return ()
        program = shutil.which(self.command[0])
        if program is None:
            raise ConfigError(
                f"environment.command = {list(self.command)}: there is no program "
                f"{self.command[0]!r}; give its path, or a name on PATH"
            )
        arguments = (
            str(Path(one).absolute()) if Path(one).is_file() else one for one in self.command[1:]
        )
        return (str(Path(program).absolute()), *arguments)

    @property
    def has_programs(self) -> bool:
        """Whether programs drive the policy through the gateway."""
        return bool(self.command) or self.harness.is_served
