"""Break a release's run and measure how long it needs to be over it: pods deleted, a node drained,
workers scaled, an upgrade.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_events.config import load_run_config
from tests.kubernetes.cluster import ROOT, KubernetesError, run_relax
from tests.kubernetes.release import Release, StepReader

QUICKSTART = ROOT / "configs" / "quickstart.toml"
BOUND_SECONDS = 300.0
DRAIN_SECONDS = 300.0
GROUPS_OF_A_WORKER, ABOVE_ANY_QUEUE = 2, 1000
MAX_STALENESS = load_run_config(QUICKSTART, environment={}).run.max_staleness


@dataclass(frozen=True)
class Recovery:
    """What was done to a run, and how long it took.

    Attributes:
        what: The role, or what else it was done to.
        how: The fault.
        ending_seconds: From the call until it returned: until the old pods were gone, for example.
        seconds: From then until the run was over it.
    """

    what: str
    how: str
    ending_seconds: float
    seconds: float


def measure(
    release: Release, steps: StepReader, what: str, how: str, work: Callable[[], object]
) -> Recovery:
    """Do something to a run, and wait until a train step commits whose prompts were issued after it.

    Raises:
        KubernetesError: It failed, or the run was not over it in time.
    """
    started = time.monotonic()
    work()
    ending = time.monotonic() - started
    issued_after = steps.num_steps + MAX_STALENESS + 1  # steps up to here may have been admitted
    seconds = steps.wait_for(issued_after, seconds=BOUND_SECONDS, what=f"over {how} of {what}")
    release.cluster.log.write(
        f"{release.name}: {how} of {what}: ended after {ending:.1f} s, over it {seconds:.1f} s later"
    )
    return Recovery(what, how, ending, seconds)


def delete(release: Release, role: str, *, force: bool) -> None:
    """Delete a role's pod: by SIGTERM and its time to drain, or with `force` at once."""
    (pod,) = release.pods(role)
    words = ["--force", "--grace-period=0"] if force else []
    release.cluster.kubectl("delete", "pod", pod["metadata"]["name"], *words, seconds=DRAIN_SECONDS)


def drain(release: Release) -> str:
    """Drain the node of the trainer, let pods onto it again, and return its name. Where it is the
    only node, its pods wait for that.
    """
    cluster = release.cluster
    (pod,) = release.pods("trainer")
    node = str(pod["spec"]["nodeName"])
    try:
        cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data",
            "--pod-selector", f"app.kubernetes.io/instance={release.name}", seconds=DRAIN_SECONDS,
        )  # fmt: skip
        if len(cluster.get("nodes")["items"]) > 1:
            release.wait_until_ready("trainer")
    finally:
        cluster.kubectl("uncordon", node)
    return node


class Api:
    """The scaling API of a release, called by `relax scale` through a forwarded port."""

    def __init__(self, release: Release, url: str, token_file: Path) -> None:
        self._release = release
        self._words = ["--url", url, "--token-file", str(token_file)]

    def scale(self, direction: str, number: int) -> tuple[float, float]:
        """Scale rollout, and return the seconds until its pods are ready and until the request is
        fulfilled.

        Raises:
            KubernetesError: The request failed.
        """
        started = time.monotonic()
        flag, agreed = ("--down-to", ["--yes"]) if direction == "in" else ("--up-to", [])
        run_relax("scale", str(QUICKSTART), flag, str(number), *agreed, *self._words)
        self._release.wait_until_ready("rollout", number)
        ready = time.monotonic() - started
        wanted = "ACTIVE" if direction == "out" else "COMPLETED"

        def is_fulfilled() -> bool:
            said = run_relax("scale", str(QUICKSTART), *self._words, "--output", "json")
            newest = json.loads(said)["requests"][-1]
            if newest["status"] in ("FAILED", "CANCELLED"):
                raise KubernetesError(f"scale {direction}: {newest}")
            return bool(newest["status"] == wanted)

        self._release.cluster.wait_until(
            is_fulfilled, seconds=BOUND_SECONDS, what=f"scale {direction} {wanted}"
        )
        return ready, time.monotonic() - started


def scale(release: Release, token: str, *, more: int = 3) -> list[tuple[str, float, float]]:
    """Scale rollout out and in again by the API; return the seconds of each until the pods are
    ready, and until the request is fulfilled.
    """
    cluster = release.cluster
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(token)
        token_file.chmod(0o600)
        with cluster.forwarded(f"service/{release.name}-controller", 8900) as url:
            api = Api(release, url, token_file)
            found = []
            for direction, number in (("out", more), ("in", 1)):
                ready, fulfilled = api.scale(direction, number)
                cluster.log.write(
                    f"{release.name}: rollout scaled {direction} to {number} by the API: pods after "
                    f"{ready:.1f} s, request fulfilled after {fulfilled:.1f} s"
                )
                found.append((f"{direction} to {number}", ready, fulfilled))
    return found


def scale_by_keda(release: Release, prometheus: str, *, more: int = 2) -> list[tuple[str, float]]:
    """Let KEDA scale rollout out and in again by the prompt queue. A worker takes few prompt groups
    at once, so that the queue stays longer than the threshold; then the threshold is raised above
    it. Returns the seconds from each upgrade until the pods are ready.

    Raises:
        KubernetesError: Rollout was not scaled in time.
    """
    release.words += [
        "--set", f"scaling.by=keda,scaling.keda.prometheus={prometheus},scaling.keda.max={more}",
        "--set", f"run.environment.RELAX_ENGINE__MAX_PROMPT_GROUPS={GROUPS_OF_A_WORKER}",
    ]  # fmt: skip
    found = []
    for direction, number, threshold in (
        ("out", more, GROUPS_OF_A_WORKER),
        ("in", 1, ABOVE_ANY_QUEUE),
    ):
        release.words += ["--set", f"scaling.keda.threshold={threshold}"]
        started = time.monotonic()
        release.install()
        release.wait_until_ready("rollout", number)
        found.append((f"{direction} to {number}", time.monotonic() - started))
        release.cluster.log.write(
            f"{release.name}: rollout scaled {direction} to {number} by KEDA after {found[-1][1]:.1f} s"
        )
    return found
