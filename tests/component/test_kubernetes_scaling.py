"""The controller scales StatefulSets through the Kubernetes API: requests of the scaling API become
replicas, and pods that are gone become exits on the control log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_events.controller import kubernetes_client, kubernetes_scaler
from relax_events.controller.kubernetes_client import KubernetesClient, Replicas
from relax_events.controller.kubernetes_scaler import KubernetesScaler
from relax_events.controller.scaling_admission import ConflictError, RejectedError, ScaleCommand
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_service import ScalingService
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import Kind, Status
from relax_events.projections.scaling import ScaleState
from tests.component.kubernetes_api import FakeApiServer, StatefulSet
from tests.unit.run_events import make_heartbeat, run_config

CONFIG = run_config()
BOUNDS = replace(ScalingBounds.from_config(CONFIG, is_supervised=False), is_on_kubernetes=True)
ROLES = tuple(pool.role for pool in BOUNDS.pools.values())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeApiServer]:
    names = [f"demo-{role}" for role in ROLES]
    with FakeApiServer(
        tmp_path, sets={name: StatefulSet() for name in names}, allowed=set(names)
    ) as started:
        yield started


class Run:
    """A controller's scaling, without its broker: commands are applied to the state."""

    def __init__(self, server: FakeApiServer) -> None:
        self.state = ScaleState()
        self.service = ScalingService(self.state, BOUNDS, self._apply, record=lambda _: None)
        client = KubernetesClient(server.url, account=server.account)
        self.scaler = KubernetesScaler(client, "demo", BOUNDS, self.state)

    def _apply(self, commands: Sequence[RunCommanded]) -> None:
        for command in commands:
            self.state.apply(command)

    def turn(self, *heartbeats: tuple[str, WorkerState]) -> None:
        """Take heartbeats, and do one turn of the controller's loop."""
        for worker_id, worker_state in heartbeats:
            sent_at = now_micros()
            heartbeat = replace(
                make_heartbeat(worker_id, at_seconds=sent_at / 1e6), state=worker_state
            )
            self.state.apply(replace(heartbeat, sent_at=sent_at + 1_000_000))
        self.service.reconcile()
        self._apply(self.scaler.reconcile())
        self.service.reconcile()

    def scale(self, kind: Kind, target: int, **more: Any) -> str:
        """Open a request."""
        command = ScaleCommand(kind=kind, target=target, **more)
        return self.service.scale(command, dry_run=False).request_id or ""

    def status(self, request_id: str) -> Status:
        """Return the status of a request."""
        return self.state.requests[request_id].status


