"""The tools and the reward of DeepEyes: the policy zooms into an image or rotates it by tool calls,
and is rewarded for right answers, for the format, and for right answers that used a tool.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

from relax_events.api.environments import Reply, ToolCall, read_tool_calls
from relax_events.api.errors import PoisonSample

ZOOM, ROTATE = "image_zoom_in_tool", "image_rotate_tool"
SCALE = 1000
"""Boxes are given in thousandths of width and height."""
MIN_SIDE, MAX_ASPECT = 28, 100
ACCURACY, FORMAT, TOOL = 0.8, 0.2, 1.2
"""Weights of the components of the reward."""
MAX_ANSWER_CHARACTERS = 300
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def deepeyes(completion: str, *, metadata: dict[str, Any], files: list[bytes]) -> Reply | None:
    """Run the last tool call of a turn on the original image; a turn without one ends the sample.

    A call that can't be run is answered with the reason.

    Args:
        completion: Text of the policy's turn.
        metadata: `original` is the image that the tools work on, a data URI; without it the
            prompt's first image.
        files: The images of the conversation so far.
    Raises:
        PoisonSample: `original` is no data URI, or the prompt has no image.
    """
    calls = read_tool_calls(completion)
    if not calls:
        return None
    try:
        return Reply("<image>", {"image": [run_tool(calls[-1], _original(metadata, files))]})
    except ToolMistake as mistake:
        return Reply(str(mistake))


class ToolMistake(Exception):
    """A tool call that can't be run; its text is for the policy."""


def run_tool(call: ToolCall, image: bytes) -> bytes:
    """Return a tool's result for an image, as a PNG.

    Raises:
        ToolMistake: The call is no call of these tools, or its arguments are not usable.
    """
    if call.error:
        raise ToolMistake(call.error)
    if call.name == ZOOM:
        return zoom_in(image, call.arguments.get("bbox_2d"))
    if call.name == ROTATE:
        return rotate(image, call.arguments.get("angle"))
    raise ToolMistake(f"there is no tool {call.name!r}, only {ZOOM} and {ROTATE}")


def zoom_in(image: bytes, box: Any) -> bytes:
    """Cut a box out of an image; a side of less than 28 pixels is widened around its centre.

    Args:
        image: The file.
        box: Left, top, right and bottom in thousandths of the width and height.
    Raises:
        ToolMistake: It is no such box, or one side is 100 times as long as the other.
    """
    from PIL import Image

    is_box = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
    if not is_box or not (0 <= box[0] < box[2] <= SCALE and 0 <= box[1] < box[3] <= SCALE):
        raise ToolMistake(f"bbox_2d must be [left, top, right, bottom] in 0 to {SCALE}")
    with Image.open(BytesIO(image)) as whole:
        width, height = whole.size
        left, right = _widen(box[0] * width / SCALE, box[2] * width / SCALE, width)
        top, bottom = _widen(box[1] * height / SCALE, box[3] * height / SCALE, height)
        sides = (right - left, bottom - top)
        if max(sides) > MAX_ASPECT * min(sides):
            raise ToolMistake(f"a side of bbox_2d is over {MAX_ASPECT} times as long as the other")
        return _encode(whole.convert("RGB").crop((left, top, right, bottom)))


def rotate(image: bytes, angle: Any) -> bytes:
    """Rotate an image counterclockwise about its centre; the image grows to hold all of it.

    Args:
        image: The file.
        angle: In degrees.
    Raises:
        ToolMistake: The angle is no number.
    """
    from PIL import Image

    if not _is_number(angle):
        raise ToolMistake("angle must be a number of degrees")
    with Image.open(BytesIO(image)) as whole:
        return _encode(whole.convert("RGB").rotate(angle, expand=True))


def score(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    turns: list[dict[str, str]],
) -> dict[str, float]:
    """Give 0.8 for a right answer, 1.2 more if a tool was used for it, and -0.2 for a wrong format.

    An answer stands between `<answer>` and `</answer>` in the last turn, in less than 300
    characters. It is right if it equals the reference, upper and lower case aside.

    Raises:
        ValueError: The sample has no reference answer.
    """
    if not answer.strip():
        raise ValueError("the sample has no reference answer; see data.answer_key")
    answers = ANSWER.findall(completion)
    policy_answer = answers[-1].strip() if answers else ""
    is_formed = len(answers) == 1 and 0 < len(policy_answer) < MAX_ANSWER_CHARACTERS
    accuracy = float(policy_answer.casefold() == answer.strip().casefold())
    replies = [turn["content"] for turn in turns if turn["role"] != "assistant"]
    used_tool = any(not text for text in replies)  # an image alone; a mistake is answered by a text
    components = {
        "accuracy": accuracy,
        "format": 0.0 if is_formed else -1.0,
        "tool": accuracy * used_tool,
    }
    weights = {"accuracy": ACCURACY, "format": FORMAT, "tool": TOOL}
    total = sum(weights[name] * value for name, value in components.items())
    return {"reward": total, **components}


def _widen(low: float, high: float, limit: int) -> tuple[int, int]:
    """Return a span in pixels, at least 28 long where the image is."""
    if high - low < MIN_SIDE:
        centre = (low + high) / 2
        low = min(max(centre - MIN_SIDE / 2, 0), max(limit - MIN_SIDE, 0))
        high = min(low + MIN_SIDE, limit)
    return round(low), max(round(high), round(low) + 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _original(metadata: dict[str, Any], files: list[bytes]) -> bytes:
    original = metadata.get("original")
    if original is None and files:
        return files[0]
    if isinstance(original, str) and (comma := original.find(";base64,")) > 0:
        return base64.b64decode(original[comma + len(";base64,") :])
    raise PoisonSample(
        f"the row's metadata has original = {str(original)[:40]!r} and the prompt "
        f"{len(files)} images; it must be a base64 data URI, or there must be an image"
    )


def _encode(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
