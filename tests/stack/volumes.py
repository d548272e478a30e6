"""Gives the stack small volumes, and fills them: a disk that is full is a fault like others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.stack.container_engine import Engine

MEGABYTES = {"log": 3000, "files": 1000}
"""By volume: what fits in. The log of some thousand train steps takes the half of its own."""
KEEPER = "keeper"
BALLAST = "ballast"
VOLUME_OF = {"kafka": "log", "trainer": "files"}
"""By service that is hurt when it is full."""
BROKER_MEGABYTES = 1024
"""What the broker may take besides what it writes: a volume in memory counts as its writer's."""


def write_small_volumes(folder: Path, image: str) -> Path:
    """Write an overlay that puts the stack's log and files into memory, so that they can be filled,
    and a container that keeps them there.
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
    keeper = {
        "image": image,
        "user": "root",
        "entrypoint": ["sleep", "infinity"],
        "healthcheck": {"disable": True},
        "stop_signal": "SIGKILL",
        "volumes": [f"{name}:/volumes/{name}" for name in MEGABYTES],
    }
    path = folder / "volumes.json"
    services: dict[str, Any] = {
        name: {"depends_on": {KEEPER: {"condition": "service_started"}}}
        for name in ("kafka", "topics", "model")
    }
    services["kafka"]["mem_limit"] = f"{MEGABYTES['log'] + BROKER_MEGABYTES}m"
    path.write_text(json.dumps({"services": {KEEPER: keeper, **services}, "volumes": volumes}))
    return path


def fill(engine: Engine, volume: str, *, free_fraction: float = 0.0) -> None:
    """Fill a volume until only a fraction of it is free.

    Raises:
        StackError: It could not be filled.
    """
    folder = f"/volumes/{volume}"
    left = int(MEGABYTES[volume] * free_fraction)
    room = f"$(df --output=avail --block-size=1M {folder} | tail --lines=1)"
    fills = (
        f"head --bytes=$(({room} - {left}))M /dev/zero > {folder}/{BALLAST}; test {room} -le "
        f"{left + 1}"
    )
    engine.docker("exec", *engine.containers(KEEPER), "sh", "-c", fills)


def free(engine: Engine, volume: str) -> None:
    """Take away what `fill` has written.

    Raises:
        StackError: It can't be taken away.
    """
    engine.docker(
        "exec", *engine.containers(KEEPER), "rm", "--force", f"/volumes/{volume}/{BALLAST}"
    )
