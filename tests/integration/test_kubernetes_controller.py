"""The controller's process with the settings that the chart gives its pod: requests of its API become
replicas of StatefulSets, and pods that are gone end them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_events.config import RunConfig
from relax_events.controller.scaling_bounds import ELASTIC_ROLES
from relax_events.events.parts import WorkerState
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.projections.scale_requests import Status
from tests.component.kubernetes_api import FakeApiServer, StatefulSet
from tests.integration.test_scaling_controller import PATIENCE_SECONDS, Run
from tests.unit.deploy.manifests import find

RELEASE = "existing"
TAKEN = ("RELAX_SCALING__KUBERNETES_RELEASE", "RELAX_SCALING__API", "RELAX_WORKERS__ROLLOUT")
PROGRAM = """
import sys
from pathlib import Path
from relax_events.controller import kubernetes_client
kubernetes_client.ACCOUNT = Path(sys.argv.pop(1))
from relax_events.cli import main
main()
"""
"""`relax`, with the service account's files in a folder instead of where Kubernetes mounts them."""


class PodRun(Run):
    """A run whose controller believes that it runs in the chart's pod."""

    def __init__(
        self,
        server: FakeApiServer,
        config: RunConfig,
        connection: Connection,
        producer: RecordProducer,
    ) -> None:
        self.server = server
        super().__init__(config, connection, producer)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the controller with the variables of its pod."""
        pod = find(RELEASE, "Deployment")[f"{RELEASE}-controller"]["spec"]["template"]
        given = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        host, _, port = self.server.url.removeprefix("https://").partition(":")
        environment = os.environ | {name: given[name] for name in TAKEN}
        words = [sys.executable, "-c", PROGRAM, str(self.server.account)]
        with (self.config.run_directory / "log").open("ab") as log:
            return subprocess.Popen(
                [*words, "worker", "controller", str(self.run_file)],
                env=environment
                | {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
                stdout=log,
                stderr=log,
            )

    def wait_for_replicas(self, number: int) -> None:
        """Wait until the rollout workers' StatefulSet should have a number of replicas."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.server.sets[f"{RELEASE}-rollout"].wanted != number:
            assert time.monotonic() < deadline, (self.config.run_directory / "log").read_text()
            time.sleep(0.1)

    def request_of(self, kind: str) -> str:
        """Return the id of the only request of a kind. A call may have been repeated where the
        controller answered late, so its own answer need not name the request."""
        listed = self.call("GET", kind)
        assert listed["total_count"] == 1, listed
        return str(listed["requests"][0]["request_id"])  # type: ignore[index]


@pytest.fixture
def run(
    apply_run: Callable[..., RunConfig],
    connection: Connection,
    producer: RecordProducer,
    tmp_path: Path,
) -> Iterator[PodRun]:
    names = [f"{RELEASE}-{role}" for role in ELASTIC_ROLES]
    (role,) = find(RELEASE, "Role").values()
    with FakeApiServer(
        tmp_path / "api",
        sets={name: StatefulSet() for name in names},
        allowed=set(role["rules"][0]["resourceNames"]),
    ) as server:
        opened = PodRun(server, apply_run(), connection, producer)
        yield opened
        opened.process.kill()
        opened.process.wait(10)


@pytest.mark.timeout(400)
def test_controller_in_a_pod_scales_out_and_in(run: PodRun) -> None:
    run.call("POST", "scale_out", {"num_replicas": 3})
    run.wait_for_replicas(3)
    grown = run.request_of("scale_out")
    run.heartbeats("rollout-1", "rollout-2", state=WorkerState.IDLE)
    run.until(grown, Status.ACTIVE)

    rollout = run.server.sets[f"{RELEASE}-rollout"]
    rollout.existing, rollout.is_frozen = 3, True
    run.call("POST", "scale_in", {"num_replicas": 1})
    run.wait_for_replicas(1)
    shrunk = run.request_of("scale_in")
    run.heartbeats("rollout-1", "rollout-2", state=WorkerState.STOPPED)
    run.until(shrunk, Status.REMOVING)
    run.kill_controller()
    rollout.is_frozen = False
    assert run.until(shrunk, Status.COMPLETED).workers == {}
