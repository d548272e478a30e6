"""Turn the observations of foreign environments into replies: texts, images in any usual form, and
messages with a list of parts.
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


def read_message(message: Mapping[str, Any]) -> Reply:
    """Return a message of `role` and `content`; the content is a text or a list of parts.

    Raises:
        ValueError: A part is neither text nor an image.
    """
    content = message.get("content", "")
    role = str(message.get("role", "user"))
    if isinstance(content, str):
        return Reply(content, role=role)
    return read_parts(content, role=role)


def read_parts(parts: Sequence[Any], *, role: str) -> Reply:
    """Return the reply of a list of text and image parts.

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
            value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
            images.append(read_image(value))
            texts.append(IMAGE_MARK)
        else:
            raise ValueError(f"a part of a message must be text or an image, got {part!r:.200}")
    return Reply("".join(texts), {"image": images} if images else {}, role=role)


def read_observation(observation: Any) -> Reply | None:
    """Return an observation as the policy's next message: a text, an image, a message, a mapping
    with `text` or `image`, or any other value as JSON; None for an empty one.

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
            return read_message(observation)
        text, image = observation.get("text"), observation.get("image")
        if isinstance(text, str) and image is None:
            return Reply(text)
        if image is not None:
            return Reply(f"{IMAGE_MARK}{text or ''}", {"image": [read_image(image)]})
    return Reply(as_text(observation))


def as_text(value: Any) -> str:
    """Return a value as a text: itself, or as JSON."""
    if isinstance(value, str):
        return value
    return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def is_image(value: Any) -> bool:
    """Return whether a value is an image: of PIL, or an array of height, width and 3 colours."""
    if hasattr(value, "save") and hasattr(value, "size"):
        return True
    return len(getattr(value, "shape", ())) == 3 and value.shape[-1] == 3


def read_image(value: Any) -> bytes | str:
    """Return an image as the bytes of a file, or as a data URI.

    Args:
        value: An image of PIL, an array [height, width, 3] of uint8, the bytes of a file, a path,
            a data URI, base64, or one of these under `url`, `bytes` or `path`.
    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("url", "bytes", "path") if value.get(key)), None)
        return read_image(inner)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return _read_named(str(value))
    if hasattr(value, "save"):
        return _encode(value)
    if is_image(value):
        from PIL import Image

        return _encode(Image.fromarray(value))
    raise ValueError(
        f"an image must be one of PIL, an array [height, width, 3], bytes, a path or a data "
        f"URI, got {type(value).__name__}"
    )


def _read_named(name: str) -> bytes | str:
    if name.startswith("data:"):
        return name
    if len(name) < 4096 and Path(name).is_file():
        return Path(name).read_bytes()
    try:
        return base64.b64decode(name, validate=True)
    except binascii.Error:
        raise ValueError(f"an image is neither a file, a data URI nor base64: {name:.80}") from None


def _encode(image: Any) -> bytes:
    file = BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()
