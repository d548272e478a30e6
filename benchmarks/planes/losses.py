"""What is lost of acknowledged samples when a consumer, or what holds the samples, is killed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planes.protocol import Cell
from benchmarks.planes.side import Process, Side

NUM_SAMPLES = 40
NUM_TAKEN = 10
QUIET_SECONDS = (
    9.0  # a killed member's partitions come back when its session lapses, 6 s by default
)
PUT = Cell("put one by one", 512)


@dataclass(frozen=True)
class Losses:
    """How many of the acknowledged samples never came."""

    num_samples: int
    num_taken: int
    consumer_killed: int
    storage_killed: int
    failure: str


def measure(side: Side) -> Losses:
    """Kill a consumer, then the storage; the side is of no more use afterwards."""
    consumer_killed = kill_consumer(side)
    storage_killed, failure = kill_storage(side)
    return Losses(NUM_SAMPLES, NUM_TAKEN, consumer_killed, storage_killed, failure)


def kill_consumer(side: Side) -> int:
    """Kill a consumer that has fetched samples and not acknowledged them; return how many its
    successor never gets."""
    channel = side.open_channel(PUT.num_tokens)
    side.fill(PUT, NUM_SAMPLES)
    dying = side.process()
    side.notify_reader(dying, "take", channel=channel, consumer="reader", num_samples=NUM_TAKEN)
    dying.receive()
    dying.kill()
    num_lost, _ = read_rest(side, channel)
    side.drop_channel()
    return num_lost


def kill_storage(side: Side) -> tuple[int, str]:
    """Kill what holds the samples right after the last was acknowledged; return how many can't be
    got from what comes back."""
    channel = side.open_channel(PUT.num_tokens)
    side.fill(PUT, NUM_SAMPLES)
    side.server.kill_storage()
    side.server.start()
    return read_rest(side, channel)


def read_rest(side: Side, channel: str) -> tuple[int, str]:
    """Read as the same consumer until nothing more comes; return how many samples did not, and the
    first error."""
    successor: Process = side.process()
    side.notify_reader(
        successor,
        "rest",
        channel=channel,
        consumer="reader",
        num_samples=NUM_SAMPLES,
        quiet_seconds=QUIET_SECONDS,
    )
    answer = successor.receive()
    successor.kill()
    return NUM_SAMPLES - int(answer["num_distinct"]), str(answer["failure"])
