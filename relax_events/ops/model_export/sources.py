"""Opens the weights of a policy version: its artifact in the object store, or the trainer's
checkpoint of that version.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.history.runs.details import list_versions, open_existing_store
from relax_events.objects import ObjectStore
from relax_events.ops.model_export.versions import PublishedVersions, format_versions
from relax_events.training.checkpoint.checkpoint_files import CheckpointTensors
from relax_events.weights.artifact_files import (
    ArtifactTensors,
    digest_tensors,
)
from relax_events.weights.tensor_files import Tensors

log = structlog.get_logger()


class VersionLost(WeightsError):
    """Neither the weights nor a checkpoint of a version can be read; the text lists the versions
    that are left.
    """


@dataclass(frozen=True, slots=True)
class VersionWeights:
    """The verified weights of a version; `kind` is `weights` or `checkpoint`, `uri` that of the
    manifest. `base_digest` is that of the base model that they are adapters of; empty where they
    are a whole model's.
    """

    kind: str
    uri: str
    tensors: Tensors
    digest: bytes
    base_digest: bytes = b""


def open_weights(
    config: RunConfig, versions: PublishedVersions, version: int, folder: Path
) -> VersionWeights:
    """Open a version's weights and verify them: by the digest that the train step committed, or by
    the artifact's own if no step committed one.

    Args:
        config: The run.
        versions: Its versions on the log.
        version: A published version.
        folder: Where files are copied to; exists, and stays until the last tensor is read.
    Raises:
        ConfigError: The object store is not there.
        VersionLost: Neither artifact nor checkpoint is left as it was committed.
        EnvironmentProblem: The folder can't be written.
    """
    store = open_existing_store(config)
    if store is None:
        raise ConfigError(
            f"the object store {config.objects_uri} of run {config.run.id} is not on this machine; "
            "export on the machine that holds it, or give the run file with objects.uri"
        )
    problems = []
    try:
        return _open_artifact(store, versions, version, folder)
    except WeightsError as error:
        problems.append(str(error))
    if version in versions.checkpoints:
        try:
            return _open_checkpoint(store, config, versions, version, folder)
        except WeightsError as error:
            problems.append(str(error))
    raise VersionLost(_format_lost(store, versions, version, problems))


def _open_artifact(
    store: ObjectStore, versions: PublishedVersions, version: int, folder: Path
) -> VersionWeights:
    reference = versions.artifacts[version]
    tensors = ArtifactTensors(store, reference, folder)
    if tensors.policy_version != version:
        raise WeightsError(
            f"{reference.uri} was announced as policy version {version}, it holds "
            f"{tensors.policy_version}"
        )
    digest = _require_digest(
        tensors, versions.digests.get(version, tensors.digest), uri=reference.uri
    )
    return VersionWeights("weights", reference.uri, tensors, digest, tensors.base_digest)


def _open_checkpoint(
    store: ObjectStore,
    config: RunConfig,
    versions: PublishedVersions,
    version: int,
    folder: Path,
) -> VersionWeights:
    reference = versions.checkpoints[version]
    tensors = CheckpointTensors(store, reference, folder, dtype=str(config.model.dtype))
    log.info("checkpoint.opened", policy_version=version, uri=reference.uri)
    committed = versions.digests.get(version)
    digest = (
        digest_tensors(tensors)
        if committed is None
        else _require_digest(tensors, committed, uri=reference.uri)
    )
    return VersionWeights("checkpoint", reference.uri, tensors, digest, tensors.base_digest)


def _require_digest(tensors: Tensors, digest: bytes, *, uri: str) -> bytes:
    if (seen := digest_tensors(tensors)) != digest:
        raise WeightsError(
            f"{uri} can't be used: the digest of its weights must be {digest.hex()}, got "
            f"{seen.hex()}"
        )
    return digest


def _format_lost(
    store: ObjectStore, versions: PublishedVersions, version: int, problems: list[str]
) -> str:
    weights = set(list_versions(store, "weights/")) & versions.artifacts.keys()
    checkpoints = set(list_versions(store, "checkpoints/")) & versions.checkpoints.keys()
    return (
        f"version {version} of run {versions.run_id} can't be exported: {'; '.join(problems)}. "
        f"The store holds weights of versions {format_versions(weights)}, and checkpoints of "
        f"versions {format_versions(checkpoints)}; give one of them as --version. "
        "weights.keep_newest, weights.keep_every and weights.keep_best keep more"
    )
