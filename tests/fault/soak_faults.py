"""The faults that a soak chooses from: how each is injected into a run, and the deadline for the
run's recovery."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from harness import FaultRun, command, environment
from link import Link
from poison import OVERSIZE_BYTES, poison_prompts, poison_samples
from run_setup import PROMPTS
from soak_plugins import ALWAYS, ERROR, SLOW_STEP, deaths_of

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused
from relax_events.events.types import RunCommanded
from relax_events.kafka.admin import Admin
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.runtime.failpoints import POINTS

MAX_RESTARTS = 6
"""`workers.max_restarts` of runs that must continue."""
SLOW_FACTOR = 3
"""How many times `workers.heartbeat_timeout_seconds` a slow step takes."""
CALLS = {
    "accumulate": "train a micro-batch",
    "step": "step the optimizer",
    "weights": "write weights",
}
"""Calls of the trainer that may be slow, with the name that its heartbeats give to them."""
OBJECT_NAME = "[0-9a-f]{64}"
NUM_HUNG = 3
HANGING = "hanging_prompts"
NEIGHBOUR_SECONDS = 180.0
PAUSE_SECONDS = 7.5  # sessions of the run's consumer groups last 3 s, those of its share group 6 s
DELETE_SECONDS = 60.0
LOOK_SECONDS = 3.0  # after which a worker has met what was altered
Inject = Callable[[FaultRun, Random], str]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `inject` does it and names its target; it returns once nothing more is
    done to the run."""

    inject: Inject
    bound_seconds: float
    """By when the run must have gone on, on a machine that is busy with other things."""
    needs_link: bool = False
    """Whether only a run can have it that reaches its broker over a link."""
    ends_run: bool = False
    """Whether it ends its run, as it must: then it has a run of its own, and the bound is that of
    the end."""


def kill_workers(run: FaultRun, random: Random) -> str:
    """Kill one to three workers at once, as a crash would."""
    running_workers = run.running_workers()
    chosen = random.sample(sorted(running_workers), min(random.randint(1, 3), len(running_workers)))
    for worker_id in chosen:
        with suppress(psutil.NoSuchProcess):
            running_workers[worker_id].kill()
    return ", ".join(chosen)


def pause_worker(run: FaultRun, random: Random) -> str:
    """Suspend a worker past its session timeout, and resume it."""
    running_workers = run.running_workers()
    worker_id = random.choice(sorted(running_workers))
    with paused(running_workers[worker_id].pid):
        run.follow_for(PAUSE_SECONDS)
    return worker_id


def kill_broker(run: FaultRun, random: Random) -> str:
    """Kill the broker; `relax run` restarts its embedded one, any other is restarted here."""
    run.broker.kill()
    if run.link is not None:
        run.follow_for(random.uniform(0.0, PAUSE_SECONDS))
        run.broker.start()
    return "broker"


def pause_broker(run: FaultRun, random: Random) -> str:
    """Suspend the broker for a session timeout, and resume it."""
    pid = run.broker.pid
    if pid is None:
        return "broker, which was down"
    with paused(pid):
        run.follow_for(PAUSE_SECONDS)
    return "broker"


def second_trainer(run: FaultRun, random: Random) -> str:
    """Suspend the trainer, start another one, resume the first until it is fenced, then end the
    other."""
    run.wait_until(
        lambda: "trainer-0" in run.running_workers(), "there is a trainer to be replaced"
    )
    zombie = run.running_workers()["trainer-0"].pid
    num_fenced = len(run.logged("run", "worker.fenced"))
    with paused(zombie):
        second = run.start_worker("trainer", index=0)
        run.wait_until_ready_again("trainer-0", killed={"trainer-0": zombie})
    run.wait_until(
        lambda: len(run.logged("run", "worker.fenced")) > num_fenced, "the first trainer is fenced"
    )
    second.send_signal(signal.SIGTERM)
    run.wait_until_ended(second)
    return f"trainer-0, process {zombie}"


def poison(run: FaultRun, random: Random) -> str:
    """Write garbage into the topics that workers read."""
    with foreign_producer(run) as producer:
        version = max(run.state.policy_version, 0)
        num_records = poison_samples(producer, run.plan, version=version) + poison_prompts(
            producer, run.plan, version=version
        )
    return f"{num_records} records"


def oversize(run: FaultRun, random: Random) -> str:
    """Write a record that is larger than its topic allows; the broker must refuse it."""
    entity = random.choice(["prompt.groups", "rollout.samples", "advantage.samples"])
    with foreign_producer(run) as producer:
        try:
            producer.write([ProducerRecord(run.plan.topic(entity), bytes(OVERSIZE_BYTES))])
        except BrokerRefused:
            return entity
    raise AssertionError(f"{entity} took a record of {OVERSIZE_BYTES} bytes")


