"""Runs the tests in a process that the solution can't access; results arrive as copies.

Values of builtin types are compared in this process by the rules of their type. An object of one of
the solution's classes stays in the solution's process. A test may use it through a proxy, but it
never decides a comparison with a value of the test: it equals no such value, and can't be ordered
or added with one.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from typing import Any, ClassVar, TypeVar

from exchange import Exchange, Gone

BUILTIN_METHODS = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind)
)
"""Methods of builtin types. A result of another type with these methods could decide the test's
comparison."""


Plain = TypeVar("Plain")


class SolutionError(Exception):
    """The solution raised an exception that has no builtin base class of `Exception`."""


def run_tests(tests_path: str, requests: int, answers: int, verdict: int) -> None:
    """Run tests against a served solution; write one byte to `verdict` if all pass."""
    with os.fdopen(requests, "rb") as reading, os.fdopen(answers, "wb") as writing:
        solution = _ToSolution(reading, writing, serves=("call",))
        defined = solution.receive_definitions()
        sys.modules["solution"] = module = types.ModuleType("solution")
        vars(module).update(defined)
        scope = {**defined, "__name__": "tests"}
        with open(tests_path, encoding="utf-8", errors="replace") as file:
            code = compile(file.read(), "tests.py", "exec")
        exec(code, scope)  # noqa: S102 the tests come from the data
        os.write(verdict, b"1")
        os._exit(0)  # no destructor or exit handler calls the solution again


class _ToSolution(Exchange):  # type: ignore[misc]  # mypy does not find it: this is started as a file
    """The connection to the solution's process, with proxies of its objects."""

    _errors: ClassVar[dict[str, type[Exception]]] = {}

    def receive_definitions(self) -> dict[str, Any]:
        """Receive the solution's definitions, by name."""
        message = self.receive()
        if "defined" not in message:
            raise Gone(f"the solution could not be run: {message.get('failed')}")
        definitions = {
            name: self._decode_untrusted(self.decoded, value)
            for name, value in self._decode_untrusted(dict, message["defined"]).items()
        }
        for name, value in definitions.items():
            if isinstance(value, Remote):
                object.__setattr__(value, "_makes_objects", name[:1].isupper())
        return definitions

    def make_proxy(self, number: int, description: dict[str, Any]) -> Any:
        """Return a proxy for an object of the solution; for an exception class, a local class."""
        if description.get("raises"):
            return self._error_class(str(description["type"]), str(description["raises"]))
        remote = Remote(
            self, number, str(description.get("type")), is_class=bool(description.get("is_class"))
        )
        self.register_proxy(remote, number)
        return remote

    def make_error(self, description: dict[str, Any]) -> BaseException:
        """Return the local exception for one that the solution raised."""
        name, text = str(description.get("name")), str(description.get("text"))
        return self._error_class(name, str(description.get("builtin")))(text)

    def _error_class(self, name: str, builtin: str) -> type[Exception]:
        base = getattr(builtins, builtin, None)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            return SolutionError
        if name == builtin:
            return base
        if name not in self._errors:
            self._errors[name] = type(name, (base,), {})
        return self._errors[name]


class Remote:
    """A proxy of an object of the solution."""

    def __init__(self, exchange: Exchange, number: int, kind: str, *, is_class: bool) -> None:
        for name, value in {
            "_exchange": exchange,
            "_number": number,
            "_kind": kind,
            "_is_class": is_class,
        }.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_makes_objects", is_class)
        object.__setattr__(self, "_is_object", True)

    def _request(self, operation: str, *arguments: Any, **named: Any) -> Any:
        return self._exchange.call(operation, self._number, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the object in the solution's process."""
        result = self._request("call", *arguments, **named)
        if isinstance(result, Remote) and not self._makes_objects:
            object.__setattr__(result, "_is_object", False)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (not self._is_object and name in BUILTIN_METHODS):
            raise AttributeError(
                f"a result of type {self._kind} of the solution has no attribute {name!r} here"
            )
        found = self._request("get", name)
        if isinstance(found, Remote):
            object.__setattr__(found, "_makes_objects", self._is_object)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._request("delete", name)

    def __getitem__(self, key: Any) -> Any:
        return self._request("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._request("set item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._request("delete item", key)

    def __len__(self) -> int:
        return _require_type(int, self._request("length"))

    def __iter__(self) -> Any:
        iterator = self._request("iterate")
        if not isinstance(iterator, Remote):
            return iter(iterator)
        return _iterate(iterator)

    def __next__(self) -> Any:
        return self._request("next")

    def __contains__(self, value: Any) -> bool:
        return any(
            one is value or one == value for one in self
        )  # compared here: in its own process the solution could return any answer

    def __bool__(self) -> bool:
        return _require_type(bool, self._request("truth"))

    def __str__(self) -> str:
        return _require_type(str, self._request("text"))

    def __repr__(self) -> str:
        return _require_type(str, self._request("shown"))

    def __int__(self) -> int:
        return _require_type(int, self._request("integer"))

    def __float__(self) -> float:
        return _require_type(float, self._request("float"))

    def __abs__(self) -> Any:
        return self._request("absolute")

    def __neg__(self) -> Any:
        return self._request("negative")

    def __enter__(self) -> Any:
        return self._request("enter")

    def __exit__(self, *_: object) -> None:
        self._request("leave")

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _require_type(
            bool, self._request("is instance", value)
        )

    def __hash__(self) -> int:
        return hash(("solution", self._number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (
            other._number == self._number or _require_type(bool, self._request("is same", other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> Any:
        return (
            _require_type(bool, self._request("is less", other))
            if isinstance(other, Remote)
            else NotImplemented
        )

    def __add__(self, other: Any) -> Any:
        return self._request("add", other) if isinstance(other, Remote) else NotImplemented

    def __sub__(self, other: Any) -> Any:
        return self._request("subtract", other) if isinstance(other, Remote) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        return self._request("multiply", other) if isinstance(other, Remote) else NotImplemented


def _iterate(iterator: Remote) -> Any:
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return


def _require_type(kind: type[Plain], value: Any) -> Plain:
    if type(value) is not kind:
        raise TypeError(f"the solution returned {type(value).__name__}, expected {kind.__name__}")
    return value
