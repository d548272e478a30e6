"""Chat templates of model folders. A template is an untrusted program: it runs in a confined child
process, with a deadline and a bound of its memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, Protocol

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relax_events.confinement import ChildLost, ChildPool, ChildSettings
from relax_events.confinement.entry_points import CHAT_TEMPLATE

MEMORY_BYTES = 2 * 1024**3
"""Address space of a template's process: a bomb ends there, and conversations are megabytes."""
RENDER_SECONDS = 20.0
LOAD_SECONDS = 60.0
"""To start the process, and to compile the template: its constants are computed then."""


class TemplateProgram(Protocol):
    """A chat template that can be rendered."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text; TemplateError if the template rejects its variables."""
        ...


def compile_template(source: str) -> TemplateProgram:
    """Return a template of our own, which is rendered in this process, as transformers does.

    Raises:
        TemplateError: It is not a Jinja template.
    """
    environment = _build_environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


class GenerationTag(Extension):
    """Renders what stands between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See `jinja2.ext.Extension`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _build_environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )


class ConfinedTemplate:
    """A template that is rendered in a child process, which starts with the first conversation."""

    def __init__(self, source: str) -> None:
        """Check the syntax; nothing runs yet.

        Raises:
            TemplateError: It is not a Jinja template.
        """
        _build_environment().parse(source)
        self._children = ChildPool(
            ChildSettings(
                entry_point=CHAT_TEMPLATE,
                setup={"source": source, "memory_bytes": MEMORY_BYTES},
                start_seconds=LOAD_SECONDS,
            )
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text.

        Raises:
            TemplateError: The template rejects its variables, is late, or needs too much memory.
        """
        try:
            reply = self._children.call(variables, seconds=RENDER_SECONDS).result()
        except ChildLost as lost:
            raise TemplateError(f"it {lost.describe('')}") from None
        if "error" in reply.head:
            raise TemplateError(reply.head["error"])
        return reply.content.decode("utf-8", "surrogatepass")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