def damage_objects(run: FaultRun, random: Random) -> str:
    """Alter or delete stored arrays that workers are about to read, for a while."""
    objects = newest(
        run.objects / "samples", "*/sha256/*/" + 64 * "[0-9a-f]", 12
    )  # none that is still being written
    assert objects, "no sample travels by reference"
    is_deleted = random.random() < 0.5
    originals = {path: path.read_bytes() for path in objects}
    for path, data in originals.items():
        path.unlink(missing_ok=True) if is_deleted else path.write_bytes(
            bytes([data[0] ^ 1]) + data[1:]
        )
    run.follow_for(LOOK_SECONDS)
    for path, data in originals.items():
        path.write_bytes(data)  # a trainer that replays needs what it trained
    return f"{len(objects)} objects {'deleted' if is_deleted else 'altered'}"


def damage_weights(run: FaultRun, random: Random) -> str:
    """Alter the newest artifact before the engines have read it, for a while."""
    rollouts = [
        process.pid
        for worker_id, process in run.running_workers().items()
        if worker_id.startswith("rollout")
    ]
    with paused(*rollouts):
        run.follow_for(LOOK_SECONDS / 2)
        (file,) = newest(run.objects / "weights", "*/*.safetensors", 1)
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    run.follow_for(LOOK_SECONDS)
    if file.exists():
        file.write_bytes(data)
    return f"version {int(file.parent.name)}"


def kill_run(run: FaultRun, random: Random) -> str:
    """Kill `relax run` itself, and run the same command again."""
    return restart(run, signal.SIGKILL)


def drain_run(run: FaultRun, random: Random) -> str:
    """Drain `relax run`, and run the same command again."""
    return restart(run, signal.SIGTERM)


def crash_points(run: FaultRun, random: Random) -> str:
    """Start everything again with three armed crash points; those that are not passed soon stay
    armed."""
    points = [f"{name}:{random.randint(1, 4)}=kill" for name in random.sample(sorted(POINTS), 3)]
    run.arm(*points)
    restart(run, signal.SIGTERM)
    run.follow_for(PAUSE_SECONDS)
    return ", ".join(point.removesuffix("=kill") for point in points)


def join_and_leave(run: FaultRun, random: Random) -> str:
    """Let one more rollout worker join, and leave in peace or by a crash."""
    worker_id = f"rollout-{run.config.workers.rollout}"
    extra = run.start_worker("rollout", index=run.config.workers.rollout)
    run.wait_until(
        lambda: run.is_ready(worker_id) and run.pid(worker_id) == extra.pid,
        "the extra rollout worker is ready",
    )
    run.follow_for(LOOK_SECONDS)
    number = random.choice([signal.SIGTERM, signal.SIGKILL])
    extra.send_signal(number)
    run.wait_until_ended(extra)
    return f"{worker_id}, {number.name}"


def slow_step(run: FaultRun, random: Random) -> str:
    """Let one call of the trainer take longer than the heartbeat timeout; no worker may count as
    hung, or be restarted."""
    call, activity = random.choice(sorted(CALLS.items()))
    seconds = SLOW_FACTOR * run.config.workers.heartbeat_timeout_seconds
    run.wait_until(
        lambda: "trainer-0" in run.running_workers() and run.is_ready("trainer-0"),
        "there is a trainer",
    )
    restarts = commanded_restarts(run), len(run.logged("run", "worker.died"))
    pid, order = run.pid("trainer-0"), run.folder / SLOW_STEP
    write_whole(order, f"{call} {seconds}")
    run.wait_until(lambda: not order.exists(), "the trainer is in the slow call")
    ends_at, seen = time.monotonic() + seconds, set[str]()
    while time.monotonic() < ends_at:
        run.follow_for(0.2)
        seen.add(run.state.workers["trainer-0"].activity)
    run.wait_until_steps(run.state.num_steps + 1)
    assert activity in seen, (
        f"the trainer's heartbeats named {sorted(seen)} while it was in {call!r} for "
        f"{seconds:g} s, not {activity!r}"
    )
    assert run.pid("trainer-0") == pid, f"the trainer was started again for a slow {call!r}"
    assert (commanded_restarts(run), len(run.logged("run", "worker.died"))) == restarts, (
        f"workers were started again during a slow {call!r}"
    )
    return f"{activity}, {seconds:g} s of {run.config.workers.heartbeat_timeout_seconds:g}"


