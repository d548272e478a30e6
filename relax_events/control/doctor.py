"""Checks everything that a run needs, and starts nothing: each finding says what is wrong and what to do."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from relax_events.broker.credentials import as_principal
from relax_events.broker.embedded.java import find_java
from relax_events.broker.registry import RegistryClient
from relax_events.config import RunConfig
from relax_events.control.address import OPERATOR, embedded_broker, open_admin, with_bootstrap_servers
from relax_events.control.requirements import require_judge, require_metrics_ports, require_model, require_roles, require_teacher
from relax_events.control.scaling.server import require_api_port
from relax_events.control.topics.applying import plan_changes
from relax_events.data.judging import HookJudge, judges_length, length_judge
from relax_events.data.laying_out import answers_of
from relax_events.data.rendering import PromptRenderer
from relax_events.data.row_media import shown_messages
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.data.sources import evaluated_parts, named_parts, open_source
from relax_events.errors import CheckFailed, EnvironmentProblem, RelaxError
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.telemetry.traces import require_tracing
from relax_events.topics import TopicPlan

MIN_FREE_BYTES = 1024**3
PROBE = b"relax doctor"
NUM_MEASURED = 2000


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    is_good: bool
    text: str


def examine(config: RunConfig) -> list[Finding]:
    """Run every check; one that fails doesn't keep the others from running."""
    prompts = PromptCheck()
    checks: dict[str, Callable[[RunConfig], str]] = {
        "broker": check_broker,
        "schema registry": check_registry,
        "object store": check_store,
        "disk": check_disk,
        "model": require_model,
        "teacher": require_teacher,
        "judge": require_judge,
        "data": prompts.check_data,
        "reward": prompts.check_reward,
        "roles": require_roles,
        "metrics": require_metrics_ports,
        "traces": require_tracing,
        "scaling API": require_api_port,
    }
    return [_finding(what, check, config) for what, check in checks.items()]


def _finding(what: str, check: Callable[[RunConfig], str], config: RunConfig) -> Finding:
    try:
        return Finding(what, True, check(config))
    except RelaxError as error:
        return Finding(what, False, str(error))


def check_broker(config: RunConfig) -> str:
    """The cluster answers and its topics don't contradict the plan; or Java is there for the embedded broker."""
    broker = embedded_broker(config)
    if broker is not None and not broker.is_running:
        java = find_java()
        return f"embedded, not running; Java {java.major} at {java.executable}"
    reached = config if broker is None else with_bootstrap_servers(config, broker.bootstrap_servers)
    admin = open_admin(as_principal(reached, OPERATOR), name="doctor")
    plan = TopicPlan.of(config)
    changes = [change for change in plan_changes(plan.specs(), admin.topics(plan.topic(""))) if change.is_drift]
    if conflicts := [change for change in changes if change.kind == "conflict"]:
        raise CheckFailed(f"topic {conflicts[0].topic} {conflicts[0].detail}; take another run.id")
    return f"{reached.broker.bootstrap_servers} answers; {len(changes)} topic change(s) to apply"


def check_registry(config: RunConfig) -> str:
    """The schema registry answers, where the run has one."""
    if not config.broker.schema_registry:
        return "none: records carry their schema's fingerprint"
    return f"{config.broker.schema_registry} answers; it holds {RegistryClient.of(config.broker).num_subjects()} subject(s)"


def check_store(config: RunConfig) -> str:
    """The object store takes an object and gives it back."""
    store = ObjectStore.open(config.objects_uri, moved_from=config.objects.moved_from)
    reference = store.put_at("doctor/probe", PROBE)
    store.get(reference)
    store.delete(["doctor/probe"])
    return f"{config.objects_uri} can be written and read"


def check_disk(config: RunConfig) -> str:
    """The run's directory has room."""
    wanted = config.run.directory.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise EnvironmentProblem(
            f"{folder} has {free / 1e9:.2f} GB free, a run wants at least {MIN_FREE_BYTES / 1e9:.2f}; free some space or set run.directory"
        )
    return f"{free / 1e9:.0f} GB free in {folder}"


