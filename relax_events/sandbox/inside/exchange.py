"""The protocol between the process of a solution and the process of its tests: each may call
objects of the other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import IO, Any

from values import (  # a file of this folder, see entry.py
    MUTABLE,
    SHARED_BUILTINS,
    decode,
    encode,
    replace,
)

MAX_MESSAGE_BYTES = 64 * 1024**2


class Gone(BaseException):
    """The other process exited, or sent an invalid message. A test's `except Exception` must not
    catch it.
    """

    exit_code = 78


class Exchange(ABC):
    """One end of two pipes. A call waits for its response, and serves the other side's calls
    meanwhile.
    """

    def __init__(self, requests: IO[bytes], answers: IO[bytes], *, serves: Collection[str]) -> None:
        """Connect the pipes; nothing is sent yet.

        Args:
            requests: The pipe to read from.
            answers: The pipe to write to.
            serves: Operations that the other side may request. The tests' side serves only calls:
                with attribute access a solution could reach every object.
        """
        self._serves = {name: OPERATIONS[name] for name in serves}
        self._read, self._write = requests, answers
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, int] = {}

    @abstractmethod
    def make_proxy(self, number: int, description: dict[str, Any]) -> Any:
        """Return a proxy for an object of the other side, given its number and description."""

    @abstractmethod
    def make_error(self, description: dict[str, Any]) -> BaseException:
        """Return the local exception for an exception that the other side raised."""

    def find_builtin(self, name: str) -> Any:
        """Return the builtin that the other side names."""
        return SHARED_BUILTINS[name]

    def call(self, operation: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Run an operation on an object of the other side; return the result.

        Raises:
            Gone: The other side exited, or sent an invalid message.
        """
        self.send(
            {
                "do": operation,
                "with": number,
                "arguments": self.encoded(arguments),
                "named": self.encoded(named),
            }
        )
        while True:
            message = self.receive()
            if "do" in message:
                self.serve(message)
                continue
            if "raised" in message:
                self._apply_changes(arguments, message)
                raise self.make_error(self._decode_untrusted(dict, message["raised"]))
            returned = self._decode_untrusted(self.decoded, message.get("returned"))
            self._apply_changes(arguments, message)
            return returned

    def _apply_changes(self, arguments: Sequence[Any], message: dict[str, Any]) -> None:
        """Apply the call's changes to its mutable arguments."""
        for old, new in zip(
            arguments, self._decode_untrusted(list, message.get("changed", ())), strict=False
        ):
            if new is not None:
                replace(old, self._decode_untrusted(self.decoded, new))

    def _decode_untrusted(self, decoder: Callable[[Any], Any], data: Any) -> Any:
        """Decode untrusted data of the other side; invalid data raises `Gone`."""
        try:
            return decoder(data)
        except (
            ArithmeticError,
            AttributeError,
            ImportError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise Gone("the other process sent an invalid message") from error

    def serve(self, message: dict[str, Any]) -> None:
        """Execute one call of the other side, and send the result."""
        target, operation, arguments, named = self._decode_untrusted(self._parse_request, message)
        try:
            answer: dict[str, Any] = {
                "returned": self.encoded(operation(target, *arguments, **named))
            }
        except BaseException as error:
            answer = {"raised": description(error)}
        answer["changed"] = [
            self.encoded(argument) if type(argument) in MUTABLE else None for argument in arguments
        ]
        self.send(answer)

    def _parse_request(
        self, message: dict[str, Any]
    ) -> tuple[Any, Callable[..., Any], list[Any], dict[str, Any]]:
        target, operation = self._objects[message["with"]], self._serves[message["do"]]
        return (
            target,
            operation,
            list(self.decoded(message["arguments"])),
            dict(self.decoded(message["named"])),
        )

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        try:
            self._write.write(json.dumps(message).encode() + b"\n")
            self._write.flush()
        except (OSError, ValueError) as error:
            raise Gone("the other process exited") from error

    def receive(self) -> dict[str, Any]:
        """Read one message."""
        line = self._read.readline(MAX_MESSAGE_BYTES)
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Gone("the other process exited, or sent an invalid message")
        return message

    def keep(self, value: Any) -> int:
        """Keep an object, and return the number by which the other side refers to it."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects[number] = value
        return number

    def register_proxy(self, proxy: Any, number: int) -> None:
        """Register a proxy of an object of the other side, so that it is sent back as that
        object.
        """
        self._proxies[id(proxy)] = number
        self.keep(proxy)

    def encoded(self, value: Any) -> Any:
        """Return JSON for a value."""
        return encode(value, self._refer)

    def _refer(self, value: Any) -> list[Any]:
        if (number := self._proxies.get(id(value))) is not None:
            return ["yours", number]
        kind = value if isinstance(value, type) else type(value)
        description = {
            "type": kind.__name__,
            "is_module": isinstance(value, ModuleType),
            "home": _read_home(value),
        }
        if isinstance(value, type) and issubclass(value, BaseException):
            description["raises"] = builtin_name(value)
        return ["mine", self.keep(value), description]

    def decoded(self, data: Any) -> Any:
        """Return the value that is encoded in JSON."""
        return decode(data, self._resolve)

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "yours":
            return self._objects[data[1]]
        if data[0] == "mine":
            return self.make_proxy(int(data[1]), dict(data[2]))
        if data[0] == "builtin":
            return self.find_builtin(data[1])
        raise ValueError(f"{data[0]!r} is not a kind of reference")


def _read_home(value: Any) -> str | None:
    """Return the name of the module that a value says to be defined in."""
    try:
        home = getattr(value, "__module__", None)
    except Exception:
        return None
    return home if type(home) is str else None


def description(error: BaseException) -> dict[str, Any]:
    """Describe an exception: its name, its builtin base class, its text."""
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text raised {type(failed).__name__})"
    return {"name": type(error).__name__, "builtin": builtin_name(type(error)), "text": text[:2000]}


def builtin_name(kind: type) -> str:
    """Return the name of the first builtin exception among an exception's classes."""
    return next(
        (base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"), "Exception"
    )


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **named: target(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "item": lambda target, key: target[key],
    "set item": lambda target, key, value: target.__setitem__(key, value),
    "delete item": lambda target, key: target.__delitem__(key),
    "length": len,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "text": str,
    "shown": repr,
    "integer": int,
    "float": float,
    "absolute": abs,
    "negative": lambda target: -target,
    "enter": lambda target: target.__enter__(),
    "leave": lambda target: target.__exit__(None, None, None),
    "is instance": lambda target, value: isinstance(value, target),
    "is same": lambda target, other: bool(target == other),
    "is less": lambda target, other: bool(target < other),
    "add": lambda target, other: target + other,
    "subtract": lambda target, other: target - other,
    "multiply": lambda target, other: target * other,
}
