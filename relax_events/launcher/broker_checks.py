"""Checks of the broker and of other services: topics, schema registry, object store, and whether
the model is the one whose weights the run has published, by names and shapes; no tensor is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing

import structlog

from relax_events.config import RunConfig
from relax_events.controller.scaling_bounds import require_rollout_capacity
from relax_events.errors import CheckFailed, ConfigError, ObjectError, WeightsError
from relax_events.events.types import PolicyVersionPublished
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.java import find_java
from relax_events.kafka.embedded.settings import SHARE_GROUP_SIZE as EMBEDDED_SHARE_GROUP_SIZE
from relax_events.kafka.leases import read_share_group_size
from relax_events.kafka.schema_registry import RegistryClient, open_codec
from relax_events.launcher.checked_run import CheckedRun
from relax_events.model_folder.tensors import read_layouts
from relax_events.models.base_digest import compute_base_digest
from relax_events.objects import ObjectStore
from relax_events.ops.dependent_runs import describe_dependent_runs
from relax_events.ops.schemas import find_other_ids
from relax_events.ops.topic_apply import plan_changes
from relax_events.runtime.control_follower import ControlFollower
from relax_events.session.broker_address import open_admin
from relax_events.session.resume import read_last_session, refuse_new_topics
from relax_events.topics import TopicPlan
from relax_events.weights.manifest import WeightManifest

PROBE = b"relax doctor"
log = structlog.get_logger()
LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")
Shape = tuple[int, ...]


def check_broker(run: CheckedRun) -> str:
    """Check that the cluster answers and its topics don't contradict the plan; or that Java is
    installed for the embedded broker.
    """
    config = run.config
    if run.has_stopped_broker:
        java = find_java()
        lanes = require_rollout_capacity(config, EMBEDDED_SHARE_GROUP_SIZE)
        return f"embedded, not running; Java {java.major} at {java.executable}; {lanes}"
    admin = open_admin(run.operator_config, name="doctor")
    plan = TopicPlan.from_config(config)
    changes = [
        change
        for change in plan_changes(plan.specs(), admin.topics(plan.topic("")))
        if change.is_drift
    ]
    if conflicts := [change for change in changes if change.kind == "conflict"]:
        raise CheckFailed(f"topic {conflicts[0].topic} {conflicts[0].detail}; take another run.id")
    refuse_new_topics(run.operator_config, read_last_session(run.operator_config))
    lanes = require_rollout_capacity(config, read_share_group_size(admin))
    return (
        f"{run.operator_config.broker.bootstrap_servers} answers; {len(changes)} topic change(s) "
        f"to apply; {lanes}"
    )


def check_registry(run: CheckedRun) -> str:
    """Check that the schema registry answers, where the run has one, and that it has the run's
    schemas under the ids on the log, which other clients look up there.
    """
    broker = run.config.broker
    if not broker.schema_registry:
        return "none: records carry their schema's fingerprint"
    registry = RegistryClient.from_config(broker)
    num_subjects, others = registry.count_subjects(), list[int]()
    if not run.has_stopped_broker:
        with closing(open_admin(run.operator_config, name="doctor")) as admin:
            others = find_other_ids(run.operator_config, admin, registry)
    if others:
        raise CheckFailed(
            f"{broker.schema_registry} has other schemas, or none, under {len(others)} id(s) of "
            f"this run's log, the first is {others[0]}: Confluent's clients that use it misread "
            "the run, the run itself continues by the ids on its log; point broker.schema_registry "
            "to the registry that the run began with"
        )
    return f"{broker.schema_registry} answers; it holds {num_subjects} subject(s)"


def check_store(run: CheckedRun) -> str:
    """Check that the object store can be written and read."""
    uri = run.config.objects_uri
    store = ObjectStore.open(uri, uri_aliases=run.config.objects.uri_aliases)
    reference = store.put_at("doctor/probe", PROBE)
    store.get(reference)
    store.delete(["doctor/probe"])
    return f"{uri} can be written and read"


def check_dependent_runs(run: CheckedRun) -> str:
    """Check that runs which replay this one find the records that they still need."""
    if run.config.is_replay:
        return "none: the run is a replay"
    if run.has_stopped_broker:
        return "not looked for: the embedded broker does not run"
    return describe_dependent_runs(run.operator_config)


def check_weights(run: CheckedRun) -> str:
    """Check that the model is the one whose weights the run has published."""
    if run.has_stopped_broker:
        return "not compared with the model: the embedded broker does not run"
    config = run.operator_config
    topic = TopicPlan.from_config(config).topic("control.policy-versions")
    is_there = topic in open_admin(config, name="doctor").topics(topic)
    return require_fitting_model(config, read_newest_version(config) if is_there else None)


def require_fitting_model(config: RunConfig, newest: PolicyVersionPublished | None) -> str:
    """Return what was compared, once `model.path` holds the model whose weights the run has
    published.

    Args:
        config: The run.
        newest: The run's newest version; None before the first.
    Raises:
        ConfigError: A tensor has another shape, or the number of layers differs; the text names
            both.
        DamagedTensors: A file of the weights is damaged; the text names it.
    """
    path = config.model.path
    if newest is None or not path.exists():
        return (
            "nothing to compare: the run has published no weights"
            if newest is None
            else f"nothing to compare: {path} will be made by the run"
        )
    try:
        manifest = WeightManifest.from_json(
            ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases).get(
                newest.artifact
            )
        )
    except (
        ObjectError,
        WeightsError,
    ) as error:  # the roles that load the weights report it, if they need them
        log.warning(
            "weights.comparison_skipped", policy_version=newest.policy_version, error=str(error)
        )
        return f"not compared with policy version {newest.policy_version}: {error}"
    if manifest.base_digest:
        _require_base(config, manifest)
        return f"{path} is the base model of policy version {newest.policy_version}'s adapters"
    trained = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    shapes = {name: layout.shape for name, layout in read_layouts(path).items()}
    if difference := find_difference(shapes, trained):
        raise ConfigError(
            f"model.path {path} is not the model of run {config.run.id}: {difference} in policy "
            f"version {newest.policy_version}; set model.path to the model that the run began "
            "with, or take another run.id"
        )
    return f"{path} fits policy version {newest.policy_version}"


def _require_base(config: RunConfig, manifest: WeightManifest) -> None:
    """Require the base model that a version's adapters were trained on.

    Raises:
        ConfigError: `model.path` holds another one.
    """
    path = config.model.path
    if (seen := compute_base_digest(path)) != manifest.base_digest:
        raise ConfigError(
            f"model.path {path} is not the base model of run {config.run.id}'s adapters: its "
            f"digest is {seen.hex()}, policy version {manifest.policy_version} names "
            f"{manifest.base_digest.hex()}; set model.path to the model that the run began with"
        )


def read_newest_version(config: RunConfig) -> PolicyVersionPublished | None:
    """Return the newest version on the log of a run whose topics exist.

    Args:
        config: The run, with the broker's address and the principal filled in.
    Raises:
        BrokerError: The log can't be read.
    """
    follower = ControlFollower(
        Connection.from_config(config.broker, client_id=f"{config.run.id}.weights"),
        TopicPlan.from_config(config),
        open_codec(config.broker),
    )
    try:
        return follower.latest
    finally:
        follower.close()


def find_difference(model: Mapping[str, Shape], trained: Mapping[str, Shape]) -> str:
    """Return the first difference between a model's folder and trained weights; empty where there
    is none.

    Only tensors that both name are compared: a folder may keep experts one by one, or parts that
    are not trained.

    Args:
        model: Shapes in the folder, by name.
        trained: Shapes of the trained weights, by name.
    """
    for name in sorted(model.keys() & trained.keys()):
        if model[name] != trained[name]:
            return f"{name} is {list(model[name])} there and {list(trained[name])}"
    theirs, ours = _num_layers(model), _num_layers(trained)
    for name in sorted(theirs.keys() & ours.keys()):
        if theirs[name] != ours[name]:
            return f"{name} has {theirs[name]} layers there and {ours[name]}"
    return ""


def _num_layers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers by the prefix of their names."""
    num_layers: dict[str, int] = {}
    for name in names:
        if match := LAYER.match(name):
            num_layers[match[1]] = max(num_layers.get(match[1], 0), int(match[2]) + 1)
    return num_layers