class PromptCheck:
    """Checks the prompts, and the reward function on the first of them."""

    def __init__(self) -> None:
        self._first: PromptRow | None = None

    def check_data(self, config: RunConfig) -> str:
        """The prompts can be opened (every row of a file is looked at), and the first one read; those of evaluations as well."""
        opened = [(part.source, open_source(part, seed=config.run.seed, section=section)) for section, part in named_parts(config.data)]
        self._first = opened[0][1].row(0)
        texts = [f"{source.rows} prompts in {name}{_left_out(source)}" for name, source in opened]
        if config.data.hook:
            place = HookJudge(config.data.hook)(self._first, mean_rewards=(), train_step=0)
            texts.append(f"{config.data.hook} gives {place} for the first")
        texts += [text for _, source in opened if (text := _lengths(config, source))]
        if not config.algorithm.has_rewards and config.model.path.exists():
            texts.append(_answers(config, self._first))
        for section, part in evaluated_parts(config):
            source = open_source(part, seed=config.run.seed, section=section)
            texts.append(f"{source.rows} to evaluate {part.name} on{_left_out(source)}")
        return "; ".join(texts)

    def check_reward(self, config: RunConfig) -> str:
        """The reward function loads, and scores the reference answer of the first prompt in time."""
        if not config.algorithm.has_rewards and not config.evaluation.datasets:
            return f"algorithm {config.algorithm.name} needs none"
        tried = self._tried(config)
        own = [part.reward for part in config.evaluation.datasets if part.reward is not None]
        for reward in own:
            RewardPool(reward).close()
        more = f"; {', '.join(reward.function for reward in own)} for evaluation loads" if own else ""
        return f"{tried}{more}"

    def _tried(self, config: RunConfig) -> str:
        if (computed := config.computed_reward) is None:
            return "the judge scores all samples"
        with RewardPool(computed) as pool:
            if self._first is None:
                raise CheckFailed(f"{computed.function} loads, but was not tried: there is no prompt to try it on; see data")
            if config.reward.source_of(orjson.loads(self._first.metadata)) in config.judged_sources:
                return f"{computed.function} loads; the first prompt is the judge's"
            prompt = "\n".join(message.text for message in self._first.messages)
            item = RewardItem("of-the-doctor", self._first.answer, answer=self._first.answer, metadata=self._first.metadata, prompt=prompt)
            result = pool.score_batch([item] * (2 if pool.takes_prompt_group else 1))[0]
        if isinstance(result, RelaxError):
            raise result
        return f"{computed.function} gives {result.reward:g} for the reference answer of the first prompt"


def _left_out(source: PromptSource) -> str:
    unfit = source.unfit
    return f", {unfit.count} unfit left out, first {unfit.named[0]}" if unfit.count else ""


def _answers(config: RunConfig, row: PromptRow) -> str:
    """Say how long the answers are that a row brings; raises PoisonSample where they can't be laid out."""
    answers = answers_of(row, renderer=PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media))
    return "the first brings " + " and ".join(f"{int(answer.loss_mask.sum())} tokens to learn" for answer in answers)


def _lengths(config: RunConfig, source: PromptSource) -> str:
    """Say how many of a source's first rows the length filters take; nothing without filters, or before there is a tokenizer."""
    if not judges_length(config.data) or not config.model.path.exists():
        return ""
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    judge = length_judge(renderer, config.data, messages_of=shown_messages(MediaLibrary(config)))
    rows = range(min(source.rows, NUM_MEASURED))
    reasons = Counter(verdict for row in rows if isinstance(verdict := judge(source.row(row), mean_rewards=(), train_step=0), str))
    passed_over = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(reasons.items())) or "none"
    return f"of its first {len(rows)} are passed over: {passed_over}"
