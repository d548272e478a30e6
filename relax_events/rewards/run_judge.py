"""Configure `genrm` for a run with a judge role: prompts, weights and reward version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from relax_events.config import ChosenReward, JudgeConfig, RewardConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.rewards import llm_judge
from relax_events.rewards.code_version import reward_digest
from relax_events.rewards.llm_judge import Grading, genrm, load_template
from relax_events.rewards.registry import check_options
from relax_events.rewards.scores import TOTAL

OPTIONS = ("template", "rubric", "max_score")
TAIL_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JudgeReward:
    """A reward computed by the judge role."""

    grading: Grading
    weights: Mapping[str, float]
    digest: str


def load_judge_rewards(
    config: RunConfig, evaluated: RewardConfig | None = None
) -> dict[str | None, JudgeReward]:
    """Load the judge rewards of each source that the judge scores; see `RewardConfig.chosen`.

    Args:
        config: The run.
        evaluated: The reward of an evaluation; by default that of the run's training.
    Raises:
        ConfigError: An option does not fit, or the judge model is missing.
    """
    chosen = (evaluated or config.reward).chosen
    sources = config.judged_sources if evaluated is None else evaluated.judged_sources
    gradings = {source: load_grading(chosen[source]) for source in sources}
    model = describe_judge_model(config.judge) if gradings else {}
    return {
        source: _build_judge_reward(chosen[source], grading, model)
        for source, grading in gradings.items()
    }


def load_grading(chosen: ChosenReward) -> Grading:
    """Build the grading prompt from the options of `genrm`.

    Raises:
        ConfigError: An option is unknown, of a wrong type, or only for a judge server.
    """
    options = check_options(genrm, chosen.function, chosen.options | {"url": ""})
    for name in options.keys() - {*OPTIONS, "url"}:
        raise ConfigError(
            f"reward.options.{name} configures a judge server, but judge.model_path gives "
            "the run its own judge; temperature and length are set in judge.engine.sampling; leave "
            "it out"
        )
    settings = {name: options[name] for name in OPTIONS if name in options}
    if "template" in settings:
        settings["template"] = load_template(settings["template"])
    return Grading(**settings)


def _build_judge_reward(
    chosen: ChosenReward, grading: Grading, model: Mapping[str, object]
) -> JudgeReward:
    if others := sorted(chosen.weights.keys() - {TOTAL}):
        raise ConfigError(
            f"reward.weights names {', '.join(others)}, and a judge returns only {TOTAL}; "
            "leave it out"
        )
    options = {**chosen.options, "judge": model}
    return JudgeReward(
        grading,
        chosen.weights,
        reward_digest(
            llm_judge, genrm.__name__, options=options, weights=chosen.weights, packages=()
        ),
    )


def describe_judge_model(config: JudgeConfig) -> dict[str, object]:
    """Return everything about a judge model that determines its rewards.

    For the model's files that is name, size and the last bytes: reading tens of gigabytes would
    delay every start, and a retrained model differs there.
    """
    folder = config.model_path
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"judge.model_path {folder} is not a folder; set it to a model folder in Hugging "
            "Face layout"
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
        **({} if config.media is None else {"media": config.media.model_dump()}),
    }


def _digest_of_end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        return sha256(file.read()).hexdigest()
