"""Exports samples into a file, one row each, with their media in a folder. Streaming: one sample is
held at a time.
"""

from __future__ import annotations

import mimetypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Protocol

import orjson

from relax_events.errors import ConfigError, ObjectError
from relax_events.events.parts import (
    Array,
    ChatMessage,
    ContentPart,
    MediaRef,
    ObjectRef,
    StoredArray,
)
from relax_events.history.run_log import RunLog
from relax_events.history.samples.view import SampleView
from relax_events.objects import ObjectStore, check_out
from relax_events.reports.atif import TrajectoryBuilder
from relax_events.reports.report_files import replace_file
from relax_events.reports.sample_page import SamplePage

TOKEN_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "path_lengths")
Row = dict[str, Any]


class RowWriter(Protocol):
    """Writes rows to a file, atomically."""

    def write(self, row: Row) -> None:
        """Add a row."""

    def close(self, *, is_whole: bool) -> None:
        """Close the file; an incomplete one is removed."""


Layout = Literal["rows", "atif"]


def open_export(
    log: RunLog,
    path: Path | None,
    *,
    media: Path | None = None,
    tokens: bool = False,
    layout: Layout = "rows",
) -> Export | SamplePage:
    """Open the export that the file's suffix names; arguments and errors as for `Export`. A page
    embeds its media, and has no tokens.
    """
    if path is None or path.suffix != ".html":
        return Export(log, path, media=media, tokens=tokens, layout=layout)
    if media is not None or tokens or layout != "rows":
        raise ConfigError(
            "a page embeds its media, and shows no tokens; leave out --media, --tokens and "
            "--layout, or export .jsonl"
        )
    return SamplePage(log, path)


class Export(AbstractContextManager["Export"]):
    """An export into a `.jsonl` or `.parquet` file, or as JSON lines to stdout."""

    def __init__(
        self,
        log: RunLog,
        path: Path | None,
        *,
        media: Path | None = None,
        tokens: bool = False,
        layout: Layout = "rows",
    ) -> None:
        """Open the file and the run's object store.

        Args:
            log: The run's log, which also counts unreadable records.
            path: The file; stdout when None. Its suffix selects the format.
            media: Folder for media; by default `<file>-media` next to the file, or `media` here.
            tokens: Add the columns tokens, loss_mask, rollout_logprobs and path_lengths; to
                trajectories the tokens of each turn.
            layout: What a line is: a row of columns, or a trajectory of ATIF.
        Raises:
            ConfigError: The file has another suffix, or one that trajectories can't have, or the
                object store can't be opened.
            EnvironmentProblem: Parquet is wanted and pyarrow is not installed.
        """
        if layout == "atif" and path is not None and path.suffix != ".jsonl":
            raise ConfigError(
                f"trajectories are JSON: --output-file must end in .jsonl, got {path}"
            )
        self._log, self._tokens = log, tokens
        self._trajectories = (
            TrajectoryBuilder.from_config(log.config, tokens=tokens) if layout == "atif" else None
        )
        self._store = ObjectStore.open(
            log.config.objects_uri, uri_aliases=log.config.objects.uri_aliases
        )
        base = Path() if path is None else path.parent
        self._media = MediaFolder(
            media or (Path("media") if path is None else base / f"{path.stem}-media"),
            base=base,
            store=self._store,
        )
        self._writer = open_writer(path, tokens=tokens)
        self.num_rows = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close(is_whole=kind is None)

    @property
    def num_media(self) -> int:
        """Number of exported media files."""
        return len(self._media.saved)

    def add(self, view: SampleView) -> None:
        """Write a sample; one whose stored arrays or media can't be read is skipped, counted and
        named.
        """
        try:
            row = self._build(view)
        except ObjectError as error:
            self._log.unreadable.add(view.position, error)
            return
        self._writer.write(row)
        self.num_rows += 1

    def _build(self, view: SampleView) -> Row:
        save = self._media.save
        if self._trajectories is not None:
            return self._trajectories.build(view, check_out(view.sample, self._store), save)
        row = build_row(view, newest_version=self._log.newest_version, save=save)
        if self._tokens:
            whole = check_out(view.sample, self._store)
            row |= {name: getattr(whole, name) for name in TOKEN_COLUMNS}
        return row


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
        "turn_rewards": _numbers(score.turn_rewards) if score else None,
        "reward_name": score.reward_name if score else None,
        "reward_digest": score.reward_digest if score else None,
        "judge_response": score.judge_response if score else None,
        "reward_error": score.error if score else None,
    }


def _numbers(array: Array | None) -> list[float] | None:
    return (
        None
        if array is None or isinstance(array, StoredArray)
        else [float(value) for value in array.tolist()]
    )


def _messages(messages: Iterable[ChatMessage], save: Callable[[MediaRef], str]) -> list[Row]:
    return [
        {"role": message.role, "content": list(_parts(message.parts, save))} for message in messages
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
        self._folder, self._base, self._store = folder, base, store
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
                    path, self._store.get(ObjectRef(media.uri, media.digest, media.num_bytes))
                )
            self.saved[media.digest] = os.path.relpath(path, self._base)
        return self.saved[media.digest]


def open_writer(path: Path | None, *, tokens: bool) -> RowWriter:
    """Open a writer of the format that the file's suffix names.

    Raises:
        ConfigError: The suffix is unknown.
        EnvironmentProblem: Parquet is wanted and pyarrow is not installed.
    """
    if path is not None and path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output-file must end in .jsonl, .parquet or .html, got {path}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            from relax_events.reports.sample_parquet import ParquetWriter

            return ParquetWriter(path, tokens=tokens)
    return JsonLinesWriter(path)


class JsonLinesWriter:
    """See `RowWriter`. Without a path it writes to stdout."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part") if path else None
        self._stack = ExitStack()
        self._file: BinaryIO = (
            self._stack.enter_context(self._part.open("wb")) if self._part else sys.stdout.buffer
        )

    def write(self, row: Row) -> None:
        """See `RowWriter.write`."""
        self._file.write(
            orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        )

    def close(self, *, is_whole: bool) -> None:
        """See `RowWriter.close`."""
        self._file.flush()
        self._stack.close()
        if self._part is not None and self._path is not None:
            if is_whole:
                self._part.replace(self._path)
            else:
                self._part.unlink()
