"""Encode an environment's reply for the pipe between its child process and the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_events.environments.reply import Reply

MODALITIES = ("image", "audio", "video")
MAX_PIECES = 64
"""Maximum number of media files of one reply."""


def encode_reply(reply: object, max_item_bytes: int) -> tuple[dict[str, Any], Sequence[bytes]]:
    """Encode a reply for the pipe: the header, then the media files; `kinds` separates bytes from
    data URIs.
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
    if len(pieces) > MAX_PIECES:
        return {
            "error": f"replied with {len(pieces)} media files; at most {MAX_PIECES} are allowed"
        }, ()
    for modality, piece in pieces:
        if modality not in MODALITIES or not isinstance(piece, bytes | str):
            return {
                "error": (
                    f"replied with {type(piece).__name__} as {modality}; media are bytes or data "
                    "URIs, as image, audio or video"
                )
            }, ()
        if isinstance(piece, bytes) and len(piece) > max_item_bytes:
            return {
                "error": (
                    f"replied with {modality} of {len(piece)} bytes; it must be at most "
                    f"model.media.max_item_bytes = {max_item_bytes}"
                )
            }, ()
        if isinstance(piece, str) and len(piece) > 3 * max_item_bytes:
            return {
                "error": (
                    f"replied with {modality} as a text of {len(piece)} characters; "
                    f"model.media.max_item_bytes is {max_item_bytes}"
                )
            }, ()
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
