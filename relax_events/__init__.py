"""Relax Events: asynchronous reinforcement-learning post-training as an event-driven pipeline on
Apache Kafka.

`train` and `attach` are its Python face; they load the library when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
FACE, FACE_MODULE = ("train", "attach", "Run"), "relax_events.launcher.run_handle"


def __getattr__(name: str) -> Any:
    if name not in FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(FACE_MODULE), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *FACE})
