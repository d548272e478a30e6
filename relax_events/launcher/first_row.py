"""The doctor's view of the first row of each source: what the reader made of it."""

from __future__ import annotations

from collections.abc import Sequence

from relax_events.config import RunConfig
from relax_events.data.messages import describe_message
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow, build_checking_reader
from relax_events.data.tool_formats import index_schemas
from relax_events.errors import ConfigError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import ChatMessage
from relax_events.launcher.checked_run import CheckedRun
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media

MAX_ITEMS, MAX_CHARACTERS = 6, 60


def check_first_rows(run: CheckedRun) -> str:
    """Say how the first row of each source was read, and the tokens of its prompt.

    Raises:
        PoisonSample, MediaError: The prompt can't be rendered, or a media file can't be read.
    """
    try:
        prompts = run.prompts
    except ConfigError:
        return "not read: see data"
    rows = [_describe(source.row(0), run.config) for _, source in prompts]
    return " | ".join(rows) or "none: a replay trains what was generated before"


def _describe(row: PromptRow, config: RunConfig) -> str:
    messages = build_checking_reader(MediaLibrary(config))(row) if row.media else row.messages
    media = [
        f"{item.modality.value} of {reference.num_bytes} bytes, {reference.extent}"
        for item, reference in zip(row.media, list_message_media(messages), strict=True)
    ]
    tools = [f"{name}({', '.join(_list_arguments(schema))})" for name, schema in _schemas(row)]
    facts = {
        "prompt": _join([f"{one.role} {_quote(_show(one))}" for one in messages]),
        "label": _quote(row.answer) if row.answer else "none",
        "targets": _join([_quote(_show(one)) for part in row.completions for one in part]),
        "tools": _join(tools),
        "media": _join(media),
        "metadata": _join(list(parse_json(row.metadata))),
        "tokens": _count_tokens(messages, row.tools, config),
    }
    return "; ".join(f"{name}: {text}" for name, text in facts.items())


def _schemas(row: PromptRow) -> list[tuple[str, dict[str, object]]]:
    return [(name, dict(schema)) for name, schema in index_schemas(row.tools).items()]


def _list_arguments(schema: dict[str, object]) -> list[str]:
    properties = schema.get("properties")
    return list(properties) if isinstance(properties, dict) else []


def _count_tokens(messages: Sequence[ChatMessage], tools: str, config: RunConfig) -> str:
    if not config.model.path.exists():
        return "once the model is made"
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    tokens = renderer.row_tokens(messages, tools=tools)
    end = renderer.completion_text(tokens[-8:], skip_special_tokens=False)
    return f"{len(tokens)}, ending with {end!r}"


def _show(message: ChatMessage) -> str:
    return describe_message(
        message, show_part=lambda part: f"[{part.kind}]" if part.text is None else part.text
    )


def _quote(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return repr(text)
    return f"{text[:MAX_CHARACTERS]!r}... of {len(text)} characters"


def _join(texts: list[str]) -> str:
    more = [f"{len(texts) - MAX_ITEMS} more"] if len(texts) > MAX_ITEMS else []
    return ", ".join([*texts[:MAX_ITEMS], *more]) or "none"
