"""The chart as `helm template` renders it, read from deploy/helm/rendered, and what its pods must
have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from deploy.render import RENDERED

Manifest = dict[str, Any]
RELEASES: dict[str, list[Manifest]] = {
    path.stem: [found for found in yaml.safe_load_all(path.read_text()) if found]
    for path in sorted(RENDERED.glob("*.yaml"))
}


def find(release: str, kind: str) -> dict[str, Manifest]:
    """Return a release's manifests of a kind, by name."""
    return {
        found["metadata"]["name"]: found for found in RELEASES[release] if found["kind"] == kind
    }


def pod_template_of(manifest: Manifest) -> Manifest | None:
    """Return the pod template of a workload; None for other kinds."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        spec = replicated["template"]["spec"]
    elif kind not in ("Deployment", "StatefulSet", "Job"):
        return None
    template: Manifest = spec["template"]
    return template


def pods() -> Iterator[tuple[str, Manifest, Manifest]]:
    """Return every workload with its name for a test and its pod template."""
    for release, manifests in RELEASES.items():
        for manifest in manifests:
            if (template := pod_template_of(manifest)) is not None:
                yield f"{release}:{manifest['metadata']['name']}", manifest, template


def role_of(template: Manifest) -> str:
    """Return the role, or `kafka` or `prepare`, of a pod template."""
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])


def find_weaknesses(spec: Manifest) -> list[str]:
    """Return what a pod lacks or has too much of."""
    security = spec.get("securityContext", {})
    found = [
        name
        for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
        if spec.get(name)
    ]
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        found.append("may run as root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("seccomp")
    if spec.get("automountServiceAccountToken") is not False:
        found.append("service account's token")
    if spec.get("enableServiceLinks") is not False:
        found.append("service links")
    for volume in spec.get("volumes", []):
        if volume.keys() & {"hostPath"}:
            found.append(f"host path {volume['name']}")
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            found.append(f"no size of {volume['name']}")
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        found += _container_weaknesses(container)
    return found


def _container_weaknesses(container: Mapping[str, Any]) -> Iterator[str]:
    security, resources = container.get("securityContext", {}), container.get("resources", {})
    name = container["name"]
    if security.get("privileged") or security.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may gain privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{name} may write its root"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name} has capabilities"
    if "memory" not in resources.get("limits", {}):
        yield f"{name} has no limit of memory"
    if not {"cpu", "memory"} <= resources.get("requests", {}).keys():
        yield f"{name} requests nothing"
    if not re.search(r":[\w.-]+$", container["image"]) or container["image"].endswith(":latest"):
        yield f"{name} has no version"
    for variable in container.get("env", []):
        is_secret = re.search("PASSWORD|SECRET|TOKEN|_KEY$", variable["name"])
        if is_secret and not variable["name"].endswith("_FILE"):
            yield f"{name} has the secret {variable['name']}"
