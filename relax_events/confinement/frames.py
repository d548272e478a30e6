"""The format of requests and responses between a worker and its child: frames on a pipe.

    4 bytes   length of the head
    8 bytes   length of the contents
    8 bytes   number of the request, which its answer repeats; 0 belongs to no request
    head      JSON: a list of an object and of the lengths of the single contents
    contents  bytes

Numbers are little-endian, and lengths checked against a bound before anything of that size is read.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import IO, Any

import orjson

from relax_events.events.json_text import format_json, parse_json

PREFIX = struct.Struct("<IQQ")
READ_BYTES = 1 << 18
Buffer = bytes | bytearray | memoryview


class InvalidFrame(Exception):
    """A frame is larger than its bound, or its head is not an object with lengths."""


@dataclass(slots=True)
class Frame:
    """A message as it was read."""

    number: int
    head: dict[str, Any]
    contents: list[bytes]


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest frame that a reader accepts.

    Attributes:
        head_bytes: Of the JSON head.
        content_bytes: Of all contents together.
    """

    head_bytes: int = 64 * 1024**2
    content_bytes: int = 1 << 32

    def check(self, num_head_bytes: int, num_content_bytes: int) -> None:
        """Raise InvalidFrame if a frame of these lengths is too large."""
        for what, size, limit in (
            ("head", num_head_bytes, self.head_bytes),
            ("content", num_content_bytes, self.content_bytes),
        ):
            if size > limit:
                raise InvalidFrame(f"a {what} of {size} bytes, at most {limit} may be")


def encode_head(head: Mapping[str, Any], contents: Sequence[Buffer] = ()) -> bytes:
    """Return the JSON head of a frame with these contents.

    Raises:
        TypeError: The head can't be written as JSON.
    """
    parts = [head, [memoryview(content).nbytes for content in contents]]
    try:
        return orjson.dumps(parts)
    except TypeError:  # of a large integer, among others
        try:
            return format_json(parts).encode()
        except ValueError as error:
            raise TypeError(str(error)) from None


def build_frame(line: bytes, contents: Sequence[Buffer], number: int) -> list[Buffer]:
    """Return a frame as buffers to write one after another; the contents are not copied."""
    if not contents:
        return [PREFIX.pack(len(line), 0, number) + line]
    num_content_bytes = sum(memoryview(content).nbytes for content in contents)
    return [PREFIX.pack(len(line), num_content_bytes, number) + line, *contents]


def decode_frame(number: int, line: bytes, content: bytes) -> Frame:
    """Return a frame of its parts.

    Raises:
        InvalidFrame: The head is no JSON object with lengths, or these don't match the contents.
    """
    try:
        head, lengths = parse_json(line.decode())
        bounds = [0, *accumulate(lengths)]
        if isinstance(head, dict) and bounds[-1] == len(content) and bounds == sorted(bounds):
            return Frame(number, head, [content[start:end] for start, end in pairwise(bounds)])
    except (ValueError, TypeError):
        pass
    raise InvalidFrame("a head that is no JSON object with the lengths of its contents")


def read_frame(stream: IO[bytes], limits: FrameLimits) -> Frame | None:
    """Read a frame from a blocking stream; None if the stream ends before it is complete.

    Raises:
        InvalidFrame: It is too large, or malformed.
    """
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    num_head_bytes, num_content_bytes, number = PREFIX.unpack(prefix)
    limits.check(num_head_bytes, num_content_bytes)
    line, content = stream.read(num_head_bytes), stream.read(num_content_bytes)
    if len(line) < num_head_bytes or len(content) < num_content_bytes:
        return None
    return decode_frame(number, line, content)


class FrameReader:
    """Reads frames from a pipe that does not block."""

    def __init__(self, limits: FrameLimits) -> None:
        """Start with an empty buffer.

        Args:
            limits: The largest accepted frame.
        """
        self._limits = limits
        self._buffer = bytearray()
        self._large: mmap.mmap | None = None
        """A frame that is larger than one read; its pages take memory as they are filled."""
        self._num_filled = 0

    def receive(self, descriptor: int) -> bool:
        """Read once what has arrived; False at the end of the stream."""
        if self._large is not None:
            with memoryview(self._large) as view, view[self._num_filled :] as rest:
                num_read = os.readv(descriptor, [rest])
            self._num_filled += num_read
            return num_read > 0
        data = os.read(descriptor, READ_BYTES)
        self._buffer += data
        return bool(data)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that are complete.

        Raises:
            InvalidFrame: A frame is too large, or malformed.
        """
        if self._large is not None:
            if self._num_filled == len(self._large):
                with self._large as whole:
                    self._large = None
                    yield _decode_frame(whole)
            return
        start = 0
        while (size := self._measure(start)) is not None:
            yield _decode_frame(bytes(self._buffer[start : start + size]))
            start += size
        del self._buffer[:start]
        self._expect_large()

    def _measure(self, start: int) -> int | None:
        """Return the size of the frame that begins at a position; None until it is complete."""
        if len(self._buffer) < start + PREFIX.size:
            return None
        num_head_bytes, num_content_bytes, _ = PREFIX.unpack_from(self._buffer, start)
        self._limits.check(num_head_bytes, num_content_bytes)
        size: int = PREFIX.size + num_head_bytes + num_content_bytes
        return size if len(self._buffer) >= start + size else None

    def _expect_large(self) -> None:
        """Read the rest of a frame that is larger than one read into memory of its size."""
        if len(self._buffer) < PREFIX.size:
            return
        num_head_bytes, num_content_bytes, _ = PREFIX.unpack_from(self._buffer)
        size = PREFIX.size + num_head_bytes + num_content_bytes
        if size > READ_BYTES:
            self._large, self._num_filled = mmap.mmap(-1, size), len(self._buffer)
            self._large[: self._num_filled] = bytes(self._buffer)
            self._buffer.clear()


def _decode_frame(frame: bytes | mmap.mmap) -> Frame:
    num_head_bytes, num_content_bytes, number = PREFIX.unpack_from(frame)
    start = PREFIX.size + num_head_bytes
    end = start + num_content_bytes
    return decode_frame(number, frame[PREFIX.size : start], frame[start:end])
