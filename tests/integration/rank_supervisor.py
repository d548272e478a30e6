"""Supervises two ranks that wait until it is killed: `python -m ... FOLDER RUN_FILE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from relax_events.config import RunConfig
from tests.integration.test_ranks_together import supervisor_of

if __name__ == "__main__":
    supervisor_of(
        RunConfig.model_validate_json(Path(sys.argv[1]).read_bytes()), failing=-1, deed="hang"
    ).start()
    time.sleep(600)
