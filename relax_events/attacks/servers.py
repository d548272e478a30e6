"""Observations that an untrusted server of environments could send, by the effect they try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAK0lEQVR4nO3NQQEAAATAQATRP4pYSvC7BdjldMdn"
    "9XoHAAAAAAAAAAAAhy3gBQFE4naZuwAAAABJRU5ErkJggg=="
)
"""An image in base64, which a server may send."""


def file_observations(secret: Path) -> dict[str, Any]:
    """Return observations that name a file of the reading machine, or an address.

    Args:
        secret: A file that exists.
    """
    path = str(secret)
    part = {"type": "image_url", "image_url": {"url": path}}
    return {
        "image": {"image": path},
        "image with text": {"text": "see", "image": path},
        "path in an image": {"image": {"path": path}},
        "bytes in an image": {"image": {"bytes": path}},
        "address of a file": {"image": secret.as_uri()},
        "address in an image": {"image": {"url": secret.as_uri()}},
        "message of parts": {"content": [part]},
        "part with a path": {"content": [{"type": "image", "image": path}]},
        "part with data": {"content": [{"type": "image", "data": path}]},
        "environment of the process": {"image": "/proc/self/environ"},
        "device": {"image": "/dev/zero"},
        "relative path": {"image": "pyproject.toml"},
        "home": {"image": "~/.ssh/id_rsa"},
        "address of a service": {"image": "http://169.254.169.254/latest/meta-data"},
        "file that does not exist": {"image": "/no/such/file"},
    }


def wrong_observations() -> dict[str, Any]:
    """Return observations of a wrong form or size."""
    nested: Any = "x"
    for _ in range(300):
        nested = [nested]
    return {
        "nothing": None,
        "list": ["a"],
        "text": "a",
        "deep": {"a": nested},
        "long text": {"text": "a" * (5 << 20)},
        "text of control characters": {"text": "\0" * (1 << 20)},
        "long message": {"content": "a" * (5 << 20)},
        "long role": {"content": "a", "role": "r" * 1000},
        "many images": {"content": [{"type": "image", "data": PIXEL}] * 65},
        "other part": {"content": [{"type": "video", "video": "x"}]},
        "content of a number": {"content": 5},
    }
