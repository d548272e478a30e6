"""Weight broadcast from a trainer to engines over real gloo or shared memory, with engines killed
in their own processes: no engine waits for a failed one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from relax_events.config import WeightsConfig
from relax_events.deadline import Deadline
from relax_events.errors import EnvironmentProblem, ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import BroadcastMembership, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import VARIABLE
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.weights.artifact_writer import weights_digest
from relax_events.weights.broadcast import receiver
from relax_events.weights.broadcast.buckets import Layout
from relax_events.weights.broadcast.channel import ConnectionLost
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.receiver import Receiver
from relax_events.weights.broadcast.sender import Broadcaster
from relax_events.weights.broadcast.transports import BroadcastPublisher, BroadcastReader
from relax_events.weights.file_content import lay_out

PROGRAM = Path(__file__).parent / "broadcast_program.py"
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
STEP_SECONDS = 8.0
"""What publishing may cost the trainer, whatever the engines do: below what an engine that hangs is
given."""


def tensors_of(version: int, *, num_rows: int = 64) -> dict[str, Tensor]:
    """Make the weights of a version: several buckets, tensors across their bounds."""
    generator = torch.Generator().manual_seed(version)
    return {
        "model.embed_tokens.weight": torch.randn(num_rows, 33, generator=generator),
        "model.norm.weight": torch.randn(33, generator=generator).to(torch.bfloat16),
        "model.scale": torch.tensor(float(version)),
    }


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail at the timeout."""
    deadline = Deadline(PATIENCE_SECONDS)
    while not condition():
        assert not deadline.passed, f"not within {PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.005)


class Trainer:
    """A trainer's side, and the lists that it wrote."""

    def __init__(
        self, store: ObjectStore, transport: str, *, bucket_bytes: int = 1024, last_list: int = 0
    ) -> None:
        self.lists: list[BroadcastMembership] = []
        self.listeners: list[Callable[[BroadcastMembership], object]] = []
        self.metrics = WorkerMetrics("trainer")
        config = WeightsConfig(
            transport="gloo",
            use_shared_memory=transport == "memory",
            bucket_bytes=bucket_bytes,
        )
        self.broadcaster = Broadcaster(
            config, metrics=self.metrics.weights, announce=self._announce, last_list=last_list
        )
        self._transport = BroadcastPublisher(store, self.broadcaster)

    def _announce(self, enlisted: BroadcastMembership) -> None:
        self.lists.append(enlisted)
        for listener in self.listeners:
            listener(enlisted)

    def notify(self, listener: Callable[[BroadcastMembership], object]) -> None:
        """Send a listener the newest membership and later ones."""
        self.listeners.append(listener)
        listener(self.lists[-1])

    def publish(
        self, version: int, tensors: Mapping[str, Tensor] | None = None
    ) -> PolicyVersionPublished:
        """Publish a version, and check that no engine held this up."""
        started = time.monotonic()
        artifact, _ = self._transport.publish(
            lay_out([tensors_of(version) if tensors is None else tensors]),
            policy_version=version,
        )
        assert time.monotonic() - started < STEP_SECONDS
        return PolicyVersionPublished(
            policy_version=version,
            artifact=artifact,
            transports=["store", "gloo"],
            start_offsets=[],
        )

    def until_joined(self, *worker_ids: str) -> None:
        """Wait until just these engines are sent new versions."""
        until(lambda: self.broadcaster.engines == sorted(worker_ids), f"{worker_ids} have joined")

    def close(self) -> None:
        self._transport.close()


