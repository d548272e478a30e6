"""Exports samples as rows, with their media in a folder; an exporter writes the rows (ADR 51).

Streaming: one sample is held at a time.
"""

from __future__ import annotations

import mimetypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from relax_events.data.messages import print_message
from relax_events.errors import ObjectError
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    MediaRef,
    ObjectRef,
)
from relax_events.history.run_log import RunLog
from relax_events.history.samples.view import SampleView, list_values
from relax_events.objects import ObjectStore, check_out
from relax_events.plugins import EXPORTERS, FUNCTION, find_plugin, select_named
from relax_events.reports.report_files import replace_file

TOKEN_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "path_lengths")
Row = dict[str, Any]
NO_FIELDS: Row = dict.fromkeys(("reasoning_content", "tool_calls", "name", "tool_call_id"))
"""The fields that most messages lack."""


class SampleRows(Iterable[Row]):
    """The rows of samples, whose media are saved on the way. A sample whose stored arrays or media
    can't be read is skipped, counted and named.
    """

    def __init__(
        self, log: RunLog, views: Iterable[SampleView], media: MediaFolder, *, tokens: bool
    ) -> None:
        self._log, self._views, self._media, self._tokens = log, views, media, tokens
        self.num_rows = 0

    @property
    def num_media(self) -> int:
        """Number of saved media files."""
        return len(self._media.saved)

    def __iter__(self) -> Iterator[Row]:
        for view in self._views:
            try:
                row = self._build(view)
            except ObjectError as error:
                self._log.unreadable.add(view.position, error)
                continue
            self.num_rows += 1
            yield row

    def _build(self, view: SampleView) -> Row:
        row = build_row(view, newest_version=self._log.newest_version, save=self._media.save)
        if self._tokens:
            whole = check_out(view.sample, self._media.store)
            row |= {name: getattr(whole, name) for name in TOKEN_COLUMNS}
        return row


def export_samples(
    log: RunLog,
    views: Iterable[SampleView],
    path: Path | None,
    *,
    exporter: str = "",
    media: Path | None = None,
    tokens: bool = False,
) -> SampleRows:
    """Write samples into a file that appears when it is whole, or to stdout; return their counts.

    Args:
        log: The run's log, which also counts unreadable records.
        views: The samples.
        path: The file; None leaves it to the exporter where the rows go.
        exporter: An entry point of the group `relax_events.exporters`, or
            `path/to/file.py:function`; by default the exporter that the file's suffix names, or
            JSON lines. It is called with the rows, and with `path` and `tokens` if it names them.
        media: Folder for media; by default `<file>-media` next to the file, or `media` here.
        tokens: Add the columns tokens, loss_mask, rollout_logprobs and path_lengths.
    Raises:
        ConfigError: There is no such exporter, or the object store can't be opened.
        EnvironmentProblem: The exporter needs a package that is not installed.
    """
    name = exporter or ("jsonl" if path is None else path.suffix.removeprefix("."))
    what = f"exporter {name!r}" if exporter else f"an exporter for --output-file {path}"
    write = find_plugin(EXPORTERS, name, what=what, accepts=FUNCTION).load()
    base = Path() if path is None else path.parent
    folder = media or (Path("media") if path is None else base / f"{path.stem}-media")
    store = ObjectStore.open(log.config.objects_uri, uri_aliases=log.config.objects.uri_aliases)
    rows = SampleRows(log, views, MediaFolder(folder, base=base, store=store), tokens=tokens)
    part = path and path.with_name(f".{path.name}.{os.getpid()}.part")
    offered = {"path": part, "tokens": tokens}
    base.mkdir(parents=True, exist_ok=True)
    try:
        write(rows, **{name: offered[name] for name in select_named(write, offered)})
        if path is not None and part is not None:
            part.replace(path)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return rows


def write_json_lines(rows: Iterable[Row], *, path: Path | None) -> None:
    """Write rows as JSON, one a line; to stdout without a path."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    with nullcontext(sys.stdout.buffer) if path is None else path.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=option))
        file.flush()


def build_row(view: SampleView, *, newest_version: int, save: Callable[[MediaRef], str]) -> Row:
    """Return a sample as a row; media become relative paths.

    Args:
        view: The sample with its score and outcome.
        newest_version: Of the run, for the staleness of untrained samples.
        save: Saves media and returns the path.
    """
    line, sample, score = asdict(view.line(newest_version)), view.sample, view.score
    return line | {
        "prompt_group_id": sample.prompt_group_id,
        "sample_index": sample.key.sample_index,
        "issued_for_step": sample.key.train_step,
        "row": sample.key.row,
        "min_policy_version": sample.key.min_policy_version,
        "max_policy_version": sample.key.max_policy_version,
        "temperature": sample.temperature,
        "num_prompt_tokens": sample.num_prompt_tokens,
        "prompt": "\n".join(message.text for message in sample.messages),
        "messages": _messages(sample.messages, save),
        "turns": _messages(sample.turns, save),
        "answer": sample.answer,
        "metadata": sample.metadata,
        "reward_components": score.components if score else {},
        "turn_rewards": list_values(score.turn_rewards) if score else None,
        "reward_name": score.reward_name if score else None,
        "reward_digest": score.reward_digest if score else None,
        "judge_response": score.judge_response if score else None,
        "reward_error": score.error if score else None,
    }


def _messages(messages: Iterable[ChatMessage], save: Callable[[MediaRef], str]) -> list[Row]:
    return [
        NO_FIELDS | print_message(message) | {"content": list(_parts(message.parts, save))}
        for message in messages
    ]


def _parts(parts: Iterable[ContentPart], save: Callable[[MediaRef], str]) -> Iterator[Row]:
    for part in parts:
        yield {
            "type": part.kind.value,
            "text": part.text,
            "path": save(part.media) if part.media else None,
        }


class MediaFolder:
    """Media by content, each fetched and verified once."""

    def __init__(self, folder: Path, *, base: Path, store: ObjectStore) -> None:
        self._folder, self._base, self.store = folder, base, store
        self.saved: dict[bytes, str] = {}

    def save(self, media: MediaRef) -> str:
        """Fetch a media object unless it is there; return its path, relative to the export's
        folder.

        Raises:
            ObjectError: It is missing or differs from its digest.
        """
        if media.digest not in self.saved:
            path = (
                self._folder
                / f"{media.digest.hex()}{mimetypes.guess_extension(media.media_type) or ''}"
            )
            if not path.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(
                    path, self.store.get(ObjectRef(media.uri, media.digest, media.num_bytes))
                )
            self.saved[media.digest] = os.path.relpath(path, self._base)
        return self.saved[media.digest]
