"""Large files are read with little memory, measured as the growth of a process that opens one and
reads all over it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

MEASURE = """
import re, sys
from pathlib import Path
from relax_events.config import DataConfig
from relax_events.data.sources import open_stream

def peak_bytes():
    # Not that of resource.getrusage, which begins with the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024

small, large = sys.argv[1:]
open_stream(DataConfig(source=small), seed=0)[0]  # all that has to be imported is
before = peak_bytes()
stream = open_stream(DataConfig(source=large), seed=0)
texts = [stream[position].messages[0].text for position in range(0, 200)]
assert len(set(texts)) == 200
print(stream.num_rows, peak_bytes() - before)
"""
MEGABYTE = 1024**2
PROMPT = "x" * 200


def grown_by(small: str, large: str) -> tuple[int, int]:
    """Return the rows of the large source, and the bytes that opening it takes."""
    command = [sys.executable, "-c", MEASURE, small, large]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    rows, grown = ended.stdout.split()
    return int(rows), int(grown)


def write_lines(path: Path, count: int) -> Path:
    with path.open("w") as file:
        file.writelines(
            f'{{"prompt": "{number} {PROMPT}", "answer": ""}}\n' for number in range(count)
        )
    return path


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_jsonl_source_uses_eight_bytes_of_memory_per_row(tmp_path: Path, count: int) -> None:
    small, large = (
        write_lines(tmp_path / name, rows)
        for name, rows in (("small.jsonl", 300), ("large.jsonl", count))
    )
    rows, grown = grown_by(f"jsonl:{small}", f"jsonl:{large}")
    assert rows == count
    # The array of offsets grows by an eighth at a time. The file itself has over 200 bytes a row.
    assert grown < 9 * count + 8 * MEGABYTE


def test_parquet_source_bounds_the_row_groups_in_memory(tmp_path: Path) -> None:
    count, long_prompt = 100_000, 10 * PROMPT
    tables = {}
    for name, rows in (("small", 300), ("large", count)):
        columns = {
            "prompt": [f"{number} {long_prompt}" for number in range(rows)],
            "answer": [""] * rows,
        }
        tables[name] = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table(columns), tables[name], row_group_size=5_000, use_dictionary=False)
    rows, grown = grown_by(f"parquet:{tables['small']}", f"parquet:{tables['large']}")
    assert rows == count
    # Of the 200 MB that the rows hold: the budget, row groups of 10 MB that are being read, and
    # what the allocator keeps of those before.
    assert (
        grown < (32 + 128) * MEGABYTE
    )  # the file holds 200 MB; with other work running the allocator keeps more of what was freed