def hanging_verifier(run: FaultRun, random: Random) -> str:
    """Let the reward hang on all samples of two prompts; their prompt groups fail with the reason,
    a few times over."""
    prompts, order, known = random.sample(PROMPTS, 2), run.folder / HANGING, set(run.failures)
    reason = f"took longer than {run.config.reward.timeout_seconds:g} s (reward.timeout_seconds)"

    def failed() -> list[str]:
        return [
            prompt_group_id
            for prompt_group_id, why in run.failures.items()
            if prompt_group_id not in known and reason in why
        ]

    deaths = len(run.logged("run", "worker.died"))
    write_whole(order, "\n".join(prompts))
    run.wait_until(
        lambda: len(failed()) >= NUM_HUNG, f"{NUM_HUNG} prompt groups fail since the verifier hangs"
    )
    order.unlink()
    assert len(run.logged("run", "worker.died")) == deaths, "a worker died of a verifier that hangs"
    return f"{len(failed())} prompt groups"


def crash_loop(run: FaultRun, random: Random) -> str:
    """Let a worker die at every try, but fewer times than end the run."""
    worker_id, num_deaths = (
        random.choice(["rollout-0", "trainer-0"]),
        random.randint(2, MAX_RESTARTS // 2),
    )
    order, known = run.folder / deaths_of(worker_id), num_commanded_deaths(run)
    write_whole(order, "x" * num_deaths)
    run.wait_until(lambda: not order.exists(), f"{worker_id} died {num_deaths} times")
    run.wait_until(
        lambda: num_commanded_deaths(run) == known + num_deaths,
        f"relax run has seen {worker_id} die {num_deaths} times",
    )
    return f"{worker_id}, {num_deaths} times"


def endless_crash_loop(run: FaultRun, random: Random) -> str:
    """Let a worker die at every try: the run must end with the worker's error, and without a
    process left."""
    alone = (
        run.config.workers.rollout == 1
    )  # while another one generates, steps are committed, and the run continues
    worker_id = random.choice(["rollout-0", "trainer-0"]) if alone else "trainer-0"
    write_whole(run.folder / deaths_of(worker_id), ALWAYS)
    code = run.wait_until_ended(run.process)
    assert code == 1, f"the run was to end with exit code 1, got {code}"
    run.follow_for(1.0)
    max_restarts = run.config.workers.max_restarts
    reason = (
        f"{worker_id} died {max_restarts + 1} times in a row without a committed step: "
        f"RuntimeError: {ERROR}; log: "
    )
    assert f"error: {reason}" in run.output.read_text(errors="replace"), (
        f"the output does not say why the run ended: {reason}"
    )
    assert run.state.ended is not None, "the log does not say that the run ended"
    assert run.state.ended.reason.startswith(reason), f"the log says {run.state.ended.reason!r}"
    left = [process.cmdline() for process in run.worker_processes()]
    assert left == [], f"processes of the run are left: {left}"
    run.ledger()
    return worker_id


def shared_bucket(run: FaultRun, random: Random) -> str:
    """Let a neighbour with the same `objects.uri` train, purge, prune and be deleted; neither may
    lose an object to the other."""
    # This run purges nothing; names of another form are of objects that are still being written.
    retained = {
        path: path.stat().st_size
        for path in files_below(run.objects / "samples")
        if re.fullmatch(OBJECT_NAME, path.name)
    }
    with FaultRun(neighbour_of(run.config), run.broker, run.link) as neighbour:
        neighbour.patience = run.patience
        process, samples = neighbour.start(), neighbour.objects / "samples"

        def has_purged() -> bool:
            assert process.poll() is None, (
                f"the neighbour ended with exit code {process.returncode}: "
                f"{neighbour.output.read_text()[-2000:]}"
            )
            return bool(files_below(samples)) and not files_below(samples / "00000000")

        run.wait_until(
            has_purged,
            "the neighbour purges objects of its first version",
            timeout_seconds=NEIGHBOUR_SECONDS * run.patience,
        )
        process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: process.poll() is not None, "the neighbour drains")
        assert process.returncode == 128 + signal.SIGTERM, (
            f"the neighbour ended with exit code {process.returncode}"
        )
        lost = [
            path
            for path, size in retained.items()
            if not path.exists() or path.stat().st_size != size
        ]
        assert lost == [], (
            f"{len(lost)} objects of {run.config.run.id} went with a purge of "
            f"{neighbour.config.run.id}: {lost[:3]}"
        )
        finished = stamps(neighbour.objects)
        run.wait_until_steps(
            run.state.num_steps + 2 * run.config.trainer.checkpoint_every
        )  # it prunes weights and checkpoints meanwhile
        assert stamps(neighbour.objects) == finished, (
            f"{run.config.run.id} altered objects of {neighbour.config.run.id}, which had ended"
        )
    processes = [run.process.pid, *(worker.pid for worker in run.worker_processes())]
    with paused(*processes):
        own = stamps(run.objects)
        delete(neighbour)
        assert stamps(run.objects) == own, (
            f"deleting {neighbour.config.run.id} altered objects of {run.config.run.id}"
        )
    shutil.rmtree(neighbour.folder)
    return f"{len(retained)} and {len(finished)} objects"


