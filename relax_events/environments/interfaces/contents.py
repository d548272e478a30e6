"""Turn the observations of foreign environments into replies: texts, images in any usual form, and
messages with a list of parts.

Files are read by their paths only for environments of local code (`reads_files`). What a server
sends names no file of this machine: its images are data URIs or base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson

from relax_events.environments.reply import Reply

IMAGE_MARK = "<image>"
IMAGE_KEYS = ("image", "image_url", "url", "data")


def read_message(message: Mapping[str, Any], *, reads_files: bool = False) -> Reply:
    """Return a message of `role` and `content`; the content is a text or a list of parts.

    Args:
        message: Of the environment.
        reads_files: Whether an image may be the path of a file; never for a server's.

    Raises:
        ValueError: A part is neither text nor an image.
    """
    content = message.get("content", "")
    role = str(message.get("role", "user"))
    if isinstance(content, str):
        return Reply(content, role=role)
    return read_parts(content, role=role, reads_files=reads_files)


def read_parts(parts: Sequence[Any], *, role: str, reads_files: bool = False) -> Reply:
    """Return the reply of a list of text and image parts; `reads_files` is as in `read_message`.

    Raises:
        ValueError: A part is of another kind.
    """
    texts: list[str] = []
    images: list[bytes | str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(part.get("text") or "")
        elif kind in ("image", "image_url"):
            key = next((key for key in IMAGE_KEYS if part.get(key) is not None), "image")
            images.append(read_image(part.get(key), field=key, reads_files=reads_files))
            texts.append(IMAGE_MARK)
        else:
            raise ValueError(f"a part of a message must be text or an image, got {part!r:.200}")
    return Reply("".join(texts), {"image": images} if images else {}, role=role)


def read_observation(observation: Any, *, reads_files: bool = False) -> Reply | None:
    """Return an observation as the policy's next message: a text, an image, a message, a mapping
    with `text` or `image`, or any other value as JSON; None for an empty one.

    Args:
        observation: Of the environment.
        reads_files: As in `read_message`.

    Raises:
        ValueError: An image has an unknown form.
    """
    if observation is None:
        return None
    if isinstance(observation, str):
        return Reply(observation) if observation else None
    if is_image(observation):
        return Reply(IMAGE_MARK, {"image": [read_image(observation)]})
    if isinstance(observation, Mapping):
        if "content" in observation:
            return read_message(observation, reads_files=reads_files)
        text, image = observation.get("text"), observation.get("image")
        if isinstance(text, str) and image is None:
            return Reply(text)
        if image is not None:
            file = read_image(image, reads_files=reads_files)
            return Reply(f"{IMAGE_MARK}{text or ''}", {"image": [file]})
    return Reply(as_text(observation))


def as_text(value: Any) -> str:
    """Return a value as a text: itself, or as JSON.

    Raises:
        ValueError: It has no JSON, or is nested too deeply for it.
    """
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a value of {type(value).__name__} has no JSON: {error}") from None


def is_image(value: Any) -> bool:
    """Return whether a value is an image: of PIL, or an array of height, width and 3 colours."""
    if hasattr(value, "save") and hasattr(value, "size"):
        return True
    return len(getattr(value, "shape", ())) == 3 and value.shape[-1] == 3


def read_image(value: Any, *, field: str = "image", reads_files: bool = False) -> bytes | str:
    """Return an image as the bytes of a file, or as a data URI.

    Args:
        value: An image of PIL, an array [height, width, 3] of uint8, the bytes of a file, a path,
            a data URI, base64, or one of these under `url`, `bytes` or `path`.
        field: What holds it, for the error.
        reads_files: Whether it may be a path.
    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, Mapping):
        key = next((key for key in ("url", "bytes", "path") if value.get(key)), None)
        where = f"{field}.{key}" if key else field
        return read_image(value.get(key), field=where, reads_files=reads_files)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return _read_named(str(value), field, reads_files=reads_files)
    if hasattr(value, "save"):
        return _encode(value)
    if is_image(value):
        from PIL import Image

        return _encode(Image.fromarray(value))
    raise ValueError(
        f"{field}: an image must be one of PIL, an array [height, width, 3], bytes, a path or a "
        f"data URI, got {type(value).__name__}"
    )


def _read_named(name: str, field: str, *, reads_files: bool) -> bytes | str:
    if name.startswith("data:"):
        return name
    if reads_files and len(name) < 4096 and Path(name).is_file():
        return Path(name).read_bytes()
    try:
        return base64.b64decode(name, validate=True)
    except (binascii.Error, ValueError):
        forms = "a file, a data URI nor base64" if reads_files else "a data URI nor base64"
        rule = "" if reads_files else "; paths and addresses in what a server sends are not read"
        raise ValueError(
            f"{field} is an image that is neither {forms}: {name!r:.80}{rule}"
        ) from None


def _encode(image: Any) -> bytes:
    file = BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()
