"""Give the stack small volumes, and fill them to inject full disks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.stack.container_engine import ContainerEngine

MEGABYTES = {"log": 3000, "files": 1000}
"""Size by volume. The log of some thousand train steps takes half of its volume."""
VOLUME_HOLDER = "volume-holder"
BALLAST = "ballast"
VOLUME_OF = {"kafka": "log", "trainer": "files"}
"""The volume by the service that fails when it is full."""
BROKER_MEGABYTES = 1024
"""Memory limit of the broker without its volume: a volume in memory counts as memory of its
writer."""


def write_small_volumes(folder: Path, image: str) -> Path:
    """Write an overlay that puts the stack's log and files into tmpfs volumes, and a container that
    holds them.
    """
    volumes = {
        name: {
            "name": f"relax_small_{name}",
            "driver_opts": {
                "type": "tmpfs",
                "device": "tmpfs",
                "o": f"size={size}m,uid=1000,gid=1000",
            },
        }
        for name, size in MEGABYTES.items()
    }
    holder = {
        "image": image,
        "user": "root",
        "entrypoint": ["sleep", "infinity"],
        "healthcheck": {"disable": True},
        "stop_signal": "SIGKILL",
        "volumes": [f"{name}:/volumes/{name}" for name in MEGABYTES],
    }
    path = folder / "volumes.json"
    services: dict[str, Any] = {
        name: {"depends_on": {VOLUME_HOLDER: {"condition": "service_started"}}}
        for name in ("kafka", "topics", "model")
    }
    services["kafka"]["mem_limit"] = f"{MEGABYTES['log'] + BROKER_MEGABYTES}m"
    path.write_text(
        json.dumps({"services": {VOLUME_HOLDER: holder, **services}, "volumes": volumes})
    )
    return path


def fill(engine: ContainerEngine, volume: str, *, free_fraction: float = 0.0) -> None:
    """Fill a volume until only a fraction of it is free.

    Raises:
        StackError: The volume could not be filled.
    """
    folder = f"/volumes/{volume}"
    left = int(MEGABYTES[volume] * free_fraction)
    room = f"$(df --output=avail --block-size=1M {folder} | tail --lines=1)"
    fills = (
        f"head --bytes=$(({room} - {left}))M /dev/zero > {folder}/{BALLAST}; test {room} -le "
        f"{left + 1}"
    )
    engine.docker("exec", *engine.containers(VOLUME_HOLDER), "sh", "-c", fills)


def free(engine: ContainerEngine, volume: str) -> None:
    """Delete what `fill` has written.

    Raises:
        StackError: The file can't be deleted.
    """
    engine.docker(
        "exec", *engine.containers(VOLUME_HOLDER), "rm", "--force", f"/volumes/{volume}/{BALLAST}"
    )