def slow_link(run: FaultRun, random: Random) -> str:
    """Let the link be slow for a while, with little room."""
    link = linked(run)
    link.latency_seconds, link.bytes_per_second = (
        random.uniform(0.02, 0.2),
        random.uniform(0.2e6, 2e6),
    )
    slowness = (
        f"{1000 * link.latency_seconds:.0f} ms each way, {link.bytes_per_second / 1e6:.1f} MB/s"
    )
    run.follow_for(PAUSE_SECONDS)
    link.heal()
    return slowness


def silent_link(run: FaultRun, random: Random) -> str:
    """Let the link drop all traffic for a while, without closing connections."""
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
    "slow-step": Fault(slow_step, 45.0),
    "hanging-verifier": Fault(hanging_verifier, 45.0),
    "crash-loop": Fault(crash_loop, 75.0),
    "endless-crash-loop": Fault(endless_crash_loop, 120.0, ends_run=True),
    "shared-bucket": Fault(shared_bucket, 45.0),
    "slow-link": Fault(slow_link, 30.0, needs_link=True),
    "silent-link": Fault(silent_link, 45.0, needs_link=True),
    "cut-link": Fault(cut_link, 30.0, needs_link=True),
    "link-down": Fault(link_down, 45.0, needs_link=True),
}


def commanded_restarts(run: FaultRun) -> int:
    """Return how often the health manager restarted a worker of `relax run`; an extra worker that
    was killed is missed for as long as the heartbeat timeout, and not started again."""
    events = [run.decode(record) for record in run.records("control.commands")]
    return sum(
        bool(event.arguments.get("tier"))
        for event in events
        if isinstance(event, RunCommanded) and event.worker_id in (None, *run.worker_ids)
    )


def num_commanded_deaths(run: FaultRun) -> int:
    """Return how many workers died at the command of the soak."""
    return sum(ERROR in line["error"] for line in run.logged("run", "worker.died"))


def neighbour_of(config: RunConfig) -> RunConfig:
    """Return a run with the same store, which keeps little."""
    run = config.run.model_copy(
        update={"id": f"{config.run.id}-neighbour", "retain_versions": config.run.max_staleness + 1}
    )
    trainer = config.trainer.model_copy(update={"checkpoint_every": 2})
    return RunConfig.model_validate(
        config.model_dump(mode="json")
        | {"run": run.model_dump(mode="json"), "trainer": trainer.model_dump(mode="json")}
    )


def delete(run: FaultRun) -> None:
    """Delete a run that has ended by `relax runs delete`, and check that its topics and objects
    are deleted."""
    words = command("runs", "delete", run.config.run.id, "--config", run.run_file, "--yes")
    seconds = DELETE_SECONDS * run.patience
    try:
        ended = subprocess.run(
            words,
            cwd=run.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"relax runs delete did not end within {seconds:g} s") from None
    assert ended.returncode == 0, (
        f"relax runs delete ended with exit code {ended.returncode}: {ended.stdout}\n{ended.stderr}"
    )
    admin = Admin(run.connection)
    try:
        topics = sorted(admin.topics(run.plan.topic("")))
    finally:
        admin.close()
    assert topics == [], f"topics of {run.config.run.id} are left: {topics}"
    left = files_below(run.objects)
    assert left == [], f"{len(left)} objects of {run.config.run.id} are left: {left[:3]}"


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its folders."""
    return [
        Path(parent, name) for parent, _, names in os.walk(folder) for name in names
    ]  # it passes over what is deleted meanwhile


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of writing of all files in a folder."""
    found = {}
    for path in files_below(folder):
        with suppress(FileNotFoundError):  # deleted meanwhile
            found[path] = path.stat().st_size, path.stat().st_mtime_ns
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    unseen = path.with_name(f"{path.name}.new")
    unseen.write_text(text)
    unseen.replace(path)


def linked(run: FaultRun) -> Link:
    """Return the link between a run and its broker."""
    assert run.link is not None, "a run without a link has no faults of one"
    return run.link


def restart(run: FaultRun, number: int) -> str:
    """End `relax run` by a signal, check that its workers exit, and start it again."""
    workers = run.worker_processes()
    run.process.send_signal(number)
    run.wait_until_ended(run.process, timeout_seconds=60 * run.patience)
    run.wait_until_gone(workers, timeout_seconds=60 * run.patience)
    run.start()
    return "relax run"


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Suspend processes for the length of the block; an exited one is skipped."""
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
def foreign_producer(run: FaultRun) -> Iterator[RecordProducer]:
    """Yield a producer that does not belong to the run."""
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
