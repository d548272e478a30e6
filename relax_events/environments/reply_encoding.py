"""Encode an environment's reply for the pipe between its child process and the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from relax_events.environments.reply import Reply
from relax_events.errors import PoisonSample

MODALITIES = ("image", "audio", "video")
MAX_PIECES = 64
MAX_REPLY_BYTES = 4 * 1024**2
"""Of what an environment says to one turn, its texts as JSON, and of the tools that it shows."""
"""Maximum number of media files of one reply."""
MAX_ROLE_CHARACTERS = 64


def encode_reply(
    reply: object, max_item_bytes: int, max_reply_bytes: int
) -> tuple[dict[str, Any], Sequence[bytes]]:
    """Encode a reply for the pipe: the header, then the media files; `kinds` separates bytes from
    data URIs.

    Args:
        reply: What the environment returned.
        max_item_bytes: Of one media file.
        max_reply_bytes: Of the text as JSON, so that the header fits a frame of the pipe.
    """
    if reply is None:
        return {"reply": None}, ()
    if isinstance(reply, str):
        reply = Reply(reply)
    if (
        not isinstance(reply, Reply)
        or not isinstance(reply.text, str)
        or not isinstance(reply.role, str)
    ):
        return {
            "error": (f"returned {type(reply).__name__}; it must return a string, a Reply, or None")
        }, ()
    pieces = [(modality, piece) for modality, files in reply.media.items() for piece in files]
    if problem := _check_text(reply, max_reply_bytes) or _check_media(pieces, max_item_bytes):
        return {"error": f"replied with {problem}"}, ()
    kinds = [(modality, isinstance(piece, bytes)) for modality, piece in pieces]
    contents = [piece if isinstance(piece, bytes) else piece.encode() for _, piece in pieces]
    return {
        "reply": {
            "text": reply.text,
            "role": reply.role,
            "media": list(reply.media),
            "kinds": kinds,
        }
    }, contents


def encode_replies(
    replies: Sequence[object], *, max_item_bytes: int, max_reply_bytes: int
) -> tuple[dict[str, Any], list[bytes]]:
    """Encode the replies to one turn; together they are bounded as one.

    Raises:
        PoisonSample: One is invalid, or all together are too large.
    """
    headers: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for reply in replies:
        header, files = encode_reply(reply, max_item_bytes, max_reply_bytes)
        if "error" in header:
            raise PoisonSample(header["error"])
        headers.append(header["reply"])
        contents += files
        if len(contents) > MAX_PIECES:
            raise PoisonSample(
                f"replied with {len(contents)} media files; at most {MAX_PIECES} are allowed"
            )
    num_bytes = len(orjson.dumps(headers))
    if num_bytes > max_reply_bytes:
        raise PoisonSample(f"replied with {_describe_excess(num_bytes, max_reply_bytes)}")
    return {"replies": headers}, contents


def _check_text(reply: Reply, max_reply_bytes: int) -> str:
    """Return what is wrong with a text, or nothing."""
    if len(reply.role) > MAX_ROLE_CHARACTERS:
        return (
            f"a role of {len(reply.role)} characters; it must have at most {MAX_ROLE_CHARACTERS}, "
            "as user or tool"
        )
    if len(reply.text) > max_reply_bytes:
        return _describe_excess(len(reply.text), max_reply_bytes)
    try:
        num_bytes = len(orjson.dumps([reply.text, reply.role]))
    except orjson.JSONEncodeError as error:
        return f"a text that is not Unicode ({error}); remove its lone surrogates"
    return _describe_excess(num_bytes, max_reply_bytes) if num_bytes > max_reply_bytes else ""


def _describe_excess(num_bytes: int, max_reply_bytes: int) -> str:
    return f"a text of {num_bytes} bytes as JSON; it must be at most {max_reply_bytes} bytes"


def _check_media(pieces: Sequence[tuple[str, object]], max_item_bytes: int) -> str:
    """Return what is wrong with media files, or nothing."""
    if len(pieces) > MAX_PIECES:
        return f"{len(pieces)} media files; at most {MAX_PIECES} are allowed"
    for modality, piece in pieces:
        if modality not in MODALITIES or not isinstance(piece, bytes | str):
            return (
                f"{type(piece).__name__} as {modality}; media are bytes or data URIs, as image, "
                "audio or video"
            )
        if isinstance(piece, bytes) and len(piece) > max_item_bytes:
            return (
                f"{modality} of {len(piece)} bytes; it must be at most "
                f"model.media.max_item_bytes = {max_item_bytes}"
            )
        if isinstance(piece, str) and len(piece) > 3 * max_item_bytes:
            return (
                f"{modality} as a text of {len(piece)} characters; model.media.max_item_bytes is "
                f"{max_item_bytes}"
            )
    return ""
