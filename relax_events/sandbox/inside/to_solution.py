"""The connection of the tests to the solution's process, and its exceptions."""

from __future__ import annotations

import builtins
from typing import Any, ClassVar

from exchange import Exchange, Gone
from remote_object import BUILTIN_METHODS, NO_METHODS, Remote, refuse


class SolutionError(Exception):
    """The solution raised an exception that has no builtin base class of `Exception`."""


class ToSolution(Exchange):  # type: ignore[misc]  # mypy does not find it: this is started as a file
    """The connection to the solution's process, with proxies of its objects."""

    _errors: ClassVar[dict[str, type[Exception]]] = {}

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._new_proxies: list[Remote] = []
        self.num_calls = 0

    def receive_definitions(self) -> dict[str, Any]:
        """Receive the solution's definitions, by name."""
        message = self.receive()
        if "defined" not in message:
            raise Gone(f"the solution could not be run: {message.get('failed')}")
        definitions: dict[str, Any] = {}
        for name, data in self._decode_untrusted(dict, message["defined"]).items():
            if name.startswith("__"):
                continue  # such as __builtins__: it would change what the tests do
            definitions[name] = self._decode_untrusted(self.decoded, data)
            for new in self.take_new_proxies():
                refuse(new, NO_METHODS, of_results=_refused_of_results(name))
        return definitions

    def call(self, operation: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Run an operation on an object of the solution; return the result.

        Only a request for the next value may end an iteration of the tests.

        Raises:
            Gone: The solution exited, or sent an invalid message.
        """
        self.num_calls += 1
        try:
            return super().call(operation, number, *arguments, **named)
        except (StopIteration, StopAsyncIteration) as error:
            if operation == "next":
                raise
            raise SolutionError(f"the solution raised {type(error).__name__}") from error

    def make_proxy(self, number: int, description: dict[str, Any]) -> Any:
        """Return a proxy for an object of the solution; for an exception class, a local class."""
        if description.get("raises"):
            kind = self._error_class(str(description["type"]), str(description["raises"]))
            return _narrow(kind)
        remote = Remote(self, number, description)
        self.register_proxy(remote, number)
        self._new_proxies.append(remote)
        return remote

    def find_builtin(self, name: str) -> Any:
        """Return the builtin that the solution names, unless it catches what tests raise."""
        return _narrow(super().find_builtin(name))

    def take_new_proxies(self) -> list[Remote]:
        """Return the proxies made since the last call of this method."""
        proxies, self._new_proxies = self._new_proxies, []
        return proxies

    def make_error(self, description: dict[str, Any]) -> BaseException:
        """Return the local exception for an exception that the solution raised."""
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


def _refused_of_results(name: str) -> frozenset[str]:
    """Return the methods that results of a definition don't have: a class makes objects."""
    methods: frozenset[str] = NO_METHODS if name[:1].isupper() else BUILTIN_METHODS
    return methods


def _narrow(value: Any) -> Any:
    """Return another class for an exception class that would catch a failed assertion."""
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    return SolutionError if is_exception and issubclass(AssertionError, value) else value
