"""A rank in test_ranks_together: joins the others as the trainer does; then rank RANK fails, or all
wait. `python -m ... RANK FAILURE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from relax_events import cli
from relax_events.cli import entry
from relax_events.errors import ConfigError, Fenced, RelaxError
from relax_events.runtime.parent_watch import drain_when_supervisor_exits
from relax_events.training.distributed import open_ranks

FAILURES: dict[str, RelaxError] = {
    "fenced": Fenced("another instance took over"),
    "wrong": ConfigError("trainer.learning_rate is wrong"),
}


def act() -> None:
    """Fail on the chosen rank, else wait for the others."""
    drain_when_supervisor_exits(drain_seconds=1.0)
    failing, failure = int(sys.argv[2]), sys.argv[3]
    with open_ranks(timeout_seconds=60.0) as ranks:
        ranks.all_gather(np.zeros(1))
        print("joined", os.getpid(), flush=True)
        if (
            failure == "hang"
        ):  # as in a kernel that never ends: no signal handler of Python's gets a turn
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ranks.rank != failing:
                time.sleep(600)
            raise MemoryError("no room")
        if ranks.rank == failing:
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FAILURES[failure]
        ranks.all_gather(np.zeros(1))


if __name__ == "__main__":
    sys.argv.insert(1, "worker")
    entry._called = act
    cli.main()
