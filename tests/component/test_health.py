"""`relax health` reports the worker's own endpoint, quickly; replicas with the same command get
different indices.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from relax_events.cli.health import VARIABLE, health
from relax_events.config import TelemetryConfig
from relax_events.errors import CheckFailed, ConfigError
from relax_events.runtime import parent_watch as replicas
from relax_events.runtime.parent_watch import worker_index_from_hostname
from relax_events.telemetry.endpoint import WorkerEndpoint
from relax_events.telemetry.metrics import WorkerMetrics

HEAVY = ("pydantic", "cyclopts", "structlog", "prometheus_client", "confluent_kafka")
ASKED = f"""
import sys
from relax_events.cli import main
sys.argv = ["relax", "health"]
try:
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules])
"""


class Standing:
    illness = ""
    absence = "it starts"


@pytest.fixture
def endpoint() -> Iterator[WorkerEndpoint]:
    served = WorkerEndpoint(
        TelemetryConfig(),
        WorkerMetrics("reward"),
        illness=lambda: Standing.illness,
        absence=lambda: Standing.absence,
    )
    yield served
    served.close()


def test_live_worker_that_accepts_no_work_yet_is_healthy_but_not_ready(
    endpoint: WorkerEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    health(port=endpoint.port)
    assert capsys.readouterr().out == "ok\n"
    with pytest.raises(
        CheckFailed,
        match=rf"127.0.0.1:{endpoint.port}/readyz answers no: it starts; see the worker's log",
    ):
        health(port=endpoint.port, ready=True)


def test_worker_in_a_long_call_is_healthy_and_names_the_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = WorkerEndpoint(
        TelemetryConfig(),
        WorkerMetrics("reward"),
        illness=str,
        absence=str,
        activity=lambda: "write weights for 41 s",
    )
    health(port=served.port)
    served.close()
    assert capsys.readouterr().out == "ok: write weights for 41 s\n"


def test_hung_worker_is_not_healthy(
    endpoint: WorkerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Standing, "illness", "its work loop has not turned for 61 s")
    with pytest.raises(
        CheckFailed,
        match="healthz answers no: its work loop has not turned for 61 s; see the worker's log",
    ):
        health(port=endpoint.port)


def test_health_check_error_names_the_address_of_a_missing_worker(endpoint: WorkerEndpoint) -> None:
    endpoint.close()
    with pytest.raises(
        CheckFailed, match=rf"127.0.0.1:{endpoint.port}/healthz does not answer: .*refused"
    ):
        health(port=endpoint.port)


def test_health_check_requires_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"give --port, or set {VARIABLE}"):
        health()


def test_container_health_check_imports_no_heavy_packages(endpoint: WorkerEndpoint) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKED],
        env={VARIABLE: str(endpoint.port)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert asked.stdout == "ok\n[]\n"


def test_worker_index_from_hostname_is_unique_and_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    def index(name: str) -> int:
        monkeypatch.setattr(replicas.socket, "gethostname", lambda: name)
        return worker_index_from_hostname()

    names = ["4f2a9c1b77e3", "4f2a9c1b77e4", "rollout-0", "rollout-1"]
    assert len({index(name) for name in names}) == len(names)
    assert index("123456789") == 0xCBF43926  # the check value of CRC-32
