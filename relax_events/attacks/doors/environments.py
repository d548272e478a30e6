"""Hostile completions and rows against the environments that come with the product, in the children
of `EnvironmentPool` and `SessionPool`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from relax_events.attacks.attacked_run import build_attacked_run
from relax_events.attacks.completions import completion_attacks
from relax_events.attacks.samples import fits_a_record
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.confinement.entry_points import PLAYED, find_environment
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.pool import EnvironmentPool
from relax_events.environments.session_pool import SessionPool
from relax_events.errors import EpisodeFailed, EpisodeLate, PoisonSample, SessionLost
from relax_events.events.parts import ChatMessage

FUNCTIONS = ("zoom", "search", "deepeyes")
SECONDS = 60.0
TIMEOUT_SECONDS = 10.0
SECRETS = ("TOPSECRET", "root:")
"""Contents of files outside: no reply has them."""
SAMPLE_FAILURES = (EpisodeFailed, EpisodeLate, PoisonSample, SessionLost)
TOOL = '<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'
Ask = Callable[[str, Any], str]
"""Takes a completion and metadata, and returns the reply's text; raises a failed sample."""


def environment_assaults() -> Iterator[Assault]:
    """Give the assaults on the environments that come with the product."""
    for function in FUNCTIONS:
        point = find_environment(function, has_sessions=False)
        yield Assault(point.name, PLAYED, point.profile, partial(_prepare, function, open_function))
    point = find_environment("nim", has_sessions=True)
    yield Assault(point.name, PLAYED, point.profile, partial(_prepare, "nim", open_sessions))


@contextmanager
def _prepare(
    function: str, open_it: Callable[..., AbstractContextManager[Ask]], targets: Targets
) -> Iterator[list[Attack]]:
    texts = completion_attacks(targets.canary, port=targets.outside["port"])
    payloads = {name: text for name, text in texts.items() if fits_a_record(text)}
    settings = {"function": function, "timeout_seconds": TIMEOUT_SECONDS}
    if function == "nim":
        settings["interface"] = "gymnasium"
    with open_it(settings) as ask:
        yield [
            Attack(f"{position}: {name}", partial(_ask, ask, *form(text)))
            for position, form in list_forms().items()
            for name, text in payloads.items()
            if position == "completion" or "," not in name
        ]


def list_forms() -> dict[str, Callable[[str], tuple[str, Any]]]:
    """Return the functions that make a completion and metadata of a hostile text, by name."""
    call = TOOL.format(name='"image_zoom_in_tool"', arguments='{"bbox_2d": [0, 0, 900, 900]}')
    return {
        "completion": lambda text: (text, _row("1")),
        "row": lambda text: (f"top left {call}", _row(text)),
        "name of a tool": lambda text: (_call(text, {"query": "x"}), _row("1")),
        "argument of a tool": lambda text: (
            _call("search", {"query": text, "bbox_2d": [text] * 4, "angle": text}),
            _row("1"),
        ),
    }


def _row(text: str) -> dict[str, Any]:
    return {"original": text, "then": text, "options": {"stones": text}}


def _call(name: str, arguments: dict[str, Any]) -> str:
    quoted = orjson.dumps(name).decode(), orjson.dumps(arguments).decode()
    return TOOL.format(name=quoted[0], arguments=quoted[1])


def _ask(ask: Ask, completion: str, metadata: Any) -> str:
    """Play a turn: its sample may fail, and a reply has nothing of a file."""
    try:
        reply = ask(completion, metadata)
    except SAMPLE_FAILURES:
        return HELD
    except TimeoutError:
        return "the sample hangs"
    seen = [secret for secret in SECRETS if secret in reply]
    return f"the reply holds {seen[0]!r} of a file" if seen else HELD


@contextmanager
def _open_pool(
    build: type[EnvironmentPool] | type[SessionPool],
    play: Callable[[Any, str, Any], str],
    settings: dict[str, Any],
) -> Iterator[Ask]:
    """Start the children of an environment, and yield the function that plays a turn."""
    with (
        tempfile.TemporaryDirectory() as name,
        closing(build(build_attacked_run(Path(name), environment=settings))) as pool,
    ):
        yield partial(play, pool)


def _play(pool: EnvironmentPool, completion: str, metadata: Any) -> str:
    turn = ChatMessage.of_text("assistant", completion)
    reply = pool.loop.run(pool.reply("g0/0", build_task(metadata), [turn])).result(SECONDS)
    return "" if reply is None else reply.message.text


def build_task(metadata: Any) -> EnvironmentContext:
    """Return the row of a sample."""
    message = ChatMessage.of_text("user", "begin")
    text = orjson.dumps(metadata).decode()
    return EnvironmentContext(messages=[message], answer="", metadata=text)


def play_session(pool: SessionPool, completion: str, metadata: Any) -> str:
    """Open a session, play one turn, and return the texts of its replies."""
    session = pool.session("g0/0", build_task(metadata))
    try:
        session.open().result(SECONDS)
        replies = session.step(completion).result(SECONDS).replies
    finally:
        session.close()
    return "\n".join(reply.message.text for reply in replies)


open_function = partial(_open_pool, EnvironmentPool, _play)
"""Starts an environment function, and yields the function that plays a turn."""
open_sessions = partial(_open_pool, SessionPool, play_session)
"""Starts an environment with sessions, and yields the function that plays a new session's turn."""
