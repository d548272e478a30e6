"""A proxy of an object of the solution, in the process of its tests.

A test may use the object through it, but the object never decides a comparison with a value of the
test: it equals no such value, and can't be ordered or added with one.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

NO_METHODS: frozenset[str] = frozenset()
BUILTIN_METHODS = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind)
)
"""Methods of builtin types. A result of another type with these methods could decide the test's
comparison."""
DECIDING_METHODS = frozenset(
    name for name in BUILTIN_METHODS if name.startswith("is") or name.endswith("with")
)
"""Methods of builtin types whose result passes a test without being compared."""
Plain = TypeVar("Plain")


class Caller(Protocol):
    """The connection to the solution's process."""

    def call(self, operation: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Run an operation on an object of the solution; return the result."""

    def take_new_proxies(self) -> list[Remote]:
        """Return the proxies made since the last call of this method."""


class Remote:
    """A proxy of an object of the solution."""

    def __init__(self, exchange: Caller, number: int, description: dict[str, Any]) -> None:
        for name, value in {
            "_exchange": exchange,
            "_number": number,
            "_kind": str(description.get("type")),
            "_home": "module" if description.get("is_module") else description.get("home"),
        }.items():
            object.__setattr__(self, name, value)
        refuse(self, DECIDING_METHODS, of_results=BUILTIN_METHODS)

    def _request(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Run an operation; its result has the methods that this object has."""
        result = self._exchange.call(operation, self._number, *arguments, **named)
        for new in self._exchange.take_new_proxies():
            refuse(new, self._refused, of_results=self._refused_of_results)
        return result

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the object in the solution's process."""
        refused = self._refused_of_results
        result = self._exchange.call("call", self._number, *arguments, **named)
        for new in self._exchange.take_new_proxies():
            refuse(new, refused, of_results=refused or DECIDING_METHODS)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._refused:
            raise AttributeError(
                f"a result of type {self._kind} of the solution has no attribute {name!r} here"
            )
        value = self._exchange.call("get", self._number, name)
        for new in self._exchange.take_new_proxies():
            refuse(new, self._refused, of_results=self._refused or DECIDING_METHODS)
        return value

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


def refuse(remote: Remote, methods: frozenset[str], *, of_results: frozenset[str]) -> None:
    """Refuse methods of builtin types of an object, and of what it returns when it is called."""
    object.__setattr__(remote, "_refused", methods)
    object.__setattr__(remote, "_refused_of_results", of_results)
