"""The doctor: checks everything that a run needs, and starts nothing. Each finding names the
problem and the remedy.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import orjson

from relax_events.attacks.isolation_check import check_isolation
from relax_events.config import RunConfig
from relax_events.config.broker_addresses import EMBEDDED
from relax_events.confinement.profiles import describe_missing
from relax_events.controller.rollout_capacity import read_share_group_size, require_rollout_capacity
from relax_events.data.prompt_filter import FunctionFilter, build_length_filter, needs_token_counts
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow, PromptSource, build_checking_reader
from relax_events.data.sft_targets import tokenize_targets
from relax_events.data.sources import named_evaluation_datasets, named_sources, open_source
from relax_events.errors import CheckFailed, ConfigError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded.java import find_java
from relax_events.kafka.embedded.settings import SHARE_GROUP_SIZE as EMBEDDED_SHARE_GROUP_SIZE
from relax_events.kafka.schema_registry import RegistryClient
from relax_events.launcher.requirements import REQUIREMENTS, require_context_length
from relax_events.launcher.weights_fit import read_newest_version, require_fitting_model
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.ops.dependent_runs import describe_dependent_runs
from relax_events.ops.topic_apply import plan_changes
from relax_events.planning.derived import Derived
from relax_events.planning.inventory import get_value_bytes
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.session.broker_address import (
    OPERATOR,
    embedded_broker,
    open_admin,
    with_broker_address,
)
from relax_events.session.defaults import read_checkpoint_facts, read_resolved, resolve_defaults
from relax_events.session.planned import require_devices
from relax_events.session.principals import apply_principal
from relax_events.topics import TopicPlan

MIN_FREE_BYTES = 1024**3
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weights in float32 and AdamW's two moments."""
LOG_BYTES_PER_TOKEN = 48
"""Bytes of a token on all topics of a run together: 0.4 GB for 1,024 samples of 8,192 tokens,
without routed experts and top tokens."""
PROBE = b"relax doctor"
NUM_MEASURED = 2000
PROGRAM_REWARD = "code"
"""The reward that runs programs that the model wrote."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    is_good: bool
    text: str


def run_checks(config: RunConfig) -> list[Finding]:
    """Run every check on a run whose defaults are resolved; a failed check does not stop the
    others.
    """
    prompts = PromptCheck()
    checks: dict[str, Callable[[RunConfig], str]] = {
        "broker": check_broker,
        "schema registry": check_registry,
        "object store": check_store,
        "disk": check_disk,
        "weights": check_weights,
        "followers": check_dependent_runs,
        **REQUIREMENTS,
        "data": prompts.check_data,
        "room": partial(require_context_length, num_rows=NUM_MEASURED, with_generated=True),
        "reward": prompts.check_reward,
        "walls": check_walls,
        "devices": require_devices,
    }
    return [_finding(what, check, config) for what, check in checks.items()]


def run_checks_with_defaults(config: RunConfig) -> tuple[list[Finding], list[Derived]]:
    """Run every check on a run file as it was read; return also the values derived for the keys
    that it leaves out.
    """
    try:
        settings, derived = resolve_defaults(config, earlier_config=read_resolved(config))
    except ConfigError as error:  # no other check is possible without the model
        return [Finding("model", False, str(error))], []
    return run_checks(settings), derived


def _finding(what: str, check: Callable[[RunConfig], str], config: RunConfig) -> Finding:
    try:
        return Finding(what, True, check(config))
    except ModuleNotFoundError as error:
        return Finding(
            what,
            True,
            (
                f"not checked: {error.name} is not installed here; run relax doctor where the "
                "model runs too"
            ),
        )
    except RelaxError as error:
        return Finding(what, False, str(error))


def check_broker(config: RunConfig) -> str:
    """Check that the cluster answers and its topics don't contradict the plan; or that Java is
    installed for the embedded broker.
    """
    broker = embedded_broker(config)
    if broker is not None and not broker.is_running:
        java = find_java()
        lanes = require_rollout_capacity(config, EMBEDDED_SHARE_GROUP_SIZE)
        return f"embedded, not running; Java {java.major} at {java.executable}; {lanes}"
    reached = config if broker is None else with_broker_address(config, broker)
    admin = open_admin(apply_principal(reached, OPERATOR), name="doctor")
    plan = TopicPlan.from_config(config)
    changes = [
        change
        for change in plan_changes(plan.specs(), admin.topics(plan.topic("")))
        if change.is_drift
    ]
    if conflicts := [change for change in changes if change.kind == "conflict"]:
        raise CheckFailed(f"topic {conflicts[0].topic} {conflicts[0].detail}; take another run.id")
    lanes = require_rollout_capacity(config, read_share_group_size(config, admin))
    return (
        f"{reached.broker.bootstrap_servers} answers; {len(changes)} topic change(s) to apply; "
        f"{lanes}"
    )


def check_weights(config: RunConfig) -> str:
    """Check that the model is the one whose weights the run has published."""
    broker = embedded_broker(config)
    if broker is not None and not broker.is_running:
        return "not compared with the model: the embedded broker does not run"
    reached = apply_principal(
        config if broker is None else with_broker_address(config, broker), OPERATOR
    )
    topic = TopicPlan.from_config(config).topic("control.policy-versions")
    is_there = topic in open_admin(reached, name="doctor").topics(topic)
    return require_fitting_model(config, read_newest_version(reached) if is_there else None)


def check_dependent_runs(config: RunConfig) -> str:
    """Check that runs which replay this one find the records that they still need."""
    broker = embedded_broker(config)
    if config.is_replay or (broker is not None and not broker.is_running):
        return (
            "none: the run is a replay"
            if config.is_replay
            else "not looked for: the embedded broker does not run"
        )
    return describe_dependent_runs(
        apply_principal(config if broker is None else with_broker_address(config, broker), OPERATOR)
    )


def check_walls(config: RunConfig) -> str:
    """Check the sandbox of programs that the model wrote, and say what the kernel lacks to confine
    verifiers and readers of untrusted files.
    """
    missing = describe_missing()
    confinement = (
        f"this kernel can't restrict {missing} of verifiers and readers of untrusted files; run "
        "untrusted data on another machine"
        if missing
        else "verifiers and readers of untrusted files are confined"
    )
    return f"{_check_sandbox(config)}; {confinement}"


def _check_sandbox(config: RunConfig) -> str:
    """Try known escapes from the sandbox, where rewards run programs."""
    options = [
        one.options for one in config.reward.chosen.values() if one.function == PROGRAM_REWARD
    ]
    if not options:
        return "no reward runs programs"
    return check_isolation(
        allow_unprotected=all(one.get("allow_unprotected") is True for one in options)
    )


def check_registry(config: RunConfig) -> str:
    """Check that the schema registry answers, where the run has one."""
    if not config.broker.schema_registry:
        return "none: records carry their schema's fingerprint"
    return (
        f"{config.broker.schema_registry} answers; it holds "
        f"{RegistryClient.from_config(config.broker).count_subjects()} subject(s)"
    )


def check_store(config: RunConfig) -> str:
    """Check that the object store can be written and read."""
    store = ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases)
    reference = store.put_at("doctor/probe", PROBE)
    store.get(reference)
    store.delete(["doctor/probe"])
    return f"{config.objects_uri} can be written and read"


def check_disk(config: RunConfig) -> str:
    """Check that the run's directory has enough space."""
    run_folder = config.run.directory.absolute()
    folder = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    free, least = shutil.disk_usage(folder).free, MIN_FREE_BYTES + _stored_bytes(config)
    if free < least:
        raise EnvironmentProblem(
            f"{folder} has {free / 1e9:.2f} GB free, a run wants at least {least / 1e9:.2f}; free "
            "some space or set run.directory"
        )
    return f"{free / 1e9:.0f} GB free in {folder}{_growth(config)}"


