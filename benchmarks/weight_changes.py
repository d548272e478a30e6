"""What it saves to write only the values that a train step has changed: `python -m
benchmarks.weight_changes`."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.clock import timed
from benchmarks.timed_run import show
from benchmarks.weights import tensors_of
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.weights.file_content import lay_out
from relax_events.weights.manifest import WeightManifest
from relax_events.weights.transport import StorePublisher, StoreReader

NUM_ROUNDS = 7
WEIGHT_STD = 0.02
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
SIDES = {"whole": 1, "changes": 1000}
"""By way: `weights.full_snapshot_interval`."""
QUESTION = """\
{mebibytes} MiB of bfloat16 weights of a transformer's shapes, normal with a standard deviation of {std:g}, rounded from float32 ones that
AdamW moves: each value by the learning rate times a normal number a step. {rounds} versions after the first, each written to the object
store and read by who has the one before, both ways in turn, with all digests. The machine's load average before the first round was
{load:.1f}."""


def versions(learning_rate: float) -> Iterator[dict[str, Tensor]]:
    """Give the weights after each step, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    masters = {name: tensor.mul_(WEIGHT_STD) for name, tensor in tensors_of(0).items()}
    while True:
        yield {name: master.to(torch.bfloat16) for name, master in masters.items()}
        for master in masters.values():
            master += learning_rate * torch.randn(master.shape, generator=generator)


class Way:
    """A store of its own, with a writer and a reader."""

    def __init__(self, folder: Path, full_snapshot_interval: int) -> None:
        self._store = ObjectStore.open(folder.as_uri())
        self._writer = StorePublisher(self._store, full_snapshot_interval=full_snapshot_interval)
        self._reader = StoreReader(self._store, full_snapshot_interval=full_snapshot_interval)

    def send(self, tensors: Mapping[str, Tensor], version: int) -> tuple[float, int]:
        """Write a version and read it; return the seconds and the bytes of its files."""
        artifact: list[ObjectRef] = []

        def both() -> None:
            artifact.append(self._writer.publish(lay_out([tensors]), policy_version=version)[0])
            self._reader.fetch(
                PolicyVersionPublished(
                    policy_version=version,
                    artifact=artifact[0],
                    transports=["store"],
                    start_offsets=[],
                )
            )

        seconds = timed(both)
        return seconds, sum(
            file.num_bytes for file in WeightManifest.from_json(self._store.get(artifact[0])).files
        )


def measure(learning_rate: float, num_rounds: int) -> dict[str, Any]:
    """Send versions by both ways in turn; the first one, which is whole either way, is not
    counted."""
    changed, rounds, former = [], [], None
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            name: Way(Path(folder) / name, full_snapshot_interval)
            for name, full_snapshot_interval in SIDES.items()
        }
        for version, tensors in zip(range(num_rounds + 1), versions(learning_rate), strict=False):
            rounds.append({name: way.send(tensors, version) for name, way in ways.items()})
            if former is not None:
                changed.append(_share(former, tensors))
            former = tensors
    seconds = {name: [one[name][0] for one in rounds[1:]] for name in SIDES}
    num_bytes = {name: statistics.median(one[name][1] for one in rounds[1:]) for name in SIDES}
    return {
        "learning_rate": learning_rate,
        "changed": statistics.median(changed),
        "seconds": seconds,
        "bytes": num_bytes,
    }


def _share(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    different = sum(int((old[name] != tensor).sum()) for name, tensor in new.items())
    return different / sum(tensor.numel() for tensor in new.values())


def row(measured: Mapping[str, Any]) -> dict[str, str]:
    """Write a learning rate's metrics for people."""
    whole, changes = (measured["seconds"][name] for name in SIDES)
    ratio = statistics.median(a / b for a, b in zip(whole, changes, strict=True))
    return {
        "learning rate": f"{measured['learning_rate']:g}",
        "values that change": f"{measured['changed']:.1%}",
        "MB whole": f"{measured['bytes']['whole'] / 1e6:.1f}",
        "MB of changes": f"{measured['bytes']['changes'] / 1e6:.1f}",
        "smaller by": f"{measured['bytes']['whole'] / measured['bytes']['changes']:.1f}",
        "s whole": f"{statistics.median(whole):.2f}",
        "s of changes": f"{statistics.median(changes):.2f}",
        "faster by, median of the paired ratios": f"{ratio:.2f}",
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    measured = [measure(rate, options.rounds) for rate in LEARNING_RATES]
    rows = [row(one) for one in measured]
    for one in rows:
        show(one)
    mebibytes = sum(2 * tensor.numel() for tensor in tensors_of(0).values()) >> 20
    report.write(
        "weight-changes",
        title="Only what a step has changed",
        question=QUESTION.format(
            mebibytes=mebibytes, std=WEIGHT_STD, rounds=options.rounds, load=load
        ),
        command="python -m benchmarks.weight_changes",
        conclusion=f"At a learning rate of {rows[0]['learning rate']} a version is "
        f"{rows[0]['smaller by']} times smaller on its way and "
        f"{rows[0]['faster by, median of the paired ratios']} times faster from disk to disk "
        "on one machine, where the digests over all weights "
        "take most of the time; what a slower way between clusters gains is the bytes.",
        rows=rows,
        data={"measured": measured, "load": load},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
