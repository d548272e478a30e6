"""What `genrm` is where the run has a judge of its own: how it is asked, and the version of its
rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from relax_events.config import ChosenReward, JudgeConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.rewards.code_version import reward_digest
from relax_events.rewards.registry import check_options
from relax_events.rewards.scores import TOTAL
from relax_events.rewards.verifiers import llm_judge as judge
from relax_events.rewards.verifiers.llm_judge import Grading, load_template

OPTIONS = ("template", "rubric", "max_score")
TAIL_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JudgeReward:
    """A reward that a judge gives."""

    grading: Grading
    weights: Mapping[str, float]
    digest: str


def load_judge_rewards(config: RunConfig) -> dict[str | None, JudgeReward]:
    """Return what the judge is asked about the samples of each source that it scores; see
    `RewardConfig.chosen`.

    Raises:
        ConfigError: An option does not fit, or the judging model is not there.
    """
    gradings = {
        source: load_grading(config.reward.chosen[source]) for source in config.judged_sources
    }
    model = describe_judge_model(config.judge) if gradings else {}
    return {
        source: _build_judge_reward(config.reward.chosen[source], grading, model)
        for source, grading in gradings.items()
    }


def load_grading(chosen: ChosenReward) -> Grading:
    """Return how a judge is asked, by the options of `genrm`.

    Raises:
        ConfigError: An option is unknown, of another type, or that of a server.
    """
    options = check_options(judge.genrm, chosen.function, chosen.options | {"url": ""})
    for name in options.keys() - {*OPTIONS, "url"}:
        remedy = "temperature and length stand in judge.engine.sampling; leave it out"
        raise ConfigError(
            f"reward.options.{name} is of a judge behind a server, and judge.model_path "
            f"gives the run one of its own; {remedy}"
        )
    given = {name: options[name] for name in OPTIONS if name in options}
    return Grading(
        **given | ({"template": load_template(given["template"])} if "template" in given else {})
    )


def _build_judge_reward(chosen: ChosenReward, grading: Grading, model: Mapping[str, object]) -> JudgeReward:
    if others := sorted(chosen.weights.keys() - {TOTAL}):
        raise ConfigError(
            f"reward.weights names {', '.join(others)}, and a judge gives {TOTAL} alone; "
            "leave it out"
        )
    options = {**chosen.options, "judge": model}
    return JudgeReward(
        grading,
        chosen.weights,
        reward_digest(
            judge, judge.genrm.__name__, options=options, weights=chosen.weights, packages=()
        ),
    )


def describe_judge_model(config: JudgeConfig) -> dict[str, object]:
    """Return all of a judge that decides its rewards.

    Of the model's files the names, sizes and ends count: reading tens of gigabytes would hold up
    every start, and another training of the same model differs there.
    """
    folder = config.model_path
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"judge.model_path {folder} is no folder; give one in Hugging Face layout"
        )
    files = {
        path.name: [path.stat().st_size, _digest_of_end(path)]
        for path in sorted(folder.iterdir())
        if path.suffix in (".safetensors", ".json")
    }
    return {
        "files": files,
        "sampling": config.engine.sampling.model_dump(),
        "chat_template_options": config.chat_template_options,
        "dtype": config.dtype,
        "on_parse_error": config.on_parse_error,
    }


def _digest_of_end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        return sha256(file.read()).hexdigest()