@pytest.fixture
def run(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(kubernetes_scaler, "POLL_SECONDS", 0.0)
    return Run(server)


def test_scale_out_sets_replicas_and_ends_when_the_pods_serve(
    run: Run, server: FakeApiServer
) -> None:
    rollout = server.sets["demo-rollout"]
    request = run.scale(Kind.OUT, 3)
    assert run.state.requests[request].workers == ("rollout-1", "rollout-2")
    run.turn()
    assert (rollout.wanted, run.status(request)) == (3, Status.CREATING)
    run.turn(("rollout-1", WorkerState.IDLE), ("rollout-2", WorkerState.IDLE))
    assert run.status(request) is Status.ACTIVE
    patches = [path for method, path in server.calls if method == "PATCH"]
    assert patches == ["/apis/apps/v1/namespaces/training/statefulsets/demo-rollout/scale"]


def test_scale_in_is_completed_once_the_last_pods_are_gone(run: Run, server: FakeApiServer) -> None:
    rollout = server.sets["demo-rollout"]
    run.scale(Kind.OUT, 3)
    run.turn()
    run.turn(("rollout-1", WorkerState.IDLE), ("rollout-2", WorkerState.IDLE))
    rollout.is_frozen = True
    request = run.scale(Kind.IN, 1)
    run.turn()
    assert (rollout.wanted, rollout.existing, run.status(request)) == (1, 3, Status.DRAINING)
    with pytest.raises(ConflictError, match="rollout-1 still leaves; repeat the call"):
        run.scale(Kind.OUT, 2)
    run.turn(("rollout-1", WorkerState.STOPPED), ("rollout-2", WorkerState.STOPPED))
    assert (list(run.state.workers), run.status(request)) == (
        ["rollout-1", "rollout-2"],
        Status.REMOVING,
    )
    rollout.is_frozen = False
    run.turn()
    assert (list(run.state.workers), run.status(request)) == ([], Status.COMPLETED)
    assert run.state.requests[run.scale(Kind.OUT, 2)].workers == ("rollout-1",)


def test_request_whose_pods_do_not_serve_in_time_is_rolled_back(
    run: Run, server: FakeApiServer
) -> None:
    request = run.scale(Kind.OUT, 2, timeout_seconds=0.0)
    for _ in range(3):
        run.turn()
    assert run.status(request) is Status.FAILED
    assert "rollout-1 did not serve within 0 s" in run.state.requests[request].error
    assert server.sets["demo-rollout"].wanted == 1


def test_replicas_that_another_changed_are_set_back(run: Run, server: FakeApiServer) -> None:
    run.turn()
    server.sets["demo-reward"].wanted = 5
    run.turn()
    assert server.sets["demo-reward"].wanted == 1


def test_pods_of_a_run_that_is_over_are_ended(run: Run, server: FakeApiServer) -> None:
    run.turn()
    run.state.apply(RunCommanded(command=Command.STOP, reason="all steps are committed"))
    run.turn()
    assert {name: found.wanted for name, found in server.sets.items()} == dict.fromkeys(
        server.sets, 0
    )


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"kind": Kind.OUT, "target": 0, "urls": ("http://a:1",)}, "engine_urls: the pods of a"),
        ({"kind": Kind.IN, "target": 1, "force": True}, "leave force out"),
    ],
)
def test_command_that_a_stateful_set_can_not_carry_out_is_refused(
    run: Run, asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(RejectedError, match=text):
        run.service.scale(ScaleCommand(**asked), dry_run=False)


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda server: server.allowed.clear(), r"refused: 403 cannot get resource .*Role must"),
        (lambda server: server.sets.clear(), r'refused: 404 statefulsets.apps "demo-rollout" not'),
        (lambda server: (server.account / "token").write_text("old"), "401 Unauthorized; the"),
        (lambda server: setattr(server, "is_silent", True), "timed out"),
    ],
)
def test_failed_call_names_server_object_and_remedy(
    server: FakeApiServer,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[FakeApiServer], object],
    text: str,
) -> None:
    monkeypatch.setattr(kubernetes_client, "CALL_SECONDS", 1.0)
    client = KubernetesClient(server.url, account=server.account)
    break_it(server)
    with pytest.raises(EnvironmentProblem, match=f"GET {server.url}/apis/apps/v1.*{text}"):
        client.read_replicas("demo-rollout")


def test_controller_survives_an_api_server_that_refuses(run: Run, server: FakeApiServer) -> None:
    server.allowed.clear()
    request = run.scale(Kind.OUT, 2)
    run.turn()
    assert run.status(request) is Status.CREATING


def test_client_reads_a_replaced_token_and_zero_replicas(server: FakeApiServer) -> None:
    client = KubernetesClient(server.url, account=server.account)
    token = (server.account / "token").read_text()
    (server.account / "token").write_text("expired")
    with pytest.raises(EnvironmentProblem, match="401"):
        client.read_replicas("demo-rollout")
    (server.account / "token").write_text(token + "\n")
    assert client.set_replicas("demo-rollout", 0) == Replicas(0, 1)
    assert client.read_replicas("demo-rollout") == Replicas(0, 0)


def test_client_trusts_only_the_authority_of_its_pod(server: FakeApiServer, tmp_path: Path) -> None:
    with FakeApiServer(tmp_path / "other") as other:
        client = KubernetesClient(other.url, account=server.account)
        with pytest.raises(EnvironmentProblem, match="certificate verify failed"):
            client.read_replicas("demo-rollout")


def test_process_outside_a_pod_reads_what_to_unset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no pod: .*unset scaling.kubernetes_release"):
        KubernetesClient.from_pod({})
    with pytest.raises(ConfigError, match="set automountServiceAccountToken: true"):
        KubernetesClient("https://127.0.0.1:1", account=tmp_path)
