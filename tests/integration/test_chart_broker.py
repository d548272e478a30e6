"""The chart's own broker, with the settings and commands of the rendered chart: it lets in the users
of the roles, each with its own rights, and no one else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import build_broker_command, find_java
from relax_events.kafka.embedded.ports import HOST
from tests.unit.deploy.manifests import find

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN_FILE = Path(__file__).parents[2] / "configs" / "quickstart.toml"
ESCAPES = {"___": "-", "__": "_", "_": "."}
OF_THE_IMAGE = ("KAFKA_HEAP_OPTS", "KAFKA_JVM_PERFORMANCE_OPTS", "CLUSTER_ID")
SECONDS = 120


def pod_of_the_broker() -> dict[str, Any]:
    spec: dict[str, Any] = find("kind", "StatefulSet")["kind-kafka"]["spec"]["template"]["spec"]
    return spec


def call_relax(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `relax` as the chart's containers do, for the release `kind`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")}
    return subprocess.run(
        [sys.executable, "-m", "relax_events.cli", *words],
        env=inherited | {"RELAX_RUN__ID": "kind"} | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def find_free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def name_property(variable: str) -> str:
    """Return the property that a variable of Kafka's image sets."""
    name = variable.removeprefix("KAFKA_").lower()
    for escaped, placeholder in zip(ESCAPES, "\0\1\2", strict=True):
        name = name.replace(escaped, placeholder)
    for placeholder, letter in zip("\0\1\2", ESCAPES.values(), strict=True):
        name = name.replace(placeholder, letter)
    return name


def place(text: str, replaced: Mapping[str, str]) -> str:
    """Put this machine's paths, host and ports in the place of the pod's."""
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the address of the broker, and the folder of its passwords."""
    folder = tmp_path_factory.mktemp("own")
    security, spec = folder / "made", pod_of_the_broker()
    ports = dict(zip((":9092", ":9093", ":9094"), find_free_ports(3), strict=True))
    replaced = {
        "/etc/kafka/secrets/broker.pem": str(security / "brokers" / "localhost.pem"),
        "/run/secrets/broker_ca": str(security / "ca.pem"),
        "/var/lib/kafka/data/log": str(folder / "log"),
        "/security": str(security),
        "configs/run.toml": str(RUN_FILE),
        "kind-kafka": "localhost",
        **{old: f":{port}" for old, port in ports.items()},
    }
    (secure,) = spec["initContainers"]
    for line in secure["command"][-1].strip().splitlines():
        done = call_relax(*place(line, replaced).split()[1:])
        assert done.returncode == 0, done.stderr
    settings = {
        name_property(one["name"]): place(str(one["value"]), replaced)
        for one in spec["containers"][0]["env"]
        if one["name"] not in OF_THE_IMAGE
    }
    properties = folder / "server.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    (folder / "tmp").mkdir()
    lock = read_jar_lock()
    command = build_broker_command(
        find_java(),
        ensure_jars(lock, locate_cache(lock)),
        properties,
        archive=folder / "none",
        archive_at_exit=None,
        heap_mib=512,
    )
    with (folder / "kafka.log").open("wb") as log:
        broker = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"localhost:{ports[':9092']}"
        apply_access(address, security, broker)
        yield address, security
    finally:
        broker.terminate()
        broker.wait(timeout=60)


def apply_access(address: str, security: Path, broker: subprocess.Popen[bytes]) -> None:
    """Make users and rights, as the job's container `access` does until the broker answers."""
    words = ("broker", "secure", str(RUN_FILE), "--out", str(security), "--apply", "--yes")
    done = call_relax(*words, RELAX_BROKER__BOOTSTRAP_SERVERS=address)
    while done.returncode == 3 and broker.poll() is None:
        done = call_relax(*words, RELAX_BROKER__BOOTSTRAP_SERVERS=address)
    assert done.returncode == 0, done.stderr


def login(cluster: tuple[str, Path], principal: str) -> dict[str, str]:
    address, security = cluster
    return {
        "RELAX_BROKER__BOOTSTRAP_SERVERS": address,
        "RELAX_BROKER__USERNAME": f"relax.kind.{principal}",
        "RELAX_BROKER__PASSWORD_FILE": str(security / "secrets" / f"relax.kind.{principal}"),
        "RELAX_BROKER__CA_FILE": str(security / "ca.pem"),
    }


def test_operator_applies_the_topics_and_reader_reads_them(cluster: tuple[str, Path]) -> None:
    done = call_relax("topics", "apply", str(RUN_FILE), "--yes", **login(cluster, "operator"))
    assert (done.returncode, "relax.kind.prompt.groups" in done.stdout) == (0, True), done.stderr
    read = call_relax("topics", "apply", "--dry-run", str(RUN_FILE), **login(cluster, "reader"))
    assert read.returncode == 0, read.stderr


def test_role_makes_no_topics(cluster: tuple[str, Path]) -> None:
    done = call_relax("topics", "apply", str(RUN_FILE), "--yes", **login(cluster, "reward"))
    assert (done.returncode, "uthorization failed" in done.stderr) == (4, True), done.stderr


def test_client_without_a_login_is_refused(cluster: tuple[str, Path]) -> None:
    done = call_relax(
        "topics", "apply", "--dry-run", str(RUN_FILE), RELAX_BROKER__BOOTSTRAP_SERVERS=cluster[0]
    )
    assert done.returncode == 4, done.stderr
    assert "uses TLS and this client does not" in done.stderr


def test_client_with_a_wrong_password_is_refused(cluster: tuple[str, Path]) -> None:
    wrong = cluster[1] / "wrong"
    wrong.write_text("not the password")
    given = login(cluster, "operator") | {"RELAX_BROKER__PASSWORD_FILE": str(wrong)}
    done = call_relax("topics", "apply", "--dry-run", str(RUN_FILE), **given)
    assert done.returncode == 4, done.stderr
    assert "authentication of user 'relax.kind.operator' failed" in done.stderr
