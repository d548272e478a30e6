"""Read prompts from a file with one JSON object per line."""

from __future__ import annotations

import codecs
import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from relax_events.config import RowsConfig
from relax_events.data.columns import ColumnReader
from relax_events.data.rows import InvalidRows, PromptRow
from relax_events.errors import ConfigError
from relax_events.events.json_text import RepeatedKey, WrittenFloat, build_object, decode_json
from relax_events.regular_files import open_regular

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BLOCK_BYTES = 1024**2
MAX_UNPACKED_BYTES = 256 * 1024**3
MAX_UNPACKED_RATIO = 200
"""Of unpacked to packed size. Text has 3 to 30; a file made to fill disks has 1,000 and more."""
MIN_CHECKED_BYTES = 64 * 1024**2
"""Below this size the ratio is not checked: a short file of similar lines is legitimate."""
ALL_ROWS = slice(None)


class JsonlSource:
    """Rows of a JSON Lines file, read on demand: memory is eight bytes per row.

    Every row is checked when the file is opened, so that an invalid row stops a run before it
    starts. Blank lines are not rows, and a byte order mark before a line is ignored. A compressed
    file is unpacked into a temporary file, which is deleted with this source.
    """

    def __init__(
        self, path: Path, config: RowsConfig, *, span: slice = ALL_ROWS, section: str = "data"
    ) -> None:
        """Index and check the file.

        Args:
            path: The file.
            config: Names the columns and the system prompt.
            span: The rows to use.
            section: Section of the run file that names the file, for errors.
        Raises:
            ConfigError: The file can't be read or has no rows, or more rows are invalid than
                allowed; the text names file and line.
            EnvironmentProblem: The file is compressed, and pyarrow is not installed.
        """
        self._path, self._section, self._config = path, section, config
        self._columns = ColumnReader(config, section=section)
        self.invalid_rows = InvalidRows(section, config.max_invalid_rows)
        self._offsets = array("Q")
        self._file = self._open()
        weakref.finalize(self, self._file.close)
        try:
            self._index(span)
        except OSError as error:
            raise self._read_error(error) from None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._offsets)

    def row(self, index: int) -> PromptRow:
        """Read one row from the file."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self._path}: it has {self.num_rows} rows")
        self._file.seek(self._offsets[index])
        return self._parse(self._file.readline(), f"row {index}")

    def _open(self) -> IO[bytes]:
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            raise ConfigError(
                f"data file {self._path} does not exist; set {self._section}.source = "
                "'jsonl:<path>'"
            ) from None
        except OSError as error:
            raise self._read_error(error) from None
        if self._path.suffix not in COMPRESSED:
            return file
        with file:
            return self._unpack(file)

    def _unpack(self, packed: IO[bytes]) -> IO[bytes]:
        from relax_events.data.parquet import pa

        unpacked = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this source
        block = memoryview(
            bytearray(BLOCK_BYTES)
        )  # pyarrow's `read` leaks its block if the file is damaged
        try:
            with pa.CompressedInputStream(packed, COMPRESSED[self._path.suffix]) as stream:
                while num_bytes := stream.readinto(block):
                    unpacked.write(block[:num_bytes])
                    self._check_unpacked_size(
                        unpacked.tell(), packed_bytes=os.fstat(packed.fileno()).st_size
                    )
        except OSError as error:
            unpacked.close()
            raise self._read_error(error) from None
        except ConfigError:
            unpacked.close()
            raise
        unpacked.seek(0)
        return unpacked

    def _check_unpacked_size(self, num_bytes: int, *, packed_bytes: int) -> None:
        """Reject a file that unpacks to far more bytes than it has."""
        if num_bytes > MAX_UNPACKED_BYTES:
            limit = f"{MAX_UNPACKED_BYTES} bytes"
        elif num_bytes > max(MAX_UNPACKED_RATIO * packed_bytes, MIN_CHECKED_BYTES):
            limit = f"{MAX_UNPACKED_RATIO} times its {packed_bytes} bytes"
        else:
            return
        raise ConfigError(
            f"data file {self._path} unpacks to more than {limit}; unpack it yourself if it is "
            "trusted"
        )

    def _read_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"data file {self._path} can't be read: {error.strerror or error}; set "
            f"{self._section}.source = 'jsonl:<path>'"
        )

    def _index(self, span: slice) -> None:
        start, stop = span.start or 0, span.stop
        for ordinal, (number, offset, line) in enumerate(self._lines()):
            if stop is not None and ordinal >= stop:
                break
            if ordinal < start:
                continue
            try:
                self._parse(line, number)
            except ConfigError as error:
                self.invalid_rows.add(error)
            else:
                self._offsets.append(offset)
        if not self._offsets:
            where = (
                ""
                if span == ALL_ROWS
                else f" between {start} and {'its end' if stop is None else stop}"
            )
            raise ConfigError(
                f"data file {self._path} has no rows{where}; give it one JSON object per line"
            )

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number (from 1), byte offset and bytes of each line that is not blank."""
        offset = 0
        for number, line in enumerate(self._file, 1):
            if number == 1:
                self._require_utf8(line)
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield number, offset, line
            offset += len(line)

    def _require_utf8(self, first_line: bytes) -> None:
        encoding = json.detect_encoding(first_line)
        if not encoding.startswith("utf-8"):
            raise ConfigError(
                f"{self._path}:1 is {encoding.upper()[:6]}; convert the file to UTF-8"
            )

    def _parse(self, line: bytes, number: int | str) -> PromptRow:
        location = f"{self._path}:{number}"
        try:
            columns = decode_json(
                line.removeprefix(codecs.BOM_UTF8).decode(),
                parse_float=WrittenFloat,
                object_pairs_hook=build_object,
            )
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{location} is not UTF-8: byte {error.object[error.start]:#04x} at position "
                f"{error.start + 1}; convert the file to UTF-8"
            ) from None
        except RepeatedKey as error:
            raise ConfigError(f"{location}: {error}; keep one of them") from None
        except ValueError as error:
            raise ConfigError(
                f"{location} is not JSON: {error}; each line must be one JSON object"
            ) from None
        return self._columns.read_row(columns, location)
