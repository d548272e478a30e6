"""Where the broker's jars and its class archive live between runs."""

import os
from pathlib import Path

from relax_events.broker.embedded.lock import Lock


def cache_directory(lock: Lock) -> Path:
    """Return the user's cache folder of this Kafka version; it may not exist yet.

    Source: XDG Base Directory Specification, `XDG_CACHE_HOME`; a relative value there is to be ignored.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "relax-events" / f"kafka-{lock.kafka_version}"
