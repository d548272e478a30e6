"""Runs the solution, reports its definitions, and executes the calls of the tests."""

from __future__ import annotations

import contextlib
import os
import runpy
from typing import Any

from exchange import OPERATIONS, Exchange, Gone, description


def serve(solution: str) -> None:
    """Run a solution, and serve the requests of the tests until they end.

    The solution's stdin and stdout are /dev/null.
    """
    requests, answers, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    with os.fdopen(requests, "rb") as reading, os.fdopen(answers, "wb") as writing:
        exchange = _ToTests(reading, writing, serves=OPERATIONS)
        try:
            defined = runpy.run_path(solution, run_name="solution")
        except BaseException as error:
            with contextlib.suppress(
                OSError, Gone
            ):  # a fork of this process may have sent it already, or the tests may have ended
                exchange.send({"failed": description(error)})
            with contextlib.suppress(
                OSError
            ):  # closed here, so that a failed flush does not replace the error
                writing.close()
            raise
        names = {name: value for name, value in defined.items() if not name.startswith("__")}
        exchange.send({"defined": {name: exchange.encoded(value) for name, value in names.items()}})
        try:
            while True:
                exchange.serve(exchange.receive())
        except Gone:
            return


class _ToTests(Exchange):  # type: ignore[misc]  # mypy does not find it: this is started as a file
    def make_proxy(self, number: int, description: dict[str, Any]) -> Any:
        return _Callback(self, number)

    def make_error(self, description: dict[str, Any]) -> BaseException:
        return RuntimeError(f"{description.get('name')}: {description.get('text')}")


class _Callback:
    """A proxy of a function of the tests that was passed to the solution."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange, self._number = exchange, number
        exchange.register_proxy(self, number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._exchange.call("call", self._number, *arguments, **named)
