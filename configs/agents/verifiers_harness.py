"""Trains the policy of a run on a taskset of verifiers, unchanged: takes sessions from the run's
gateways, plays verifiers' episodes in them, and gives the rewards of the taskset.

    rollout worker (gateway)                    this process (verifiers' own Python)
    POST /sessions          ----------------->  a task of the taskset
    POST /v1/chat/completions  <--------------  verifiers' env, agents and harness
    POST /sessions/finish   <-----------------  the reward of the trace, or why it failed

It needs verifiers 0.4 and nothing of Relax Events. `rows` writes the taskset's tasks as the rows of
a run, `serve` plays them. Both take the id of a taskset, or a TOML file with `[env]` as verifiers'
own commands read it. Modules in the folder of this file are found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

POLICY_BOUNDS = ("turn_limit_reached", "token_limit_reached", "context_length_exceeded")
"""The gateway's refusals of a policy that has used up what the run gives it."""
UNSCORED_REWARD = 0.0
"""Of a policy that met such a bound before the taskset could score it."""
MAX_ERROR_CHARACTERS = 400
WAIT_SECONDS = 10.0
"""For a session, at most; a harness that leaves waits as long."""
CALL_SECONDS = 90.0
NUM_TRIES = 5
log = logging.getLogger("verifiers_harness")


class CannotServe(Exception):
    """The harness has to end: a person has to change something."""


class Tasks:
    """The tasks of a taskset by index, loaded as far as they are asked for."""

    def __init__(self, taskset: vf.Taskset) -> None:
        self._loaded: list[vf.Task] = []
        self._more: Iterator[vf.Task] = iter(taskset)

    def find(self, metadata: dict) -> vf.Task:
        """Return the task of a row.

        Raises:
            CannotServe: There is none, or its content is another.
        """
        index = metadata.get("task", -1)
        if not isinstance(index, int) or index < 0:
            raise CannotServe("the row has no column `task`; write the rows with `rows`")
        self._loaded += islice(self._more, max(0, index + 1 - len(self._loaded)))
        if index >= len(self._loaded) or self._loaded[index].hash != metadata.get("hash"):
            raise CannotServe(
                f"task {index} of the taskset is another than when the rows were written; write "
                "them again with `rows`"
            )
        return self._loaded[index]


def load(name: str) -> vf.Env:
    """Load the environment of a taskset's id or of a TOML file; one of its agents is the policy.

    Raises:
        SystemExit: None or several of its agents are the policy, or it retries by itself.
    """
    if name.endswith(".toml"):
        config = resolve_env_config(tomllib.loads(Path(name).read_text()).get("env"))
    else:
        config = resolve_env_config({"taskset": {"id": name}})
    free = [role for role, one in agent_config_fields(config).items() if one.client is None]
    if len(free) != 1:
        raise SystemExit(
            f"{name}: one agent is the policy, and each other one needs a client of its own "
            f"(env.NAME.client); without one are: {', '.join(free) or 'none'}"
        )
    if config.retries.max_retries or config.retries.rules:
        raise SystemExit(
            f"{name}: env.retries must be left out: a failed episode is begun again by the run, "
            "in a new session"
        )
    return load_environment(config)


def write_rows(env: vf.Env, path: Path, *, limit: int | None, columns: list[str]) -> int:
    """Write the tasks as rows of a run, and return their number."""
    if not env.taskset.bounded and limit is None:
        raise SystemExit("the taskset is endless; say how many tasks to write with --limit")
    path.parent.mkdir(parents=True, exist_ok=True)
    num_rows = 0
    with path.open("w") as file:
        for task in islice(iter(env.taskset), limit):
            data = task.data
            row = {
                "prompt": data.prompt_text or data.name or f"task {data.idx}",
                "answer": "",
                "task": data.idx,
                "hash": task.hash,
            }
            row |= {name: getattr(data, name) for name in columns}
            file.write(json.dumps(row) + "\n")
            num_rows += 1
    return num_rows


class Gateway:
    """The sessions of one gateway."""

    def __init__(self, url: str, token: str, *, patience_seconds: float) -> None:
        self.url = url
        self._token, self._patience_seconds = token, patience_seconds
        self._client = httpx.AsyncClient(base_url=url, timeout=CALL_SECONDS)
        self._seen_at = time.monotonic()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def take(self) -> dict | None:
        """Wait for a session; None if none waits yet.

        Raises:
            CannotServe: The token is wrong, or the gateway has been away for too long.
        """
        try:
            reply = await self._post("/sessions", {"wait_seconds": WAIT_SECONDS}, self._token)
        except httpx.TransportError as error:
            if time.monotonic() - self._seen_at > self._patience_seconds:
                raise CannotServe(
                    f"no gateway at {self.url} for {self._patience_seconds:g} s: {error!r}"
                ) from None
            log.info("%s: %r", self.url, error)
            await asyncio.sleep(1.0)
            return None
        self._seen_at = time.monotonic()
        if reply.status_code == 401:
            raise CannotServe(f"{self.url} refuses the token; see environment.harness.token_file")
        if reply.status_code != 200:
            if reply.status_code != 204:
                log.warning("%s answers %d: %s", self.url, reply.status_code, reply.text)
                await asyncio.sleep(1.0)
            return None
        return reply.json()

    async def finish(self, session: dict, found: dict) -> None:
        """Say how a session ended; one that the gateway does not know any more is dropped."""
        for number in range(NUM_TRIES):
            try:
                reply = await self._post("/sessions/finish", found, session["key"])
            except httpx.TransportError:
                await asyncio.sleep(2.0**number)
                continue
            if reply.status_code == 200:
                return
            break
        log.warning("session of %s is gone; the run begins it again", session["sample_id"])

    async def _post(self, path: str, body: dict, key: str) -> httpx.Response:
        return await self._client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def policy_of(session: dict) -> vf.ModelContext:
    """Return the policy as verifiers' agents call it.

    Both headers that dialects use hold the key of the session; verifiers overwrites one of them
    with a key that is none.
    """
    key = session["key"]
    headers = {"authorization": f"Bearer {key}", "x-api-key": key}
    client = vf.EvalClientConfig(
        base_url=session["base_url"], api_key_var="RELAX_NO_KEY", headers=headers
    )
    return vf.ModelContext(model=session["model"], client=client)


