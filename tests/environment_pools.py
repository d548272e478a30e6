"""Pools of stateful environments for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small_settings import small_run

from relax_events.environments.session_pool import SessionPool
from tests.unit.image_model import image_run


@contextmanager
def pool_of(folder: Path, **environment: Any) -> Iterator[SessionPool]:
    """Have the pool of a run whose policy reads images, with these settings of its environment."""
    tree = image_run(folder).model_dump(mode="json", exclude_unset=True)
    pool = SessionPool(small_run(tree | {"environment": environment}))
    try:
        yield pool
    finally:
        pool.close()