class Engine:
    """A rollout worker's side in this process."""

    def __init__(self, store: ObjectStore, worker_id: str) -> None:
        self.metrics = WorkerMetrics("rollout")
        self.receiver = Receiver(worker_id, WeightsConfig(), metrics=self.metrics.weights)
        self.transport = BroadcastReader(store, self.receiver)
        self.woken = threading.Semaphore(0)
        self.note = self.transport.subscribe(self.woken.release)

    def fetch(self, published: PolicyVersionPublished) -> str:
        """Fetch a version as the worker does, check it, and give the transport that it came."""
        until(lambda: not self.transport.is_in_transit(published), "nothing is under transport")
        weights = self.transport.fetch(published)
        assert weights.policy_version == published.policy_version
        assert (
            weights_digest(weights.tensors)
            == weights.digest
            == weights_digest(tensors_of(weights.policy_version))
        )
        return weights.transport

    def until_arrived(self, version: int) -> None:
        """Wait until a version has arrived by broadcast."""
        until(
            lambda: getattr(self.receiver._received, "policy_version", -1) == version,
            f"version {version} has arrived",
        )

    def close(self) -> None:
        self.transport.close()


class EngineProcess:
    """The rollout worker's side in its own process."""

    def __init__(self, store: ObjectStore, worker_id: str, *, folder: Path, failpoint: str) -> None:
        words = [
            sys.executable,
            str(PROGRAM),
            store.uri("").rstrip("/"),
            worker_id,
            str(folder),
        ]
        variables = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            VARIABLE: failpoint,
        }
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def note(self, enlisted: BroadcastMembership) -> None:
        self._write(asdict(enlisted))

    def fetch(self, published: PolicyVersionPublished) -> str:
        """Fetch a version, check it, and give the transport that it came."""
        artifact = {
            "uri": published.artifact.uri,
            "digest": published.artifact.digest.hex(),
            "num_bytes": published.artifact.num_bytes,
        }
        self._write({"policy_version": published.policy_version, "artifact": artifact})
        reported: dict[str, Any] = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]
        assert reported["digest"] == weights_digest(tensors_of(reported["policy_version"])).hex()
        return str(reported["transport"])

    def _write(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ValueError):  # it may have been killed
            self.process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture(autouse=True)
def retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that lost their trainer join again at once."""
    monkeypatch.setattr(receiver, "RETRY_SECONDS", 0.1)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open((tmp_path / "objects").as_uri())


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["memory", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """Have versions written where the engine reads them, or sent by gloo."""
    return str(request.param)


@pytest.fixture
def trainer(store: ObjectStore, opened: ExitStack, transport: str) -> Trainer:
    return opened.enter_context(closing(Trainer(store, transport)))


@pytest.fixture
def make_engine(store: ObjectStore, trainer: Trainer, opened: ExitStack) -> Callable[[str], Engine]:
    def make(worker_id: str) -> Engine:
        engine = opened.enter_context(closing(Engine(store, worker_id)))
        trainer.notify(engine.note)
        return engine

    return make


def failures(metrics: WorkerMetrics) -> dict[str, float]:
    """Return how many broadcasts failed, by reason."""
    name = "relax_weights_broadcast_failures_total"
    return {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_engine_gets_first_version_from_the_store_and_later_ones_by_broadcast(
    trainer: Trainer, make_engine: Callable[[str], Engine], transport: str
) -> None:
    engine = make_engine("rollout-0")
    assert engine.fetch(trainer.publish(0)) == "store"
    trainer.until_joined("rollout-0")
    for version in (1, 2, 3, 4):  # rows are used again
        published = trainer.publish(version)
        engine.until_arrived(version)
        assert engine.woken.acquire(timeout=PATIENCE_SECONDS)
        assert engine.fetch(published) == transport
    assert [(reported.membership_version, reported.worker_ids) for reported in trainer.lists] == [
        (1, []),
        (2, ["rollout-0"]),
    ]
    assert (failures(trainer.metrics), failures(engine.metrics)) == ({}, {})


def test_membership_is_published_only_when_engines_join_or_leave(
    trainer: Trainer, make_engine: Callable[[str], Engine], transport: str
) -> None:
    first = trainer.publish(0)
    engines = {name: make_engine(name) for name in ("rollout-0", "rollout-1")}
    for name, engine in engines.items():
        assert engine.fetch(first) == "store"
        until(lambda name=name: name in trainer.broadcaster.engines, "it has joined")  # type: ignore[misc]
    second = trainer.publish(1)
    for engine in engines.values():
        engine.until_arrived(1)
        assert engine.fetch(second) == transport
    engines["rollout-0"].close()
    trainer.until_joined("rollout-1")
    assert [(reported.membership_version, reported.worker_ids) for reported in trainer.lists] == [
        (1, []),
        (2, ["rollout-0"]),
        (3, ["rollout-0", "rollout-1"]),
        (4, ["rollout-1"]),
    ]


def test_engine_discards_a_received_version_that_was_not_the_published_one(
    trainer: Trainer, store: ObjectStore, make_engine: Any, transport: str
) -> None:
    engine = make_engine("rollout-0")
    engine.fetch(trainer.publish(0))
    trainer.until_joined("rollout-0")
    trainer.publish(1, tensors_of(99))  # a trainer that died before its commit
    engine.until_arrived(1)
    with closing(Trainer(store, transport)) as successor:
        assert engine.fetch(successor.publish(1)) == "store"
    assert failures(engine.metrics) == {"torn": 1}


def test_altered_bucket_is_noticed_on_both_sides(
    trainer: Trainer, make_engine: Any, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    engine = make_engine("rollout-0")
    engine.fetch(trainer.publish(0))
    trainer.until_joined("rollout-0")
    gather = Layout.gather

    def altered(
        layout: Layout, bucket: range, tensors: Mapping[str, Tensor], *, staging: Tensor
    ) -> Tensor:
        data = gather(layout, bucket, tensors, staging=staging).clone()
        data[5] ^= bucket.start == 2048
        return data

    monkeypatch.setattr(Layout, "gather", altered)
    published = trainer.publish(1)
    engine.until_arrived(1)
    assert engine.fetch(published) == "store"
    monkeypatch.undo()
    until(lambda: failures(trainer.metrics) == {"torn": 1}, "the trainer knows")
    assert failures(engine.metrics) == {"torn": 1}
    until(lambda: len(trainer.lists) >= 4, "the engine has left, and joined again")
    published = trainer.publish(2)
    engine.until_arrived(2)
    assert engine.fetch(published) == transport


def test_version_with_a_new_layout_comes_from_the_store_then_by_broadcast(
    trainer: Trainer, make_engine: Any, transport: str
) -> None:
    engine = make_engine("rollout-0")
    engine.fetch(trainer.publish(0))
    trainer.until_joined("rollout-0")
    strange = tensors_of(1) | {"model.unknown.weight": torch.ones(3)}
    published = trainer.publish(1, strange)
    until(lambda: failures(engine.metrics) == {"refused": 1}, "the engine refuses")
    weights = engine.transport.fetch(published)
    assert (weights.transport, weights_digest(weights.tensors)) == (
        "store",
        weights_digest(strange),
    )
    until(lambda: len(trainer.lists) >= 4, "the engine has left, and joined again")
    published = trainer.publish(2, tensors_of(2) | {"model.unknown.weight": torch.zeros(3)})
    engine.until_arrived(2)
    assert engine.transport.fetch(published).transport == transport


def test_ports_are_free_once_both_sides_are_closed(store: ObjectStore, transport: str) -> None:
    before = listened_at()
    with (
        closing(Trainer(store, transport)) as trainer,
        closing(Engine(store, "rollout-0")) as engine,
    ):
        trainer.notify(engine.note)
        engine.fetch(trainer.publish(0))
        trainer.until_joined("rollout-0")
        port = trainer.broadcaster.rendezvous_port
        assert port in listened_at() - before
    del trainer, engine
    until(lambda: not listened_at() - before, "nothing new listens any more")


def listened_at() -> set[int]:
    """Return the ports that this process listens at."""
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("join_token", ["0" * 32, "\u00fc", None])
def test_engine_is_refused_without_the_join_token(trainer: Trainer, join_token: str | None) -> None:
    host, _, port = trainer.lists[0].address.rpartition(":")
    with ControlSocket.connect(host, int(port), deadline=Deadline(PATIENCE_SECONDS)) as line:
        line.send(deadline=Deadline(PATIENCE_SECONDS), join_token=join_token, worker_id="unknown")
        with pytest.raises(ConnectionLost, match="the peer has disconnected"):
            line.receive(Deadline(PATIENCE_SECONDS))
    assert trainer.broadcaster.engines == []


def test_engine_joins_the_successor_of_a_hung_trainer(
    trainer: Trainer, store: ObjectStore, make_engine: Any, transport: str
) -> None:
    engine = make_engine("rollout-0")
    engine.fetch(trainer.publish(0))
    trainer.until_joined("rollout-0")
    with closing(
        Trainer(store, transport, last_list=trainer.lists[-1].membership_version)
    ) as successor:  # the one before hangs, and keeps its line
        successor.notify(engine.note)
        successor.until_joined("rollout-0")
        published = successor.publish(1)
        engine.until_arrived(1)
        assert engine.fetch(published) == transport
        assert [reported.membership_version for reported in successor.lists] == [3, 4]
    trainer.until_joined()


def test_version_whose_upload_failed_is_not_served_by_any_engine(
    trainer: Trainer, store: ObjectStore, make_engine: Any, monkeypatch: Any, transport: str
) -> None:
    engine = make_engine("rollout-0")
    engine.fetch(trainer.publish(0))
    trainer.until_joined("rollout-0")

    def refuse(key: str, data: bytes) -> ObjectRef:
        raise ObjectError("the object store is full")

    monkeypatch.setattr(store, "put_at", refuse)
    with pytest.raises(ObjectError, match="full"):
        trainer.publish(1)
    monkeypatch.undo()
    until(lambda: failures(trainer.metrics) == {"lost": 1}, "the trainer has given it up")
    until(lambda: len(trainer.lists) >= 4, "the engine has left, and joined again")
    first = engine.receiver._received  # it may have come whole, although the store did not get it
    published = trainer.publish(1)  # trained again
    until(lambda: engine.receiver._received is not first, "the second one replaces it")
    engine.until_arrived(1)
    assert engine.fetch(published) == transport


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_engine_that_dies_or_hangs_in_a_broadcast_does_not_block_others(
    trainer: Trainer,
    store: ObjectStore,
    make_engine: Any,
    opened: ExitStack,
    tmp_path: Path,
    action: str,
    transport: str,
) -> None:
    healthy = make_engine("rollout-0")
    victim = opened.enter_context(
        closing(
            EngineProcess(
                store, "rollout-1", folder=tmp_path, failpoint=f"weights.receiving:3={action}"
            )
        )
    )
    trainer.notify(victim.note)
    first = trainer.publish(0)
    assert (healthy.fetch(first), victim.fetch(first)) == ("store", "store")
    trainer.until_joined("rollout-0", "rollout-1")
    published = trainer.publish(1)
    healthy.until_arrived(1)
    assert healthy.fetch(published) == transport
    trainer.until_joined("rollout-0")
    assert failures(trainer.metrics) == {"lost": 1}
    published = trainer.publish(2)
    healthy.until_arrived(2)
    assert healthy.fetch(published) == transport
    if action == "stop":
        victim.process.send_signal(signal.SIGCONT)
        assert victim.fetch(published) == "store"
        trainer.until_joined("rollout-0", "rollout-1")


@pytest.mark.parametrize("transport", ["nccl", "store"])
def test_trainer_names_the_missing_requirement_of_a_transport(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match=f"weights.transport = '{transport}' needs"):
        Broadcaster(
            WeightsConfig(transport=transport),
            metrics=WorkerMetrics("trainer").weights,
            announce=lambda _: None,
        )


def test_trainer_rejects_a_weights_host_that_is_not_its_own_address() -> None:
    with pytest.raises(
        EnvironmentProblem,
        match=r"weights\.host = '192\.0\.2\.1' must be an address of the trainer's machine",
    ):
        Broadcaster(
            WeightsConfig(transport="gloo", host="192.0.2.1"),
            metrics=WorkerMetrics("trainer").weights,
            announce=lambda _: None,
        )
