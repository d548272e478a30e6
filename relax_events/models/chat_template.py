"""Chat templates of model folders. A template is an untrusted program: it runs in a confined child
process, with a deadline and a bound of its memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, Protocol

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relax_events.confinement import ChildLost, ChildPool, ChildSettings
from relax_events.confinement.entry_points import CHAT_TEMPLATE


@dataclass(frozen=True, slots=True)
class TemplateBounds:
    """What a template may take.

    Attributes:
        memory_bytes: Address space of its process: a bomb ends there, and conversations are
            megabytes.
        render_seconds: For one conversation.
        load_seconds: To start the process, and to compile the template: its constants are computed
            then.
    """

    memory_bytes: int = 2 * 1024**3
    render_seconds: float = 20.0
    load_seconds: float = 60.0


OWN_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""The template that this package writes into the tiny models that it makes."""


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

    def __init__(self, source: str, bounds: TemplateBounds = TemplateBounds()) -> None:
        """Check the syntax; nothing runs yet.

        Args:
            source: The template.
            bounds: Of its process.
        Raises:
            TemplateError: It is not a Jinja template.
        """
        _build_environment().parse(source)
        self._seconds = bounds.render_seconds
        self._children = ChildPool(
            ChildSettings(
                entry_point=CHAT_TEMPLATE,
                setup={"source": source, "memory_bytes": bounds.memory_bytes},
                start_seconds=bounds.load_seconds,
            )
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text.

        Raises:
            TemplateError: The template rejects its variables, is late, or needs too much memory.
        """
        try:
            reply = self._children.call(variables, seconds=self._seconds).result()
        except ChildLost as lost:
            raise TemplateError(f"it {lost.describe('')}") from None
        if "error" in reply.head:
            raise TemplateError(reply.head["error"])
        return reply.contents[0].decode("utf-8", "surrogatepass")


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
