"""Child process of an environment: loads the function and calls it for each request. Started only
by `EnvironmentPool`.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from relax_events.confinement.frames import Frame
from relax_events.confinement.served import Answer, Served
from relax_events.environments.reply_encoding import encode_reply
from relax_events.errors import ConfigError, RelaxError
from relax_events.events.json_text import parse_json
from relax_events.plugins import ENVIRONMENTS, FUNCTION, find_plugin, select_named

FILES = "files"
ARGUMENTS = ("messages", "answer", "metadata")
MAX_ERROR_CHARACTERS = 600


def main() -> int:
    """Serve until stdin ends: report the loaded function, then return the environment's replies."""
    served = Served()
    setup = served.setup
    try:
        function = load_environment(setup["function"], setup["options"])
    except (RelaxError, MemoryError) as error:
        limit = f"environment.memory_bytes = {setup['memory_bytes']}"
        served.report_load_error(str(error) or f"it needs more than {limit} to load")
        return 2
    served.report_ready({"takes_files": bool(select_named(function, [FILES]))})
    served.serve(lambda request: _call_environment(function, request, setup))
    return 0


def load_environment(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return an environment with its options filled in.

    Raises:
        ConfigError: There is no such name, file or function, the file fails to load, or an option
            is invalid; the text says where.
    """
    function = find_plugin(
        ENVIRONMENTS, name, what=f"environment.function = {name!r}", accepts=FUNCTION
    ).load()
    keywords = dict.fromkeys(select_named(function, (*ARGUMENTS, FILES)))
    try:
        inspect.signature(function).bind("", **keywords, **options)
    except TypeError as error:
        raise ConfigError(
            f"environment.function = {name!r} can't be called with environment.options "
            f"{dict(options)}: {error}; its parameters must be completion, those of messages, "
            "answer, metadata and files that it reads, and its options"
        ) from None
    return partial(function, **options)


def _call_environment(
    function: Callable[..., Any], request: Frame, setup: Mapping[str, Any]
) -> Answer:
    question = request.head
    offered = {
        "messages": question["messages"],
        "answer": question["answer"],
        "metadata": parse_json(question["metadata"]),
        FILES: request.contents,
    }
    fields = {name: offered[name] for name in select_named(function, offered)}
    try:
        reply = function(question["completion"], **fields)
        return encode_reply(reply, setup["max_item_bytes"], setup["max_reply_bytes"])
    except (
        BaseException
    ) as error:  # user code may raise any exception, even SystemExit; only this sample fails
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            str(error)
            if isinstance(error, RelaxError)
            else f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        )
        return {"error": text[:MAX_ERROR_CHARACTERS]}, ()


if __name__ == "__main__":
    sys.exit(main())
