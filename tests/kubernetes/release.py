"""A release of the chart: install, follow, change, check."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster import CHART, Cluster, KubernetesError

INSTALL_SECONDS, UNINSTALL_SECONDS = 120.0, 330.0
READY_SECONDS = 600.0
LEDGER_SECONDS = 900.0
RUN_FILE = "configs/run.toml"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"


class StepReader:
    """Follows the trainer's log by `kubectl logs --follow`, over all pods that it gets."""

    def __init__(self, cluster: Cluster, pod: str) -> None:
        """Start to follow.

        Args:
            cluster: Where the release is.
            pod: The name of the trainer's pod, which each successor has too.
        """
        self._cluster, self._pod = cluster, pod
        self.rewards: dict[int, float] = {}
        self.first_step_at = 0.0
        self._stepped = threading.Condition()
        self._is_closing = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def num_steps(self) -> int:
        """Number of committed train steps."""
        return max(self.rewards, default=-1) + 1

    def wait_for(self, num_steps: int, *, seconds: float, what: str) -> float:
        """Wait until more than `num_steps` are committed, and return the seconds that it took.

        Raises:
            KubernetesError: They were not, in time.
        """
        started = time.monotonic()
        with self._stepped:
            if not self._stepped.wait_for(lambda: self.num_steps > num_steps, seconds):
                pods = self._cluster.kubectl("get", "pods", check=False)
                raise KubernetesError(
                    f"{what}: not within {seconds:g} s; {self.num_steps} train steps are "
                    f"committed\n{pods}"
                )
        return time.monotonic() - started

    def close(self) -> None:
        """Stop following."""
        self._is_closing = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join(10)

    def _follow(self) -> None:
        words = [
            *self._cluster.kubectl_words,
            "logs",
            "--follow",
            "--container",
            "worker",
            self._pod,
        ]
        while not self._is_closing:
            with subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                self._process = process
                assert process.stdout is not None
                for line in process.stdout:
                    self._read(line)
            time.sleep(0.5)

    def _read(self, line: str) -> None:
        with suppress(json.JSONDecodeError):
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "train_step.committed":
                with self._stepped:
                    self.first_step_at = self.first_step_at or time.monotonic()
                    self.rewards[event["train_step"]] = event["reward_mean"]
                    self._stepped.notify_all()


@dataclass
class Release:
    """A run as a release of the chart. `words` are helm's options for its values."""

    cluster: Cluster
    name: str
    run_file: Path
    words: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Install or upgrade it; raises KubernetesError."""
        self.cluster.helm(
            "upgrade", "--install", self.name, str(CHART), *self.words, "--set-file",
            f"run.file={self.run_file}", seconds=INSTALL_SECONDS,
        )  # fmt: skip

    def uninstall(self) -> None:
        """Remove it and its volumes, so that nothing is left of the run."""
        words = ["--wait", "--ignore-not-found"]
        self.cluster.helm("uninstall", self.name, *words, seconds=UNINSTALL_SECONDS)
        claims = ["delete", "persistentvolumeclaim", "--ignore-not-found"]
        self.cluster.kubectl(*claims, f"{self.name}-files", f"log-{self.name}-kafka-0")

    def steps(self) -> StepReader:
        """Follow its train steps."""
        return StepReader(self.cluster, f"{self.name}-trainer-0")

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Return its pods, or those of a role."""
        selector = f"{INSTANCE}={self.name}" + (f",{COMPONENT}={role}" if role else "")
        found: list[dict[str, Any]] = self.cluster.get("pods", "--selector", selector)["items"]
        return found

    def wait_until_ready(self, role: str, number: int = 1) -> float:
        """Wait until a role has a number of ready pods and no other, and return the seconds."""
        return self.cluster.wait_until(
            lambda: [is_ready(pod) for pod in self.pods(role)] == [True] * number,
            seconds=READY_SECONDS,
            what=f"{number} ready pods of {self.name}-{role}",
        )

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended the run."""
        return any(ended_with_its_run(pod) for pod in self.pods("controller"))

    def create_link(self) -> str:
        """Return a link that opens the dashboard's page once."""
        return self.cluster.kubectl(
            "exec", f"deployment/{self.name}-dashboard", "--container", "dashboard", "--", "relax",
            "dashboard", RUN_FILE, "--link",
        ).strip()  # fmt: skip

    def check_ledger(self) -> dict[str, Any]:
        """Return what `relax ledger check` says in the dashboard's pod.

        Raises:
            KubernetesError: A promise is broken.
        """
        self.wait_until_ready("dashboard")
        said = self.cluster.kubectl(
            "exec", f"deployment/{self.name}-dashboard", "--container", "dashboard", "--", "relax",
            "ledger", "check", RUN_FILE, "--output", "json", seconds=LEDGER_SECONDS,
        )  # fmt: skip
        ledger: dict[str, Any] = json.loads(said)
        if ledger["problems"]:
            raise KubernetesError(f"{self.name}: the ledger found {ledger['problems']}")
        return ledger


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether a pod is ready and not about to end."""
    conditions = pod["status"].get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


def ended_with_its_run(pod: dict[str, Any]) -> bool:
    """Return whether a controller's pod says that the run is over: only then its container exits
    with code 0 in a pod that stays.
    """
    return "deletionTimestamp" not in pod["metadata"] and any(
        status.get(when, {}).get("terminated", {}).get("exitCode") == 0
        for status in pod["status"].get("containerStatuses", [])
        for when in ("state", "lastState")
    )