def _stored_bytes(config: RunConfig) -> int:
    """Return the size of checkpoints and weight versions in the run's own folder; 0 where they are
    stored elsewhere, or the model is not here yet.
    """
    facts = (
        read_checkpoint_facts(config).get("model")
        if not config.objects.uri and config.model.path.exists()
        else None
    )
    if facts is None or config.model.dtype is None:
        return 0
    checkpoints = (
        (config.trainer.keep_checkpoints + 1)
        * facts.num_parameters
        * CHECKPOINT_BYTES_PER_PARAMETER
    )
    return checkpoints + (config.run.max_staleness + 2) * facts.num_parameters * get_value_bytes(
        config.model.dtype
    )


def _growth(config: RunConfig) -> str:
    """Describe the maximum growth of the log, where the run file keeps all of it and the broker's
    disk is this one.
    """
    if (
        config.run.retain_versions
        or config.is_replay
        or config.broker.bootstrap_servers != EMBEDDED
        or not config.engine.max_context_tokens
    ):
        return ""
    step = (
        config.run.prompts_per_step
        * config.run.samples_per_prompt
        * config.engine.max_context_tokens
        * LOG_BYTES_PER_TOKEN
    )
    total = step * config.num_train_steps
    return (
        f"; the log keeps all records and grows by up to {step / 1e9:.3g} GB a step, "
        f"{total / 1e9:.3g} GB in all (run.retain_versions bounds it)"
    )


NO_PROMPTS = "none needed: a replay trains what was generated and scored before"


