"""Read prompts from a Parquet file, or from a folder of them in Hugging Face layout.

Other modules import the optional package pyarrow from here.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.config import RowsConfig
from relax_events.data.columns import ColumnReader
from relax_events.data.rows import InvalidRows, PromptRow
from relax_events.errors import ConfigError, EnvironmentProblem

try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError as error:
    raise EnvironmentProblem(
        f"Parquet and compressed files need the package pyarrow ({error}); install "
        "relax-events[parquet]"
    ) from None

from relax_events.data.arrow_rows import ArrowRows

__all__ = ["pa", "parquet"]


ALL_ROWS = slice(None)
BATCH_ROWS = 1024
CACHE_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file; `first_row` counts over all files."""

    path: Path
    number: int
    first_row: int
    num_rows: int
    first_row_of_file: int


class ParquetSource:
    """Rows of Parquet files, read on demand. The most recent row groups are cached, up to 32 MiB or
    one group.

    Every row is checked when the files are opened, in batches, so that an invalid row stops a run
    before it starts.
    """

    def __init__(
        self,
        path: Path,
        config: RowsConfig,
        *,
        files: Sequence[Path] = (),
        span: slice = ALL_ROWS,
        section: str = "data",
    ) -> None:
        """Find the row groups and check the rows.

        Args:
            path: A file, or a folder of files.
            config: Names split, columns and system prompt.
            files: The files, where `path` is only the first of them.
            span: The rows to use.
            section: Section of the run file that names the path, for errors.
        Raises:
            ConfigError: The file is missing, is not Parquet, has no rows, or has more invalid rows
                than allowed.
        """
        self._path, self._section = path, section
        self._columns = ColumnReader(config, section=section)
        self._rows = ArrowRows(self._columns.named_columns)
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self.invalid_rows = InvalidRows(section, config.max_invalid_rows)
        self._groups = self._find_groups(
            files or parquet_files(path, config.split, section=section)
        )
        self._first_rows = [group.first_row for group in self._groups]
        total = sum(group.num_rows for group in self._groups)
        self._start, self._stop, _ = span.indices(total)
        self._num_valid_before = array("Q")
        """For each invalid row, the number of valid rows before it."""
        self._check()
        if self.num_rows < 1:
            raise ConfigError(
                f"{path} has no "
                f"rows{'' if span == ALL_ROWS else f' from {self._start} on, of {total}'}; "
                f"set {section}.source"
            )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return max(self._stop - self._start, 0) - len(self._num_valid_before)

    def row(self, index: int) -> PromptRow:
        """Read one row, with the row group that contains it."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self._path}: it has {self.num_rows} rows")
        position = self._start + index + bisect_right(self._num_valid_before, index)
        number = bisect_right(self._first_rows, position) - 1
        group = self._groups[number]
        offset = position - group.first_row
        table = self._table(number).slice(offset, 1)
        (columns,) = self._rows.read(table, path=group.path)
        return self._columns.read_row(
            columns, f"{group.path}, row {position - group.first_row_of_file}"
        )

    def _find_groups(self, files: Sequence[Path]) -> list[RowGroup]:
        groups: list[RowGroup] = []
        row = 0
        for path in files:
            first_row_of_file = row
            with self._opened(path) as file:
                for number in range(file.metadata.num_row_groups):
                    num_rows = file.metadata.row_group(number).num_rows
                    groups.append(RowGroup(path, number, row, num_rows, first_row_of_file))
                    row += num_rows
        return [group for group in groups if group.num_rows]

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with parquet.ParquetFile(path) as file:
                yield file
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(
                f"data file {path} can't be read as Parquet: {error}; set {self._section}.source"
            ) from None

    def _table(self, number: int) -> pa.Table:
        """Return a row group from the cache, or read it; the least recently used groups are
        evicted.
        """
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = self._groups[number]
        with self._opened(group.path) as file:
            table = file.read_row_group(
                group.number, columns=self._columns.required_columns(file.schema_arrow.names)
            )
        while (
            self._cache
            and table.nbytes + sum(cached.nbytes for cached in self._cache.values()) > CACHE_BYTES
        ):
            self._cache.popitem(last=False)
        self._cache[number] = table
        return table

    def _check(self) -> None:
        num_valid = 0
        for location, columns in self._all_columns():
            try:
                self._columns.read_row(columns, location)
            except ConfigError as error:
                self.invalid_rows.add(error)
                self._num_valid_before.append(num_valid)
            else:
                num_valid += 1

    def _all_columns(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield location and columns of every row of the span, with one batch in memory at a
        time.
        """
        for group in self._groups:
            if group.first_row + group.num_rows <= self._start or group.first_row >= self._stop:
                continue
            with self._opened(group.path) as file:
                names = self._columns.required_columns(file.schema_arrow.names)
                row = group.first_row
                for batch in file.iter_batches(
                    BATCH_ROWS, row_groups=[group.number], columns=names
                ):
                    for columns in self._rows.read(batch, path=group.path):
                        if self._start <= row < self._stop:
                            yield f"{group.path}, row {row - group.first_row_of_file}", columns
                        row += 1


def parquet_files(path: Path, split: str, *, section: str) -> list[Path]:
    """Return the Parquet files of a source, sorted by name.

    Args:
        path: A file, or a folder in Hugging Face layout: `train-00000-of-00002.parquet`, also in
            subfolders, or `train/0000.parquet`.
        split: Selects the files whose name begins with it, or whose folder has that name.
        section: Section of the run file that names the path, for errors.
    Raises:
        ConfigError: There are no such files; the text lists the known splits.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"data file {path} does not exist; set {section}.source = 'parquet:<file or folder>'"
        )
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise ConfigError(
            f"data folder {path} holds no .parquet file; set {section}.source = "
            "'parquet:<file or folder>'"
        )
    if irregular := next((file for file in files if file.exists() and not file.is_file()), None):
        raise ConfigError(f"data file {irregular} is not a regular file; remove it from {path}")
    selected = [file for file in files if not split or split in list_splits(file.relative_to(path))]
    if not selected:
        splits = sorted({list_splits(file.relative_to(path))[0] for file in files})
        raise ConfigError(
            f"data folder {path} has no split {split!r}, only {', '.join(splits)}; set "
            f"{section}.split"
        )
    return selected


def list_splits(file: Path) -> tuple[str, ...]:
    """Return the split names that a file may belong to: `train` for `train-00000-of-00002.parquet`
    and for `train/0000.parquet`.
    """
    return (re.split(r"[-.]", file.name, maxsplit=1)[0], *file.parts[:-1])
