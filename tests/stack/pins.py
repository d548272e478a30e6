"""Writes compose/images.env: the images of others by digest, so that no registry can give another
content under the same tag.

python -m tests.stack.pins    asks each registry for the digest of a tag; needs no container engine

`make stack` reads the file; other compose commands take it by `--env-file images.env`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.stack.container_engine import COMPOSE_FILE, PINS_FILE, exit_code_of
from tests.stack.registry import digest_of

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


def text_of(pins: Mapping[str, str]) -> str:
    """Return the content of the file."""
    return HEAD + "".join(f"{variable}={image}\n" for variable, image in sorted(pins.items()))


def by_digest(image: str) -> str:
    """Return an image by the digest that its tag has now; one that is named by digest stays.

    Raises:
        StackError: Its registry gives none.
    """
    if "@" in image:
        return image
    folder, slash, name = image.rpartition("/")
    return f"{folder}{slash}{name.partition(':')[0]}@{digest_of(image)}"


def pin(images: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return every image by digest, by variable.

    Args:
        images: Tags by variable.
        chosen: By variable, images that are taken instead: of a registry of one's own.
    Raises:
        StackError: The registry of one gives no digest.
    """
    pins = {}
    for variable, tag in images.items():
        pins[variable] = by_digest(chosen.get(variable) or tag)
        print(f"{variable}={pins[variable]}", flush=True)
    return pins


def write_pins() -> None:
    """Write the file, if every image has a digest.

    Raises:
        StackError: See `pin`; the file stays as it was.
    """
    PINS_FILE.write_text(text_of(pin(images_of_others(), os.environ)))


def main() -> int:
    """Write the file."""
    return exit_code_of(write_pins)


if __name__ == "__main__":
    sys.exit(main())
