"""Writes compose/images.env: the images of others by digest, so that no registry can give another
content under the same tag.

python -m tests.stack.pins        pulls each image by its tag and notes the digest that the registry gave it

`make stack` reads the file; other compose commands take it by `--env-file images.env`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.stack.container_engine import COMPOSE_FILE, PINS_FILE, Engine, StackError, exit_code_of, open_engine
from tests.stack.images import PULL_SECONDS

IMAGE = re.compile(r"\$\{([A-Z]+_IMAGE):-([^}]+)\}")
HEAD = (
    "# The images of others by digest, written by `make stack-pins`. A variable of the "
    "environment goes before a line of this file.\n"
)


def images_of_others(folder: Path = COMPOSE_FILE.parent) -> dict[str, str]:
    """Return the tag of each image that the compose files take from a registry, by the variable
    that chooses another.
    """
    read = [
        yaml.safe_load(file.read_text()).get("services") or {}
        for file in sorted(folder.glob("*.yml"))
    ]
    services = [service for by_name in read for service in by_name.values()]
    texts = [service.get("image", "") for service in services] + [
        service.get("build", {}).get("args", {}).get("BASE_IMAGE", "") for service in services
    ]
    found: dict[str, str] = {match[1]: match[2] for match in map(IMAGE.fullmatch, texts) if match}
    return {
        variable: tag
        for variable, tag in sorted(found.items())
        if not tag.startswith("relax-events:")
    }


def digest_of(tag: str, inspected: str) -> str:
    """Return an image by digest, out of what `docker image inspect` says of it.

    Raises:
        StackError: It comes from no registry.
    """
    name = tag.rpartition(":")[0]
    digests: list[str] = json.loads(inspected) or []
    by_digest = sorted(
        found.partition("@")[2]
        for found in digests
        if re.fullmatch(r".+@sha256:[0-9a-f]{64}", found)
    )
    if not by_digest:
        raise StackError(
            f"{tag} was made on this machine and has no digest of a registry; remove it with "
            f"`docker image rm {tag}` and pull it"
        )
    return f"{name}@{by_digest[0]}"


def text_of(pins: Mapping[str, str]) -> str:
    """Return the content of the file."""
    return HEAD + "".join(f"{variable}={image}\n" for variable, image in sorted(pins.items()))


def pin(engine: Engine) -> dict[str, str]:
    """Pull every image of others and return it by digest, by variable.

    Raises:
        StackError: One can't be pulled or was made here; nothing is written then.
    """
    pins = {}
    for variable, tag in images_of_others().items():
        engine.docker("pull", "--quiet", tag, seconds=PULL_SECONDS)
        pins[variable] = digest_of(
            tag, engine.docker("image", "inspect", "--format", "{{json .RepoDigests}}", tag)
        )
        print(f"{variable}={pins[variable]}", flush=True)
    return pins


def main() -> int:
    """Write the file."""
    return exit_code_of(lambda: PINS_FILE.write_text(text_of(pin(open_engine()))))


if __name__ == "__main__":
    sys.exit(main())
