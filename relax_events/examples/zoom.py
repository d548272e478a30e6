"""An environment that shows a part of an image: the policy names a quarter, and sees it closer."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

from relax_events.environments.reply import Reply
from relax_events.errors import PoisonSample

QUARTER = re.compile(r"\b(top|bottom) (left|right)\b", re.IGNORECASE)


def zoom(
    completion: str,
    *,
    messages: list[dict[str, str]],
    answer: str,
    metadata: dict[str, Any],
    files: list[bytes],
    question: str = "",
) -> Reply | None:
    """Show the quarter of an image that the answer names, `top left` to `bottom right`; an answer
    that names none ends the sample.

    Args:
        completion: What the policy wrote.
        messages: What was said before.
        answer: Not looked at.
        metadata: Where it has `original`, this is the image: a data URI, or the number of one of
            the prompt's. Samples without it end.
        files: The images so far.
        question: Put behind the quarter; a row's own `then` in its metadata stands in for it.
    """
    del messages, answer
    named, original = QUARTER.search(completion), metadata.get("original")
    if named is None or original is None:
        return None
    row, column = named[1].lower() == "bottom", named[2].lower() == "right"
    return Reply(
        f"<image>{metadata.get('then', question)}",
        {"image": [quarter(_file(original, files), row=int(row), column=int(column))]},
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


def _file(original: object, files: list[bytes]) -> bytes:
    if isinstance(original, int) and 0 <= original < len(files):
        return files[original]
    if isinstance(original, str) and (comma := original.find(";base64,")) > 0:
        return base64.b64decode(original[comma + len(";base64,") :])
    rule = f"a data URI of base64, or the number of one of the prompt's {len(files)} images"
    raise PoisonSample(
        f"the row's metadata has original = {str(original)[:40]!r}; it must be {rule}"
    )
