"""The trainer's kernels next to TRL's on the same numbers: losses, advantages, and
log-probabilities over a large vocabulary.

All run in TRL's environment, which shares our torch, so that both sides have the same one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, report

NUM_TOKENS = (1024, 4096)
NUM_ROUNDS = 3
VOCAB_SIZE = 151_936
FULL = "full log-softmax"
SIDES = (FULL, "TRL", "ours")
QUESTION = """\
Losses: forward and backward of the tokens of 256 samples on one thread, with all that either trainer reports of them; ours packed, TRL {version}'s
own `GRPOTrainer.compute_loss` on the same numbers padded to the longest sample: once with samples of equal length, so that there is no padding, and
once with lengths that have a tail. How far loss and gradient lie apart, measured by the largest, says that both compute the same. Advantages:
100,000 prompt groups of 8 samples; TRL has no function for them, so ours are compared with plain torch operations.

Log-probabilities: of 1,024 and 4,096 tokens over a vocabulary of 151,936, float32, from the token ids of a model with one small layer; the memory is
that by which the process grew at its peak, each measurement in a process of its own. "Full" makes all logits and their log-softmax; TRL and ours
work in chunks, and give entropies as well."""


def measure_heads(num_rounds: int, num_tokens: Sequence[int] = NUM_TOKENS) -> list[dict[str, Any]]:
    """Measure all ways of getting log-probabilities, sides in turn."""
    found = []
    with tempfile.TemporaryDirectory(prefix="relax-head-") as folder:
        environment.run("trl", "-m", "benchmarks.head_memory", folder)
        for _ in range(num_rounds):
            for number in num_tokens:
                for side in SIDES:
                    passes = json.loads(
                        environment.run(
                            "trl", "-m", "benchmarks.head_memory", folder, side, str(number)
                        )
                    )
                    found += [
                        {"side": side, "num_tokens": number, "pass": name, **metrics}
                        for name, metrics in passes.items()
                    ]
                    print(f"{number} tokens, {side}: {passes}", file=sys.stderr, flush=True)
    return found


def head_rows(heads: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Lay out time and memory: a row for each way, number of tokens and pass."""
    rows = []
    for name in dict.fromkeys(one["pass"] for one in heads):
        for number in dict.fromkeys(one["num_tokens"] for one in heads):
            medians = {side: medians_of(heads, side, number, name) for side in SIDES}
            for side, (seconds, num_bytes) in medians.items():
                rows.append(
                    {
                        "pass": name,
                        "tokens": f"{number:,}",
                        "side": side,
                        "seconds": f"{seconds:.2f}",
                        "peak MiB": f"{num_bytes / 2**20:,.0f}",
                        "full logits, MiB": f"{number * VOCAB_SIZE * 4 / 2**20:,.0f}",
                    }
                )
    return rows


def medians_of(
    heads: Sequence[Mapping[str, Any]], side: str, num_tokens: int, name: str
) -> tuple[float, float]:
    """Return the median seconds and bytes of a side."""
    own = [
        one
        for one in heads
        if (one["side"], one["num_tokens"], one["pass"]) == (side, num_tokens, name)
    ]
    return statistics.median(one["seconds"] for one in own), statistics.median(
        one["bytes"] for one in own
    )


def milliseconds(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds."""
    return 1000 * statistics.median(seconds)


def loss_rows(losses: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Lay out the losses."""
    return [
        {
            "loss": one["kernel"],
            "lengths": one["lengths"],
            "tokens": f"{one['num_items']:,}",
            "padded": f"{one['num_padded']:,}",
            "ours, ms": f"{milliseconds(one['seconds']['ours']):.2f}",
            "TRL, ms": f"{milliseconds(one['seconds']['TRL']):.2f}",
            "TRL / ours": f"{ratio_of(one, 'TRL'):.2f}x",
            "loss apart": f"{one['loss_apart']:.0e}",
            "gradient apart": f"{one['gradient_apart']:.0e}",
        }
        for one in losses
    ]


def advantage_rows(advantages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Lay out the advantages."""
    return [
        {
            "advantages": one["kernel"],
            "side": side,
            "prompt groups": f"{one['num_items']:,}",
            "ms": f"{milliseconds(seconds):.1f}",
            "prompt groups/s": f"{one['num_items'] / statistics.median(seconds):,.0f}",
        }
        for one in advantages
        for side, seconds in one["seconds"].items()
    ]


def ratio_of(one: Mapping[str, Any], other: str) -> float:
    """Return how many times longer than ours another side took: the median over turns."""
    return statistics.median(
        theirs / ours
        for ours, theirs in zip(one["seconds"]["ours"], one["seconds"][other], strict=True)
    )


def conclusion_of(losses: Sequence[Mapping[str, Any]], heads: Sequence[Mapping[str, Any]]) -> str:
    """Summarize the results."""
    by_lengths = {
        name: [ratio_of(one, "TRL") for one in losses if one["lengths"] == name]
        for name in dict.fromkeys(one["lengths"] for one in losses)
    }
    ranges = " and ".join(
        f"{min(ratios):.2f} to {max(ratios):.2f} times (lengths {name})"
        for name, ratios in by_lengths.items()
    )
    apart = max(max(one["loss_apart"], one["gradient_apart"]) for one in losses)
    name = [one["pass"] for one in heads][-1]
    few, many = min(one["num_tokens"] for one in heads), max(one["num_tokens"] for one in heads)
    growth = {
        side: medians_of(heads, side, many, name)[1] / medians_of(heads, side, few, name)[1]
        for side in SIDES
    }
    peaks = {side: medians_of(heads, side, many, name)[1] / 2**20 for side in SIDES}
    return (
        f"TRL's losses take {ranges} as long as ours; losses and gradients agree to "
        f"{apart:.0e} of their size. "
        f"From {few:,} to {many:,} tokens the peak of {name} grows {growth['ours']:.2f} "
        f"times in ours, {growth['TRL']:.2f} times in TRL and "
        f"{growth[FULL]:.2f} times with all logits; at {many:,} it is {peaks['ours']:,.0f}, "
        f"{peaks['TRL']:,.0f} and {peaks[FULL]:,.0f} MiB."
    )


def publish(
    kernels: Mapping[str, Any], heads: Sequence[Mapping[str, Any]], folder: Path = report.FOLDER
) -> None:
    """Write the page."""
    losses = kernels["losses"]
    report.write(
        "kernels",
        title="The trainer's kernels compared with TRL's",
        question=QUESTION.format(version=environment.pinned("trl", "trl")),
        command="python -m benchmarks.kernels",
        tables={
            "Losses": loss_rows(losses),
            "Advantages": advantage_rows(kernels["advantages"]),
            "Log-probabilities over a large vocabulary": head_rows(heads),
        },
        conclusion=conclusion_of(losses, heads),
        data={"kernels": kernels, "heads": list(heads)},
        folder=folder,
    )


def main() -> None:
    """Measure everything and write the page."""
    parser = argparse.ArgumentParser(
        description="Losses, advantages and log-probabilities compared with TRL's, on the same numbers."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of few tokens; prints the metrics, writes no page",
    )
    arguments = parser.parse_args()
    kernels = json.loads(environment.run("trl", "-m", "benchmarks.loss_kernels"))
    if not arguments.quick:
        publish(kernels, measure_heads(NUM_ROUNDS))
        return
    heads = measure_heads(1, (512, 1024))
    for rows in (
        loss_rows(kernels["losses"]),
        advantage_rows(kernels["advantages"]),
        head_rows(heads),
    ):
        print(report.table_of(rows))
    print(conclusion_of(kernels["losses"], heads))


if __name__ == "__main__":
    main()
