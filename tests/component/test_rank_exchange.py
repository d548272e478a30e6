"""Four processes exchange bytes over gloo."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("exchanging_ranks.py")


def test_ranks_exchange_bytes_in_pieces_and_share_them_with_their_peers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
