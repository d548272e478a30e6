"""How fast a policy version is sent to an engine: `python -m benchmarks.weights`."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks import report
from relax_events.config import WeightsConfig
from relax_events.events.types import BroadcastMembership
from relax_events.objects import ObjectStore
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.weights.artifact_reader import read_weights
from relax_events.weights.artifact_writer import delete_weights, weights_digest, write_weights
from relax_events.weights.broadcast.receiver import Receiver
from relax_events.weights.broadcast.sender import Broadcaster

NUM_ROUNDS = 9
NUM_LAYERS, HIDDEN = 16, 1024
PATIENCE_SECONDS = 60.0


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def make_tensors(seed: int) -> dict[str, Tensor]:
    """Make the weights of a transformer without its head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj": (HIDDEN, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
        "up_proj": (2 * HIDDEN, HIDDEN),
        "norm": (HIDDEN,),
    }
    names = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(NUM_LAYERS)
        for name, shape in shapes.items()
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def receive(pipe: Connection, first: Mapping[str, Tensor], use_shared_memory: bool) -> None:
    """Be an engine's worker: join the process that the parent names, and say when a version has
    come."""
    receiver = Receiver(
        "rollout-0",
        WeightsConfig(use_shared_memory=use_shared_memory),
        metrics=WorkerMetrics("rollout").weights,
    )
    receiver.loaded_from_store(0, first)
    receiver.apply(pipe.recv())
    receiver.start(lambda: pipe.send("arrived"))
    pipe.recv()
    receiver.close()


def receive_plainly(pipe: Connection, port: int, num_bytes: int) -> None:
    """Be the other rank of a plain group, and say when a tensor has come."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=1,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    while pipe.recv() == "next":
        dist.broadcast(flat, src=0)
        pipe.send("arrived")
    dist.destroy_process_group()


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, and give the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = context.Process(target=target, args=(theirs, *arguments))
    started.start()
    try:
        yield ours
        ours.send("end")
        started.join(PATIENCE_SECONDS)
    finally:
        started.kill()


def broadcasting(
    stack: ExitStack, tensors: Mapping[str, Tensor], *, use_shared_memory: bool
) -> Callable[[int], None]:
    """Open a trainer's side and an engine's, and give a function that broadcasts a version."""
    digest = weights_digest(tensors)
    lists: list[BroadcastMembership] = []
    config = WeightsConfig(transport="gloo", use_shared_memory=use_shared_memory)
    broadcaster = stack.enter_context(
        closing(Broadcaster(config, metrics=WorkerMetrics("t").weights, announce=lists.append))
    )
    engine = stack.enter_context(process(receive, tensors, use_shared_memory))
    engine.send(lists[0])
    while not broadcaster.engines:
        time.sleep(0.01)

    def broadcast(version: int) -> None:
        snapshot = broadcaster.offer(tensors, policy_version=version)
        assert snapshot is not None
        snapshot.digest.set_result(digest)
        assert engine.poll(PATIENCE_SECONDS)
        engine.recv()

    return broadcast


def ways(
    stack: ExitStack, tensors: Mapping[str, Tensor], folder: Path
) -> dict[str, Callable[[int], float]]:
    """Open every way, and give functions that send a version by it and return the seconds."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    broadcast, broadcast_sent = (
        broadcasting(stack, tensors, use_shared_memory=use_shared_memory)
        for use_shared_memory in (True, False)
    )
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    port = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    ).port  # free once it is dropped
    plain = stack.enter_context(process(receive_plainly, port, num_bytes))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    stack.callback(dist.destroy_process_group)
    store = ObjectStore.open((folder / "objects").as_uri())
    source = folder / "source"
    source.write_bytes(flat.numpy().data)

    def broadcast_plainly(_: int) -> None:
        plain.send("next")
        dist.broadcast(flat, src=0)
        assert plain.poll(PATIENCE_SECONDS)
        plain.recv()

    def by_store(version: int) -> None:
        reference, _ = write_weights(store, tensors, policy_version=version)
        read_weights(store, reference)
        delete_weights(store, version)

    return {
        "broadcast": lambda version: timed(lambda: broadcast(version)),
        "broadcast, sent": lambda version: timed(lambda: broadcast_sent(version)),
        "plain gloo": lambda version: timed(lambda: broadcast_plainly(version)),
        "file copy": lambda _: timed(lambda: shutil.copyfile(source, folder / "copy")),
        "store, written and read": lambda version: timed(lambda: by_store(version)),
    }


def measure_ways(num_rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Send versions by every way in turn; return their bytes, and the seconds by way. A first round
    warms up."""
    tensors = make_tensors(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        functions = ways(stack, tensors, Path(folder))
        rounds = [
            {name: function(version) for name, function in functions.items()}
            for version in range(1, num_rounds + 2)
        ]
    return sum(tensor.nbytes for tensor in tensors.values()), {
        name: [one[name] for one in rounds[1:]] for name in rounds[0]
    }


def speed_rows(num_bytes: int, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, str]]:
    """Write the speeds for people."""
    ours = seconds["broadcast"]
    return [
        {
            "way": name,
            "MB/s, median": f"{num_bytes / statistics.median(taken) / 1e6:,.0f}",
            "broadcast compared with it, median of the paired ratios": f"{statistics.median(b / a for a, b in zip(ours, taken, strict=True)):.2f}",
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    """Measure and write the page."""
    load = os.getloadavg()[0]
    num_bytes, seconds = measure_ways(NUM_ROUNDS)
    report.write(
        "weights",
        title="Weights on their way to the engines",
        command="python -m benchmarks.weights",
        rows=speed_rows(num_bytes, seconds),
        data={"seconds": seconds, "load": load},
    )


if __name__ == "__main__":
    main()
