"""The faults that a soak draws from: how each is done to a run, and how soon the run must be over it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from harness import FaultRun
from link import Link
from poison import OVERSIZE_BYTES, poison_prompts, poison_samples

from relax_events.broker.producer import RecordProducer
from relax_events.broker.records import OutRecord
from relax_events.errors import BrokerRefused
from relax_events.pipeline.failpoints import POINTS

PAUSE_SECONDS = 7.5  # sessions of the run's consumer groups last 3 s, those of its share group 6 s
LOOK_SECONDS = 3.0  # after which a worker has met what was altered
Inject = Callable[[FaultRun, Random], str]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `inject` does it and names its target; it returns once nothing more is done to the run."""

    inject: Inject
    bound_seconds: float
    """By when the run must have gone on, on a machine that is busy with other things."""
    needs_link: bool = False
    """Whether only a run can have it that reaches its broker over a link."""


def kill_workers(run: FaultRun, random: Random) -> str:
    """Kill one to three workers at once, as a crash would."""
    living = run.living()
    chosen = random.sample(sorted(living), min(random.randint(1, 3), len(living)))
    for worker_id in chosen:
        with suppress(psutil.NoSuchProcess):
            living[worker_id].kill()
    return ", ".join(chosen)


def pause_worker(run: FaultRun, random: Random) -> str:
    """Stop a worker past its session, and let it come back."""
    living = run.living()
    worker_id = random.choice(sorted(living))
    with paused(living[worker_id].pid):
        run.follow_for(PAUSE_SECONDS)
    return worker_id


def kill_broker(run: FaultRun, random: Random) -> str:
    """Kill the broker; `relax run` starts its own again, one that it was given has to be started for it."""
    run.broker.kill()
    if run.link is not None:
        run.follow_for(random.uniform(0.0, PAUSE_SECONDS))
        run.broker.start()
    return "broker"


def pause_broker(run: FaultRun, random: Random) -> str:
    """Stop the broker for as long as sessions last, and let it come back."""
    pid = run.broker.pid
    if pid is None:
        return "broker, which was down"
    with paused(pid):
        run.follow_for(PAUSE_SECONDS)
    return "broker"


def second_trainer(run: FaultRun, random: Random) -> str:
    """Stop the trainer, have another one take over, let the first come back and be fenced, end the other."""
    run.until(lambda: "trainer-0" in run.living(), "there is a trainer to be replaced")
    zombie = run.living()["trainer-0"].pid
    num_fenced = len(run.logged("run", "worker.fenced"))
    with paused(zombie):
        second = run.start_worker("trainer", index=0)
        run.until_ready_again("trainer-0", killed={"trainer-0": zombie})
    run.until(lambda: len(run.logged("run", "worker.fenced")) > num_fenced, "the first trainer is fenced")
    second.send_signal(signal.SIGTERM)
    run.until_ended(second)
    return f"trainer-0, process {zombie}"


def poison(run: FaultRun, random: Random) -> str:
    """Write garbage into the topics that workers read."""
    with stranger(run) as producer:
        version = max(run.state.policy_version, 0)
        num_records = poison_samples(producer, run.plan, version=version) + poison_prompts(producer, run.plan, version=version)
    return f"{num_records} records"


def oversize(run: FaultRun, random: Random) -> str:
    """Write a record that is larger than its topic allows; the broker must refuse it."""
    entity = random.choice(["prompt.groups", "rollout.samples", "advantage.samples"])
    with stranger(run) as producer:
        try:
            producer.write([OutRecord(run.plan.topic(entity), bytes(OVERSIZE_BYTES))])
        except BrokerRefused:
            return entity
    raise AssertionError(f"{entity} took a record of {OVERSIZE_BYTES} bytes")


def damage_objects(run: FaultRun, random: Random) -> str:
    """Alter or delete stored arrays that workers are about to read, for a while."""
    objects = newest(run.folder / "objects" / "sha256", f"*/{'[0-9a-f]' * 64}", 12)  # none that is still being written
    assert objects, "no sample travels by reference"
    is_deleted = random.random() < 0.5
    originals = {path: path.read_bytes() for path in objects}
    for path, data in originals.items():
        path.unlink(missing_ok=True) if is_deleted else path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    run.follow_for(LOOK_SECONDS)
    for path, data in originals.items():
        path.write_bytes(data)  # a trainer that replays needs what it trained
    return f"{len(objects)} objects {'deleted' if is_deleted else 'altered'}"


def damage_weights(run: FaultRun, random: Random) -> str:
    """Alter the newest artifact before the engines have read it, for a while."""
    rollouts = [process.pid for worker_id, process in run.living().items() if worker_id.startswith("rollout")]
    with paused(*rollouts):
        run.follow_for(LOOK_SECONDS / 2)
        (file,) = newest(run.folder / "objects" / "weights", "*/*.safetensors", 1)
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    run.follow_for(LOOK_SECONDS)
    if file.exists():
        file.write_bytes(data)
    return f"version {int(file.parent.name)}"


