"""Write compose/images.env: third-party images by digest, so that a registry can't change the
content of a tag.

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
from tests.stack.registry import fetch_digest

IMAGE = re.compile(r"\$\{([A-Z]+_IMAGE):-([^}]+)\}")
HEAD = (
    "# Third-party images by digest, written by `make stack-pins`. An environment variable "
    "overrides a line of this file.\n"
)


def read_third_party_images(folder: Path = COMPOSE_FILE.parent) -> dict[str, str]:
    """Return the tag of each third-party image in the compose files, by its variable."""
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


def render_pins(pins: Mapping[str, str]) -> str:
    """Return the content of the file."""
    return HEAD + "".join(f"{variable}={image}\n" for variable, image in sorted(pins.items()))


def resolve_digest(image: str) -> str:
    """Return an image by the current digest of its tag; an image named by digest is returned
    unchanged.

    Raises:
        StackError: Its registry returns none.
    """
    if "@" in image:
        return image
    folder, slash, name = image.rpartition("/")
    return f"{folder}{slash}{name.partition(':')[0]}@{fetch_digest(image)}"


def pin(images: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return every image by digest, by variable.

    Args:
        images: Tags by variable.
        chosen: Images by variable that replace them, for example of a private registry.
    Raises:
        StackError: A registry returns no digest.
    """
    pins = {}
    for variable, tag in images.items():
        pins[variable] = resolve_digest(chosen.get(variable) or tag)
        print(f"{variable}={pins[variable]}", flush=True)
    return pins


def write_pins() -> None:
    """Write the file, if every image has a digest.

    Raises:
        StackError: See `pin`; the file stays as it was.
    """
    PINS_FILE.write_text(render_pins(pin(read_third_party_images(), os.environ)))


def main() -> int:
    """Write the file."""
    return exit_code_of(write_pins)


if __name__ == "__main__":
    sys.exit(main())
