"""Use a cluster by kubectl and helm, as a user does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

COMMAND_SECONDS = 120.0
POLL_SECONDS = 0.5
PORT_SECONDS = 30.0
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "relax-events"


class KubernetesError(Exception):
    """The cluster or the run on it failed in a way that the text explains."""


@dataclass
class ProofLog:
    """Lines with the seconds since the start, on stdout and in a file."""

    file: IO[str] | None = None
    started: float = field(default_factory=time.monotonic)
    lines: list[dict[str, str]] = field(default_factory=list)

    def write(self, text: str) -> None:
        """Write a line."""
        line = {"seconds": f"{time.monotonic() - self.started:.1f}", "what": text}
        self.lines.append(line)
        print(f"{line['seconds']:>8}  {text}", flush=True)
        if self.file is not None:
            print(f"{line['seconds']:>8}  {text}", file=self.file, flush=True)


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster. The cluster is that of kubectl's own settings: KUBECONFIG, or
    ~/.kube/config.
    """

    namespace: str
    log: ProofLog

    def kubectl(
        self, *words: str, seconds: float = COMMAND_SECONDS, check: bool = True, given: str = ""
    ) -> str:
        """Run kubectl in the namespace, and return its stdout.

        Raises:
            KubernetesError: It failed, or took longer than `seconds`.
        """
        return run([*self.kubectl_words, *words], seconds=seconds, check=check, given=given)

    @property
    def kubectl_words(self) -> list[str]:
        """The command with the namespace."""
        return [program("KUBECTL", "kubectl"), "--namespace", self.namespace]

    def helm(self, *words: str, seconds: float = COMMAND_SECONDS) -> str:
        """Run helm in the namespace; raises as `kubectl`."""
        return run(
            [program("HELM", "helm"), "--namespace", self.namespace, *words], seconds=seconds
        )

    def get(self, *words: str) -> Any:
        """Return what `kubectl get` finds, decoded."""
        return json.loads(self.kubectl("get", *words, "--output", "json"))

    def require(self) -> str:
        """Return the versions of the cluster and its nodes, once it answers.

        Raises:
            KubernetesError: A program is missing, or no cluster answers; the text says what to do.
        """
        program("HELM", "helm")
        program("KUBECTL", "kubectl")
        try:
            version = self.server_version()
            nodes = self.get("nodes")["items"]
        except KubernetesError as error:
            raise KubernetesError(
                "no cluster answers; set KUBECONFIG to the file of one, on whose nodes are the "
                f"images of docs/how-to/kubernetes.md. {error}"
            ) from None
        runtimes = {node["status"]["nodeInfo"]["containerRuntimeVersion"] for node in nodes}
        return f"Kubernetes {version}, {len(nodes)} nodes, {', '.join(sorted(runtimes))}"

    def server_version(self) -> str:
        """Return the version of the API server, like v1.34.4; raises KubernetesError."""
        said = self.kubectl("version", "--output", "json", "--request-timeout=10s", seconds=20)
        return str(json.loads(said)["serverVersion"]["gitVersion"])

    def wait_until(self, condition: Callable[[], bool], *, seconds: float, what: str) -> float:
        """Ask until the condition holds, and return the seconds that it took.

        Raises:
            KubernetesError: It did not hold in time.
        """
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > seconds:
                pods = self.kubectl("get", "pods", "--output", "wide", check=False)
                raise KubernetesError(f"{what}: not within {seconds:g} s\n{pods}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """Forward a port of a pod or Service for the block, and give its address here.

        Raises:
            KubernetesError: kubectl did not forward it.
        """
        words = [*self.kubectl_words, "port-forward", target, f":{port}"]
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT) as process,
        ):
            try:
                local = ""

                def is_forwarded() -> bool:
                    nonlocal local
                    said.seek(0)
                    found = re.search(r"127\.0\.0\.1:(\d+)", said.read())
                    local = found[1] if found else ""
                    return bool(local) or process.poll() is not None

                self.wait_until(is_forwarded, seconds=PORT_SECONDS, what=f"forward to {target}")
                if not local:
                    said.seek(0)
                    raise KubernetesError(f"port-forward {target}: {said.read().strip()}")
                yield f"http://127.0.0.1:{local}"
            finally:
                process.terminate()


def program(variable: str, default: str) -> str:
    """Return a program that an environment variable may name.

    Raises:
        KubernetesError: It is not installed.
    """
    name = os.environ.get(variable, default)
    if shutil.which(name) is None:
        raise KubernetesError(f"{name} is not installed; put it on PATH, or name it by {variable}")
    return name


def run(words: Sequence[str], *, seconds: float, check: bool = True, given: str = "") -> str:
    """Run a command and return its stdout.

    Raises:
        KubernetesError: It failed, or took longer than `seconds`.
    """
    line = " ".join(words)
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise KubernetesError(f"{line}: no end within {seconds:g} s") from None
    if check and done.returncode:
        raise KubernetesError(
            f"{line}: exit code {done.returncode}\n{(done.stderr or done.stdout).strip()[-3000:]}"
        )
    return done.stdout


def run_relax(*words: str, seconds: float = COMMAND_SECONDS) -> str:
    """Run `relax` on this machine; raises as `run`."""
    return run([sys.executable, "-m", "relax_events.cli", *words], seconds=seconds)
