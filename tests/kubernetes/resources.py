"""What the API server alone decides: whether it accepts the chart's resources and their changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from tests.kubernetes.cluster import CHART, Cluster
from tests.kubernetes.release import Release

CHANGES = (
    "drainSeconds=25",
    "roles.rollout.replicas=2",
    "run.environment.RELAX_HEALTH__START_SECONDS=100",
    "roles.rollout.environment.RELAX_HEALTH__START_SECONDS=200",
    "roles.prepare.resources.limits.memory=4Gi",
    "images.light=relax-events:light-2",
    "images.model=relax-events:cpu-2",
    "metricsPort=9200",
    "dashboard.enabled=false",
    "scaling.by=none",
)
"""Values that are changed one after the other, each by an upgrade of the release before it."""


def define_operators(cluster: Cluster, folder: Path) -> None:
    """Define the operators' kinds: the CustomResourceDefinitions of a folder, *.yaml.gz."""
    for file in sorted(folder.glob("*.yaml.gz")):
        text = gzip.decompress(file.read_bytes()).decode()
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=text)
    cluster.kubectl("wait", "--for=condition=Established", "customresourcedefinitions", "--all")


def count_accepted(cluster: Cluster, name: str, run_file: Path) -> int:
    """Return how many resources the chart makes of a values file, once the API server has accepted
    all of them without storing them.

    Raises:
        KubernetesError: It refuses one.
    """
    values = CHART / f"values-{name}.yaml"
    words = [str(CHART), "--values", str(values), "--set-file", f"run.file={run_file}"]
    text = cluster.helm("template", name, *words, "--kube-version", cluster.server_version())
    said = cluster.kubectl("apply", "--dry-run=server", "--filename", "-", given=text)
    return len(said.splitlines())


def upgrade_repeatedly(release: Release, changes: Sequence[str] = CHANGES) -> None:
    """Change a release value by value, and roll back to the oldest revision that helm kept.

    Raises:
        KubernetesError: The API server refuses a change.
    """
    for change in changes:
        release.words += ["--set", change]
        release.install()
    kept = json.loads(release.cluster.helm("history", release.name, "--output", "json"))
    release.cluster.helm("rollback", release.name, str(kept[0]["revision"]))
