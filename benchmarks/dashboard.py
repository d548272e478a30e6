"""The columns behind `relax dashboard` at a million samples: how long a page and a filter take, and how
much memory the process needs.

    python -m benchmarks.dashboard
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
import psutil

from relax_events.dashboard.sample_columns import NewSample, SampleQuery, SampleTable
from relax_events.dashboard.views import group_curves

NUM_SAMPLES = 1_000_000
GROUP_SAMPLES, STEP_GROUPS = 8, 32
REPEATS = 9
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "dashboard.md"
QUERIES = {
    "first page, newest first": SampleQuery(),
    "page 1,000": SampleQuery(first=50_000),
    "sorted by reward": SampleQuery(sort="reward"),
    "sorted by staleness": SampleQuery(sort="staleness"),
    "reward 0.5 or more": SampleQuery(bounds={"reward": (0.5, np.inf)}),
    "reward, tokens, staleness, worker, sorted by tokens": SampleQuery(
        bounds={"reward": (0.2, 0.9), "tokens": (100, 5000), "staleness": (0, 2)},
        worker="rollout-3",
        sort="tokens",
    ),
    "one prompt group": SampleQuery(group="001000-0005-0"),
    "filter that nothing matches": SampleQuery(bounds={"reward": (2.0, 3.0)}),
}


def fill(table: SampleTable) -> None:
    """Add samples as a run of 3,907 steps leaves them: eight a prompt group, most of them trained."""
    random = np.random.default_rng(0)
    rewards = random.random(NUM_SAMPLES).tolist()
    tokens = random.integers(20, 20_000, NUM_SAMPLES).tolist()
    for number in range(NUM_SAMPLES):
        group = number // GROUP_SAMPLES
        step, index = divmod(group, STEP_GROUPS)
        row = table.add(
            NewSample(
                number,
                step << 38 | index << 14,
                number % GROUP_SAMPLES,
                max(step - 1, 0),
                max(step - 1, 0),
                tokens[number],
                "stop" if number % 11 else "length",
                f"rollout-{group % 16}",
                "math" if index % 2 else "code",
                1_700_000_000_000_000 + number * 1000,
                number % 12,
                number // 12,
            )
        )
        table.set_reward(row, rewards[number])
    table.newest_version = step + 1


def measure(table: SampleTable) -> dict[str, float]:
    """Return the median seconds of each query, the rows of its page included."""
    found = {}
    for name, query in QUERIES.items():
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            table.describe(table.select(query).rows)
            seconds.append(time.perf_counter() - started)
        found[name] = statistics.median(seconds)
    started = time.perf_counter()
    group_curves(table)
    found["curves of prompt groups"] = time.perf_counter() - started
    return found


def main() -> None:
    """Measure, print the numbers as JSON, and write the page."""
    import relax_events.dashboard.app  # noqa: F401 what the server's process loads

    process, table = psutil.Process(), SampleTable()
    empty = process.memory_info().rss
    fill(table)
    seconds = measure(table)
    memory = {
        "process_before_mb": empty / 1e6,
        "process_mb": process.memory_info().rss / 1e6,
        "columns_mb": table.columns.num_bytes / 1e6,
    }
    print(json.dumps({"seconds": seconds, "memory": memory}))
    rows = "\n".join(f"| {name} | {1e3 * value:.0f} ms |" for name, value in seconds.items())
    PAGE.write_text(
        f"""# The dashboard at a million samples

{NUM_SAMPLES:,} samples in the columns behind the page `Samples`; each number is the median of {REPEATS} calls on this machine, the rows of
the page included. Written by `python -m benchmarks.dashboard`.

| query | time |
|---|---|
{rows}

The process has {memory["process_mb"]:.0f} MB with all samples, {memory["process_before_mb"]:.0f} MB before; the columns have
{memory["columns_mb"]:.0f} MB. The clients of Kafka, which prefetch records while older samples are read, are not part of it.
"""
    )


if __name__ == "__main__":
    main()
