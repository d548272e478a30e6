"""What environments, servers, judges and teachers need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_events.config.reward import JUDGED

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


def check_environment(config: RunConfig) -> Iterator[str]:
    """Give an environment that nothing talks with."""
    environment, algorithm = config.environment, config.algorithm
    if environment.harness.is_served and config.evaluation.datasets:
        yield (
            "evaluation.datasets need an environment of the run's own: no harness takes the "
            "sessions of an evaluation; leave them out, or environment.harness.port"
        )
    if environment.name and not algorithm.has_rewards:
        yield (
            f"environment {environment.name} is of no use to algorithm {algorithm.name}, which "
            "learns from answers that the data bring; leave it out"
        )
    if environment.name and not config.data.chat_template:
        yield (
            f"environment {environment.name} needs a chat template, which separates messages; "
            "leave data.chat_template out"
        )


def check_servers(config: RunConfig) -> Iterator[str]:
    """Give deadlines that are shorter than the start of a server."""
    stuck, engines = config.health.progress_timeout_seconds, {"engine": config.engine}
    for section, engine in (
        engines | {"judge.engine": config.judge.engine} if config.has_judge else engines
    ).items():
        if engine.name == "sglang" and stuck <= (
            needed := engine.sglang.stall_seconds + engine.sglang.start_seconds
        ):
            yield (
                f"health.progress_timeout_seconds must be above {needed:g}, got {stuck:g}: for "
                f"{section}.sglang.stall_seconds + start_seconds its server may be started again "
                "while samples wait; set health.progress_timeout_seconds"
            )


def check_teachers(config: RunConfig) -> Iterator[str]:
    """Give a distillation without a teacher, and a source with two."""
    section_of: dict[str, str] = {}
    for name, one in config.teachers.items():
        if one.model_path is None:
            yield f"teachers.{name} names no teacher; set teachers.{name}.model_path"
        for source in one.sources:
            if (other := section_of.setdefault(source, name)) != name:
                yield (
                    f"source {source!r} has two teachers, teachers.{other} and teachers.{name}; "
                    "leave it out of one"
                )
    if config.teacher.urls and config.teacher.model_path is None:
        yield (
            "teacher.urls needs the tokenizer of the teacher, which is compared with the policy's; "
            "set teacher.model_path"
        )
    if config.algorithm.distills and not config.is_replay and not config.list_teachers():
        yield (
            f"algorithm.distill_coefficient = {config.algorithm.distill_coefficient:g} needs a "
            "teacher; set teacher.model_path to the folder of its checkpoint, or "
            "algorithm.distill_coefficient = 0"
        )
    if served := next((name for name, one in config.list_teachers().items() if one.urls), None):
        yield from _check_served(config, served)


def _check_served(config: RunConfig, section: str) -> Iterator[str]:
    algorithm, temperature = config.algorithm, config.engine.sampling.temperature
    if algorithm.has_topk_loss and algorithm.distill_tokens != "teacher_topk":
        yield (
            f"{section}.urls: a server scores no given token ids, which algorithm.distill_tokens "
            f"= {algorithm.distill_tokens!r} needs; set it to 'sampled' or 'teacher_topk', or "
            "leave urls out"
        )
    if temperature != 1:
        yield (
            f"{section}.urls: a server scores at temperature 1, and policy and teacher are "
            f"compared at engine.sampling.temperature = {temperature:g}; set that to 1, or leave "
            "urls out"
        )


def check_judge(config: RunConfig) -> Iterator[str]:
    """Give a judge that no reward uses, and a second judge."""
    yield from _check_evaluations(config)
    if not config.has_judge:
        return
    reward = config.reward
    if not config.judged_sources and not config.judged_datasets:
        yield (
            f"judge.model_path is of no use with reward.function = {reward.function!r}, which "
            f"uses no judge; set reward.function = '{JUDGED}', or leave judge.model_path out"
        )
    if any("url" in reward.chosen[source].options for source in config.judged_sources):
        yield (
            "reward.options.url and judge.model_path name two judges; leave url out, and set "
            "judge.engine.sglang.urls to attach to servers of your own"
        )


def _check_evaluations(config: RunConfig) -> Iterator[str]:
    for dataset in config.evaluation.datasets:
        reward = dataset.reward or config.reward
        functions = {source for source, one in reward.chosen.items() if one.function == JUDGED}
        if not (judged := reward.judged_sources):
            continue
        if config.judge.model_path is None:
            yield (
                f"evaluation dataset {dataset.name} is scored by {JUDGED}, which needs a judge; "
                "set judge.model_path, or url in the options of its reward"
            )
        if judged != functions:
            yield (
                f"evaluation dataset {dataset.name} has two judges: {JUDGED} with options.url, and "
                "judge.model_path; take one of them for all its sources"
            )
