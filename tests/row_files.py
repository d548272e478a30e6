"""Writes rows of messages to files, and reads them as a run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source

SHOWS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that shows every field of a message."""


def read_written_row(folder: Path, row: dict[str, Any], kind: str, **keys: Any) -> PromptRow:
    """Write a row to a file of the kind `jsonl` or `parquet`, and read it."""
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    source = DataConfig.model_validate({"source": f"{kind}:{path}", **keys})
    return open_source(source, seed=0).row(0)


def write_text(renderer: PromptRenderer, tokens: Any) -> str:
    """Return the text of tokens, special ones included."""
    return renderer.completion_text(tokens, skip_special_tokens=False)
