"""Runs `relax` as another release whose events of scores have fewer or more fields:
`other_release.py older worker reward ...`.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from relax_events import cli
from relax_events.events import codec

CHANGED = "relax.events.sample.SamplesScored"
CAME_LATER = ("reward_digest", "seconds")
TO_COME = {
    "name": "judge",
    "type": ["null", "string"],
    "default": None,
    "doc": "Who gave the reward.",
}


def of_release(release: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema as the release has it."""
    changed = copy.deepcopy(schema)
    if release == "older":
        changed["fields"] = [
            field for field in changed["fields"] if field["name"] not in CAME_LATER
        ]
    else:
        changed["fields"].append(TO_COME)
    return changed


def main() -> None:
    """Set that release's schemas in the codec, and run `relax`."""
    release, *arguments = sys.argv[1:]
    schemas = dict(codec.current_schemas())
    schemas[CHANGED] = of_release(release, schemas[CHANGED])
    codec.current_schemas = lambda: schemas
    sys.argv = ["relax", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
