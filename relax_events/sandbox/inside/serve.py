"""Runs the solution, reports its definitions, and executes the calls of the tests."""

from __future__ import annotations

import contextlib
import os
import runpy
from typing import Any

from exchange import OPERATIONS, Exchange, Gone, description


def serve(solution: str) -> None:
    """Run a solution and serve the tests until they end; the solution's stdin and stdout are
    /dev/null.
    """
    requests, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    with os.fdopen(requests, "rb") as reading, os.fdopen(answers, "wb") as writing:
        exchange = _ToTests(reading, writing, serves=OPERATIONS)
        try:
            defined = runpy.run_path(solution, run_name="solution")
        except BaseException as error:
            with contextlib.suppress(
                OSError, Gone
            ):  # a fork of this process may have sent it before, and the tests may be over
                exchange.send({"failed": description(error)})
            with contextlib.suppress(
                OSError
            ):  # closed here, so that what could not be sent is not raised in place of the error
                writing.close()
            raise
        names = {name: value for name, value in defined.items() if not name.startswith("__")}
        exchange.send({"defined": {name: exchange.encoded(value) for name, value in names.items()}})
        try:
            while True:
                exchange.serve(exchange.receive())
        except Gone:
            return


class _ToTests(Exchange):  # type: ignore[misc]  # it is found when this is started as a file
    def stand_in(self, number: int, description: dict[str, Any]) -> Any:
        return _Callback(self, number)

    def error(self, description: dict[str, Any]) -> BaseException:
        return RuntimeError(f"{description.get('name')}: {description.get('text')}")


class _Callback:
    """A proxy of a function of the tests that was passed to the solution."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange, self._number = exchange, number
        exchange.stands_for(self, number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._exchange.call("call", self._number, *arguments, **named)
