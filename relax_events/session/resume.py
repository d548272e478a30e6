"""Resumes a run with the run file that it was started with, or with changes that the user has
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import sha256
from itertools import pairwise

import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.config.resume_rules import Rule
from relax_events.config.session_changes import Change, changes_between, find_rule
from relax_events.config.unset_keys import missing_keys
from relax_events.data.rendering import read_run_template
from relax_events.errors import ConfigError
from relax_events.events.types import RunDescribed
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.models.checkpoint_facts import require_fetched
from relax_events.runtime.run_description import (
    ParentRun,
    build_run_description,
    read_described_config,
    read_description,
)
from relax_events.session.broker_address import open_admin
from relax_events.session.defaults import keep_commits, log_derived, resolve_defaults
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS, TRAIN_STEPS

log = structlog.get_logger()
TEMPLATE_KEY = "data.chat_template_file"
WITHOUT_MODEL = frozenset({"reward", "metrics"})
"""Roles that don't need the model, and may run where it is missing."""


class ChangesNotAccepted(ConfigError):
    """The run file has changed since the run's last session in a way that changes what is
    trained.
    """


def read_last_session(config: RunConfig) -> RunDescribed | None:
    """Return the log's description of the run's last session; None for a run without one.

    Args:
        config: The wanted run, with the broker's address filled in.
    Raises:
        BrokerError: The log can't be read.
    """
    plan = TopicPlan.from_config(config)
    with closing(open_admin(config, name="run")) as admin:
        if plan.topic(COMMANDS) not in admin.topics(plan.topic("")):
            return None
    with closing(
        LogReader(Connection.from_config(config.broker, client_id=f"{config.run.id}.run"))
    ) as reader:
        return read_description(reader, config.run.id)


def known_settings(config: RunConfig, described: RunDescribed | None) -> RunConfig | None:
    """Return the settings that fill in the keys that the run file leaves out: those of the run's
    last session, or of its parent.
    """
    if described is None:
        return (
            ParentRun.read(
                Connection.from_config(config.broker, client_id=f"{config.run.id}.source"),
                config.parent.run,
            ).config
            if config.parent.run
            else None
        )
    with suppress(ConfigError):  # of a release that this one can't read: `changes_since` says so
        return read_described_config(described, run_id=config.run.id)
    return None


def resolve_worker_config(config: RunConfig, role: str) -> RunConfig:
    """Return the configuration of a worker that is started by itself, with the keys that its run
    file leaves out, and the commits of what it names on the hub.

    Args:
        config: The run, with the broker's address filled in; a file that `relax run` has written is
            complete already.
        role: The worker's.
    Raises:
        ConfigError: A key is derived from the model, which is not here; the text names both. Or the
            model was not fetched from the hub.
    """
    if not missing_keys(config) and not config.unpinned_names:
        return config
    earlier_config = known_settings(config, read_last_session(config))
    config = keep_commits(config, earlier_config)
    if role not in WITHOUT_MODEL:
        require_fetched(config.model.path, key="model.path")
    whole, derived = resolve_defaults(config, earlier_config=earlier_config, role=role)
    log_derived(derived)
    if role not in WITHOUT_MODEL and (
        unknown := [
            key
            for key in missing_keys(whole)
            if not key.startswith(("judge.", "teacher.", "teachers."))
        ]
    ):
        raise ConfigError(
            f"{unknown[0]} is derived from the model, and model.path {config.model.path} is not "
            f"here; set {unknown[0]} in the run file, or give the process the folder"
        )
    return whole


def find_changes(described: RunDescribed, config: RunConfig) -> list[Change]:
    """Return the differences between the log's description of a run and the wanted configuration;
    nothing where the description is of an unreadable release.
    """
    try:
        old = read_described_config(described, run_id=config.run.id, reader_config=config)
    except ConfigError as error:
        log.warning("run_description.decode_failed", run_id=config.run.id, error=str(error))
        return []
    trees = (orjson.loads(build_run_description(one).config) for one in (old, config))
    return changes_between(old, config, old_tree=next(trees), new_tree=next(trees))