def kill_run(run: FaultRun, random: Random) -> str:
    """Kill `relax run` itself, and give the same command again."""
    return restart(run, signal.SIGKILL)


def drain_run(run: FaultRun, random: Random) -> str:
    """Ask `relax run` to end, and give the same command again."""
    return restart(run, signal.SIGTERM)


def crash_points(run: FaultRun, random: Random) -> str:
    """Start everything again with three armed crash points; those that are not passed soon stay armed."""
    points = [f"{name}:{random.randint(1, 4)}=kill" for name in random.sample(sorted(POINTS), 3)]
    run.arm(*points)
    restart(run, signal.SIGTERM)
    run.follow_for(PAUSE_SECONDS)
    return ", ".join(point.removesuffix("=kill") for point in points)


def join_and_leave(run: FaultRun, random: Random) -> str:
    """Let one more rollout worker join, and leave in peace or by a crash."""
    worker_id = f"rollout-{run.config.workers.rollout}"
    extra = run.start_worker("rollout", index=run.config.workers.rollout)
    run.until(lambda: run.is_ready(worker_id) and run.pid(worker_id) == extra.pid, "the extra rollout worker is ready")
    run.follow_for(LOOK_SECONDS)
    number = random.choice([signal.SIGTERM, signal.SIGKILL])
    extra.send_signal(number)
    run.until_ended(extra)
    return f"{worker_id}, {number.name}"


def slow_link(run: FaultRun, random: Random) -> str:
    """Let the link be slow for a while, with little room."""
    link = linked(run)
    link.latency_seconds, link.bytes_per_second = random.uniform(0.02, 0.2), random.uniform(0.2e6, 2e6)
    slowness = f"{1000 * link.latency_seconds:.0f} ms each way, {link.bytes_per_second / 1e6:.1f} MB/s"
    run.follow_for(PAUSE_SECONDS)
    link.heal()
    return slowness


def silent_link(run: FaultRun, random: Random) -> str:
    """Let the link carry nothing for a while, and not say so."""
    link = linked(run)
    link.fall_silent()
    run.follow_for(PAUSE_SECONDS)
    link.heal()
    return "link"


def cut_link(run: FaultRun, random: Random) -> str:
    """Reset all connections, a few times."""
    num_cut = 0
    for _ in range(random.randint(1, 5)):
        num_cut += linked(run).reset()
        run.follow_for(random.uniform(0.1, 1.0))
    return f"{num_cut} connections"


def link_down(run: FaultRun, random: Random) -> str:
    """Let the link refuse everything for a while."""
    link = linked(run)
    link.go_down()
    run.follow_for(random.uniform(0.5, PAUSE_SECONDS))
    link.heal()
    return "link"


FAULTS = {
    "kill-workers": Fault(kill_workers, 45.0),
    "pause-worker": Fault(pause_worker, 30.0),
    "kill-broker": Fault(kill_broker, 60.0),
    "pause-broker": Fault(pause_broker, 45.0),
    "second-trainer": Fault(second_trainer, 60.0),
    "poison": Fault(poison, 30.0),
    "oversize": Fault(oversize, 30.0),
    "damage-objects": Fault(damage_objects, 45.0),
    "damage-weights": Fault(damage_weights, 45.0),
    "kill-run": Fault(kill_run, 60.0),
    "drain-run": Fault(drain_run, 60.0),
    "crash-points": Fault(crash_points, 75.0),
    "join-and-leave": Fault(join_and_leave, 30.0),
    "slow-link": Fault(slow_link, 30.0, needs_link=True),
    "silent-link": Fault(silent_link, 45.0, needs_link=True),
    "cut-link": Fault(cut_link, 30.0, needs_link=True),
    "link-down": Fault(link_down, 45.0, needs_link=True),
}


def linked(run: FaultRun) -> Link:
    """Return the link between a run and its broker."""
    assert run.link is not None, "a run without a link has no faults of one"
    return run.link


def restart(run: FaultRun, number: int) -> str:
    """End `relax run` by a signal, see its workers gone, and start it again."""
    workers = run.worker_processes()
    run.process.send_signal(number)
    run.until_ended(run.process, timeout_seconds=60)
    run.until_gone(workers, timeout_seconds=60)
    run.start()
    return "relax run"


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Stop processes for the length of the block; one that is gone is passed over."""
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).send_signal(number)


@contextmanager
def stranger(run: FaultRun) -> Iterator[RecordProducer]:
    """Give a producer that is none of the run's."""
    producer = RecordProducer(run.connection)
    try:
        yield producer
    finally:
        producer.close()


def newest(folder: Path, pattern: str, count: int) -> list[Path]:
    """Return the files that were written last."""
    times = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # deleted meanwhile
            times.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(times)[-count:]]
