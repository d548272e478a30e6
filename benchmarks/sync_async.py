"""Does overlapping rollout and training pay, and does it cost reward? The quickstart, sync and
async in turn, same seeds."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import quickstart, report

SIDES = {
    "sync": ["run.mode=sync", "run.max_staleness=0"],
    "async": ["run.mode=async", "run.max_staleness=2"],
}
STEPS_LEFT_OUT = 2  # the first steps carry the workers' start


def main(repeats: int = 3) -> None:
    """Run both sides `repeats` times, alternating, and write the result."""
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(repeats):
            for side, overrides in SIDES.items():
                measured[side].append(
                    run(Path(folder), f"{side}-{seed}", [*overrides, f"run.seed={seed}"])
                )
    rows = [lay_out_row(side, runs) for side, runs in measured.items()]
    ratios = [
        one["step_seconds"] / other["step_seconds"]
        for one, other in zip(measured["sync"], measured["async"], strict=True)
    ]
    rewards = [
        abs(one["reward"] - other["reward"])
        for one, other in zip(measured["sync"], measured["async"], strict=True)
    ]
    report.write(
        "sync-async",
        title="Synchronous against asynchronous",
        command="python -m benchmarks.sync_async",
        rows=rows,
        conclusion=f"Async takes 1/{statistics.median(ratios):.2f} of the time of sync "
        f"(median of the paired ratios; {', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
        f"final rewards of a pair differ by at most {max(rewards):.3f}.",
        data=measured,
    )


def run(folder: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """Run the quickstart once; return its metrics."""
    data = quickstart.run(folder, name, overrides)
    seconds = [
        value for value in data["curves"]["step_seconds"][STEPS_LEFT_OUT:] if value is not None
    ]
    return {
        "step_seconds": statistics.median(seconds),
        "reward": data["reward_last_10"],
        "wall_seconds": data["wall_seconds"],
        "staleness_mean": data["staleness_mean"],
        "tokens_per_second": data["tokens_trained"] / data["train_seconds"],
    }


def lay_out_row(side: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the runs of one side."""

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    return {
        "mode": side,
        "seconds per step": f"{median('step_seconds'):.3f}",
        "tokens/s": f"{median('tokens_per_second'):.0f}",
        "wall seconds of the run": f"{median('wall_seconds'):.1f}",
        "mean staleness": f"{median('staleness_mean'):.2f}",
        "reward of the last 10 steps": f"{median('reward'):.3f}",
    }


if __name__ == "__main__":
    main()
