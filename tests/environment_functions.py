"""Environments of tests: valid ones, and ones that fail in every way. Child processes load this
file, so it imports nothing of the tests.
"""

import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from relax_events.environments.reply import Reply
from relax_events.packages.examples.synthetic_media import encode_video, encode_wav

Replies = Reply | str | None


def num_answers(messages: list[dict[str, str]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def image(width: int, height: int, *, seed: int = 0) -> bytes:
    file = BytesIO()
    Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    ).save(file, "PNG")
    return file.getvalue()


def echo_twice(
    completion: str, *, messages: list[dict[str, str]], answer: str, metadata: dict[str, Any]
) -> Replies:
    before = num_answers(messages)
    return (
        None
        if before == 2
        else f"{metadata['word']} {len(completion)} of {answer}, after 1 and {before} more"
    )


def return_messages(completion: str, *, messages: list[dict[str, Any]]) -> Replies:
    return json.dumps(messages)


def silent(completion: str, **reported: Any) -> Replies:
    return None


def echo_always(completion: str, **reported: Any) -> Replies:
    return "and?"


def show_images(
    completion: str, *, files: list[bytes], messages: list[dict[str, str]], **reported: Any
) -> Replies:
    assert len(files) == sum(message["content"].count("<image>") for message in messages)
    if num_answers(messages) == 2:
        return None
    if num_answers(messages) == 1:
        return Reply("<image>and this?", {"image": [image(48, 32, seed=len(completion))]})
    return Reply(
        "see <image> and <image>!", {"image": [*files[:1], image(32, 48), image(64, 32)][:2]}
    )


def show_all(completion: str, *, messages: list[dict[str, str]], **reported: Any) -> Replies:
    before = num_answers(messages)
    if before == 3:
        return None
    frames = list(np.random.default_rng(0).integers(0, 255, (6, 32, 48, 3)).astype(np.uint8))
    audio = np.sin(np.arange(9_600) / 9).astype(np.float32)
    kind, file = [
        ("image", image(32, 48)),
        ("audio", encode_wav(audio)),
        ("video", encode_video(frames)),
    ][before]
    return Reply(f"so <{kind}>", {kind: [file]})  # type: ignore[dict-item]


def with_option(
    completion: str, *, messages: Any, answer: str, metadata: Any, num_rooms: int
) -> Replies:
    return None


def bomb() -> bytes:
    """An image that claims 30,000 x 30,000 pixels, and has none."""
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b""),
        b"IEND": b"",
    }
    whole = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def read_missing_file() -> None:
    raise ValueError("no such file")


HOSTILE: dict[str, Callable[[], Any]] = {
    "raises": read_missing_file,
    "hangs": lambda: time.sleep(60),
    "dies": lambda: os._exit(3),
    "brings no image": lambda: Reply("<image>", {"image": [b"no image at all"]}),
    "brings a bomb": lambda: Reply("<image>", {"image": [bomb()]}),
    "names a file": lambda: Reply("<image>", {"image": ["/etc/passwd"]}),
    "names an address": lambda: Reply("<image>", {"image": ["http://127.0.0.1/a.png"]}),
    "brings too few": lambda: Reply("<image><image>", {"image": [image(32, 32)]}),
    "brings too much": lambda: Reply("<image>", {"image": [bytes(21 * 1024**2)]}),
    "writes a placeholder": lambda: Reply("<|image_pad|><image>", {"image": [image(32, 32)]}),
    "returns a number": lambda: 3,
    "is silent": lambda: None,
}


def hostile(completion: str, *, answer: str, **reported: Any) -> Any:
    """Do what the row's answer names."""
    return HOSTILE[answer]()