def conclude(episode: vf.Episode) -> dict:
    """Return what the gateway learns of a finished episode."""
    played = [trace for trace in episode.traces if trace.agent.config.client.headers]
    problems = [*episode.errors, *(error for one in played for error in one.errors)]
    if not episode.ok and problems:
        text = f"{problems[-1].type}: {problems[-1].message}"
        if any(f'"{bound}"' in text for bound in POLICY_BOUNDS):
            return {"reward": UNSCORED_REWARD}
        return {"error": text[:MAX_ERROR_CHARACTERS]}
    if len(played) != 1:
        return {"error": f"the policy played {len(played)} times in one episode, not once"}
    return {"reward": played[0].reward}


class Player:
    """Plays the sessions of gateways, side by side."""

    def __init__(self, env: vf.Env, traces: Path | None) -> None:
        self._env, self._tasks = env, Tasks(env.taskset)
        self._traces = traces.open("a", buffering=1) if traces else None
        self.is_leaving = asyncio.Event()

    async def serve(self, gateway: Gateway) -> None:
        """Play one session after another until the process leaves."""
        while not self.is_leaving.is_set():
            if (session := await gateway.take()) is not None:
                await self._play(gateway, session)

    async def _play(self, gateway: Gateway, session: dict) -> None:
        found = {"error": "the harness was stopped"}
        try:
            if self.is_leaving.is_set():
                return
            task = self._tasks.find(session["task"]["metadata"])
            async with asyncio.timeout(session["start_seconds"] + session["episode_seconds"]):
                episode = await self._env.run_episode(task, policy_of(session))
            found = conclude(episode)
            self._keep(session, episode, found)
        except TimeoutError:
            found = {"error": "the episode took longer than the run allows"}
        except CannotServe as error:
            found = {"error": str(error)}
            raise
        finally:
            await asyncio.shield(gateway.finish(session, found))

    def _keep(self, session: dict, episode: vf.Episode, found: dict) -> None:
        if self._traces is not None:
            for trace in episode.traces:
                record = trace.to_record()
                record["agent"]["config"].pop("client", None)  # it has the key
                line = {"sample_id": session["sample_id"], "finish": found, "trace": record}
                self._traces.write(json.dumps(line, default=str) + "\n")


@asynccontextmanager
async def opened(env: vf.Env):
    """Hold the taskset's shared servers, and give each episode an interception server of its own: a
    shared one keeps a client for each session's key until the end.
    """
    async with env.serving():
        env._interception = None  # noqa: SLF001
        yield


async def serve(env: vf.Env, options: argparse.Namespace) -> None:
    """Play sessions until SIGTERM or SIGINT, or until no gateway is there any more."""
    token = options.token_file.read_text().strip()
    player = Player(env, options.traces)
    gateways = [
        Gateway(url.rstrip("/"), token, patience_seconds=options.patience_seconds)
        for url in options.gateway
    ]
    async with opened(env):
        work = [
            asyncio.ensure_future(player.serve(gateway))
            for gateway in gateways
            for _ in range(options.concurrency)
        ]
        leave = asyncio.ensure_future(player.is_leaving.wait())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, player.is_leaving.set)
        await asyncio.wait([leave, *work], return_when=asyncio.FIRST_COMPLETED)
        player.is_leaving.set()
        if any(not one.done() for one in work):
            await asyncio.wait(work, timeout=options.drain_seconds)
        for one in work:
            one.cancel()
        ended = await asyncio.gather(*work, return_exceptions=True)
    for gateway in gateways:
        await gateway.close()
    for problem in ended:
        if isinstance(problem, BaseException) and not isinstance(problem, asyncio.CancelledError):
            raise problem


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="write the tasks as the rows of a run")
    rows.add_argument("env", help="id of a taskset, or a TOML file with [env]")
    rows.add_argument("out", type=Path, help="JSONL file to write")
    rows.add_argument("--limit", type=int, help="at most so many tasks")
    rows.add_argument("--columns", default="", help="fields of the tasks that rows have too: a,b")
    plays = commands.add_parser("serve", help="play sessions of a run")
    plays.add_argument("env", help="id of a taskset, or a TOML file with [env]")
    plays.add_argument(
        "--gateway", action="append", required=True, help="http://HOST:PORT; again for more"
    )
    plays.add_argument("--token-file", type=Path, required=True)
    plays.add_argument("--concurrency", type=int, default=16, help="sessions of each gateway")
    plays.add_argument("--traces", type=Path, help="JSONL file that gets verifiers' traces")
    plays.add_argument("--drain-seconds", type=float, default=30.0)
    plays.add_argument("--patience-seconds", type=float, default=120.0, help="without a gateway")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    env = load(options.env)
    if options.command == "rows":
        columns = [name for name in options.columns.split(",") if name]
        print(write_rows(env, options.out, limit=options.limit, columns=columns), "rows")
    else:
        try:
            asyncio.run(serve(env, options))
        except CannotServe as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
