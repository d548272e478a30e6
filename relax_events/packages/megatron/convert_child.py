"""Child process that converts a model. Started only by `model_conversion`.

It builds the model first, which opens sockets, and confines itself before it reads the checkpoint.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from relax_events.api.errors import RelaxError
from relax_events.confinement.frames import Frame
from relax_events.confinement.profiles import Confinement
from relax_events.confinement.served import Answer, Served


def main() -> int:
    """Serve the parent's conversions."""
    served = Served()
    served.report_ready({})
    served.serve(partial(_convert, served.setup))
    return 0


def _convert(setup: dict[str, Any], request: Frame) -> Answer:
    from dataclasses import asdict

    from relax_events.packages.megatron.conversion import convert_to_folder, convert_to_megatron

    source, folder, report = Path(setup["source"]), Path(setup["folder"]), _report
    try:
        if setup["format"] == "megatron":
            return asdict(convert_to_megatron(source, folder, report=report)), ()
        confine = Confinement.from_json(setup["confinement"]).apply
        base = Path(setup["base"])
        done = convert_to_folder(source, folder, base=base, confine=confine, report=report)
        return asdict(done), ()
    except RelaxError as error:
        return {"error": str(error), "kind": type(error).__name__}, ()


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