class PromptCheck:
    """Checks the prompts, and the reward function on the first of them."""

    def __init__(self) -> None:
        self._first: PromptRow | None = None

    def check_data(self, config: RunConfig) -> str:
        """Check that the prompts can be opened, every row of a file included, and that the first
        one can be read; prompts of evaluations as well.
        """
        if (
            config.is_replay
        ):  # the rest of its run file comes from the parent's log, and is not used
            return "; ".join(self._evaluated(config)) or NO_PROMPTS
        opened = [
            (part.source, open_source(part, seed=config.run.seed, section=section))
            for section, part in named_sources(config.data)
        ]
        self._first = opened[0][1].row(0)
        texts = [
            f"{source.num_rows} prompts in {name}{_left_out(source)}" for name, source in opened
        ]
        if config.data.prompt_filter:
            topic_partition = FunctionFilter(config.data.prompt_filter)(
                self._first, mean_rewards=(), train_step=0
            )
            texts.append(f"{config.data.prompt_filter} gives {topic_partition} for the first")
        texts += [text for _, source in opened if (text := _lengths(config, source))]
        if not config.algorithm.has_rewards and config.model.path.exists():
            texts.append(_answers(config, self._first))
        return "; ".join([*texts, *self._evaluated(config)])

    def _evaluated(self, config: RunConfig) -> Iterator[str]:
        for section, part in named_evaluation_datasets(config.evaluation):
            source = open_source(part, seed=config.run.seed, section=section)
            self._first = self._first or source.row(0)
            yield f"{source.num_rows} to evaluate {part.name} on{_left_out(source)}"

    def check_reward(self, config: RunConfig) -> str:
        """Check that the reward function loads, and scores the reference answer of the first prompt
        in time.
        """
        if not config.algorithm.has_rewards and not config.evaluation.datasets:
            return f"algorithm {config.algorithm.name} needs none"
        if config.is_replay and not config.evaluation.datasets:
            return NO_PROMPTS
        tried = self._tried(config)
        evaluation_rewards = [
            part.reward for part in config.evaluation.datasets if part.reward is not None
        ]
        for reward in evaluation_rewards:
            RewardPool(reward).close()
        more = (
            f"; {', '.join(reward.function for reward in evaluation_rewards)} for evaluation loads"
            if evaluation_rewards
            else ""
        )
        return f"{tried}{more}"

    def _tried(self, config: RunConfig) -> str:
        if (computed := config.computed_reward) is None:
            return "the judge scores all samples"
        with RewardPool(computed) as pool:
            if self._first is None:
                raise CheckFailed(
                    f"{computed.function} loads, but was not tried: there is no prompt to "
                    "try it on; see data"
                )
            if (
                config.reward.find_source(orjson.loads(self._first.metadata))
                in config.judged_sources
            ):
                return f"{computed.function} loads; the first prompt is the judge's"
            prompt = "\n".join(message.text for message in self._first.messages)
            item = RewardItem(
                "of-the-doctor",
                self._first.answer,
                answer=self._first.answer,
                metadata=self._first.metadata,
                prompt=prompt,
            )
            result = pool.score_batch([item] * (2 if pool.takes_prompt_group else 1))[0]
        if isinstance(result, RelaxError):
            raise result
        return (
            f"{computed.function} gives {result.reward:g} for the reference answer of the first "
            "prompt"
        )


def _left_out(source: PromptSource) -> str:
    invalid = source.invalid_rows
    return (
        f", {invalid.count} invalid left out, first {invalid.examples[0]}" if invalid.count else ""
    )


def _answers(config: RunConfig, row: PromptRow) -> str:
    """Say how long the answers are that a row brings; raises PoisonSample where they can't be laid
    out.
    """
    answers = tokenize_targets(
        row,
        renderer=PromptRenderer.from_folder(
            config.model.path, config.data, media=config.model.media
        ),
    )
    return "the first brings " + " and ".join(
        f"{int(answer.loss_mask.sum())} tokens to learn" for answer in answers
    )


def _lengths(config: RunConfig, source: PromptSource) -> str:
    """Say how many of a source's first rows the length filters take; nothing without filters, or
    before there is a tokenizer.
    """
    if not needs_token_counts(config.data) or not config.model.path.exists():
        return ""
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    length_filter = build_length_filter(
        renderer, config.data, read_messages=build_checking_reader(MediaLibrary(config))
    )
    rows = range(min(source.num_rows, NUM_MEASURED))
    reasons = Counter(
        verdict
        for row in rows
        if isinstance(verdict := length_filter(source.row(row), mean_rewards=(), train_step=0), str)
    )
    passed_over = (
        ", ".join(
            f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(reasons.items())
        )
        or "none"
    )
    return f"of its first {len(rows)} are passed over: {passed_over}"