def refuse_new_topics(config: RunConfig, described: RunDescribed | None) -> None:
    """Refuse a run whose topics are not those that its log describes, before anything starts.

    Raises:
        ConfigError: A topic was deleted, or created again under its name; the text has both ids, or
            names the train steps that nothing describes.
        BrokerError: The topics can't be described.
    """
    plan = TopicPlan.from_config(config)
    steps = plan.topic(TRAIN_STEPS)
    with closing(open_admin(config, name="run")) as admin:
        if described is not None:
            require_same_topics(config, described, admin.topic_ids(described.topic_ids))
        elif sum(admin.end_offsets((one.topic, 0) for one in admin.partitions(steps)).values()):
            raise ConfigError(
                f"topic {steps} has records, and topic {plan.topic(COMMANDS)} does not describe "
                f"run {config.run.id}: it was deleted, or created again under its name; take "
                f"another run.id, or delete this run by relax runs delete {config.run.id}"
            )


def require_same_topics(
    config: RunConfig, described: RunDescribed, topic_ids: Mapping[str, str]
) -> None:
    """Require that a run's topics are those that its log describes.

    Args:
        config: The run.
        described: The newest description on its log. In a copy of a log, as an import makes it, its
            ids are those of other topics, the log's own among them.
        topic_ids: Of the topics that are there, by name.
    Raises:
        ConfigError: One was deleted, or created again under its name; the text has both ids.
    """
    logged, commands = described.topic_ids, TopicPlan.from_config(config).topic(COMMANDS)
    if logged.get(commands) != topic_ids.get(commands):
        return
    changed = [name for name in sorted(logged) if topic_ids.get(name) != logged[name]]
    if not changed:
        return
    name = changed[0]
    state = f"got {topic_ids[name]}" if name in topic_ids else "and there is no such topic"
    raise ConfigError(
        f"topic {name} is not the one that run {config.run.id} has written to: its id must be "
        f"{logged[name]} as on the log, {state} ({len(changed)} such topics). Its records are "
        f"lost; continue from the newest weights by relax runs fork {config.run.id} NEW_ID, or "
        "take another run.id"
    )


def find_template_changes(described: RunDescribed, config: RunConfig) -> list[Change]:
    """Return the change of the chat template's text since the run's last session; its file may have
    the same name.

    Raises:
        ConfigError: The template can't be read.
    """
    old, new = described.chat_template, read_run_template(config.data, config.model.path)
    if not old or not new or old == new:
        return []
    on_resume = find_rule(TEMPLATE_KEY)
    before, after = (f"text {sha256(text.encode()).hexdigest()[:12]}" for text in (old, new))
    return [Change(TEMPLATE_KEY, before, after, on_resume.rule, on_resume.effect)]


def refuse_changes(run_id: str, changes: Sequence[Change], *, is_accepted: bool) -> None:
    """Refuse changes that a run can't continue with, and changes of the training unless they were
    accepted.

    Args:
        run_id: The run.
        changes: Since its last session.
        is_accepted: Whether the user has accepted the changes of what is trained.
    Raises:
        ConfigError: A run can't continue with a change; the text names all, and the command of a
            fork.
        ChangesNotAccepted: The others change what is trained.
    """
    if fixed := [change for change in changes if change.rule is Rule.NEVER]:
        keys = " ".join(
            f"{change.key}={_argument(change.new)}" for change in fixed if change.key != "roles"
        )
        remedy = (
            "keep them as they were, or start a run of its own from this one's weights: relax "
            f"runs fork {run_id} NEW_ID {keys}"
        ).rstrip()
        raise ConfigError(
            f"run {run_id} can't continue with these changes of its run file; "
            f"{remedy}\n{format_changes(fixed)}"
        )
    if not is_accepted and (
        needing_consent := [change for change in changes if change.rule is Rule.ACCEPTED]
    ):
        raise ChangesNotAccepted(
            f"these changes of the run file change what run {run_id} trains from here on; give "
            "--accept-changes to continue with them, keep them as they were, or fork the run "
            f"(relax runs fork)\n{format_changes(needing_consent)}"
        )


def format_changes(changes: Iterable[Change]) -> str:
    """Return a line for each change, with its reason."""
    return "\n".join(f"  {change}  ({change.reason})" for change in changes)


def settings_history(
    descriptions: Sequence[RunDescribed], *, run_id: str
) -> list[tuple[int, list[Change]]]:
    """Return what changed in a run file between a run's sessions, each time with the policy version
    from which on it holds.
    """
    history = []
    for old, new in pairwise(descriptions):
        with suppress(
            ConfigError
        ):  # of a release that this one can't read: `RunSummary.config` says so
            if changes := find_changes(old, read_described_config(new, run_id=run_id)):
                history.append((new.from_version or 0, changes))
    return history


def _argument(value: object) -> str:
    text = orjson.dumps(value).decode() if isinstance(value, list | bool) else str(value)
    return f"'{text}'" if any(sign in text for sign in ' "[]()$*?') else text
