"""An environment for zooming: the policy names a quarter of an image and receives that quarter as a
new image.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

from relax_events.api.environments import Reply
from relax_events.api.errors import PoisonSample

QUARTER = re.compile(r"\b(top|bottom) (left|right)\b", re.IGNORECASE)


def zoom(
    completion: str,
    *,
    messages: list[dict[str, Any]],
    answer: str,
    metadata: dict[str, Any],
    files: list[bytes],
    question: str = "",
) -> Reply | None:
    """Reply with the quarter of an image that the completion names, `top left` to `bottom right`.

    A completion that names no quarter ends the sample.

    Args:
        completion: Text of the policy's turn.
        messages: The conversation before it; ignored.
        answer: The reference answer; ignored.
        metadata: `original` is the image to cut: a data URI, or the index of one of the prompt's
            images. A row without it ends the sample.
        files: The images of the conversation so far.
        question: Text after the quarter; `then` in a row's metadata replaces it.
    Raises:
        PoisonSample: `original` is neither a data URI nor an index of `files`.
    """
    del messages, answer
    named, original = QUARTER.search(completion), metadata.get("original")
    if named is None or original is None:
        return None
    row, column = named[1].lower() == "bottom", named[2].lower() == "right"
    return Reply(
        f"<image>{metadata.get('then', question)}",
        {"image": [quarter(_read_original(original, files), row=int(row), column=int(column))]},
    )


def quarter(image: bytes, *, row: int, column: int) -> bytes:
    """Cut a quarter out of an image, as a PNG."""
    from PIL import Image

    with Image.open(BytesIO(image)) as whole:
        width, height = whole.size
        middle_x, middle_y = width // 2, height // 2
        box = (
            middle_x * column,
            middle_y * row,
            width if column else middle_x,
            height if row else middle_y,
        )
        cut = BytesIO()
        whole.convert("RGB").crop(box).save(cut, "PNG")
    return cut.getvalue()


def _read_original(original: object, files: list[bytes]) -> bytes:
    if isinstance(original, int) and 0 <= original < len(files):
        return files[original]
    if isinstance(original, str) and (comma := original.find(";base64,")) > 0:
        return base64.b64decode(original[comma + len(";base64,") :])
    raise PoisonSample(
        f"the row's metadata has original = {str(original)[:40]!r}; it must be a base64 data URI, "
        f"or the index of one of the prompt's {len(files)} images"
    )
