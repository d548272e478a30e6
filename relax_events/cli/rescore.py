"""`relax rescore`: another reward function over old samples."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from relax_events.cli.parameters import Output, Overrides, RewardOptions, RunFile, Versions

if TYPE_CHECKING:
    from relax_events.config import RewardConfig, RunConfig
    from relax_events.history.samples.rescoring import RescoringProgress
    from relax_events.history.samples.score_comparison import Comparison

LINE_SECONDS = 5.0
CHECK_FOUND = 6


def rescore(
    config: RunFile,
    *overrides: Overrides,
    reward: str,
    option: RewardOptions = None,
    name: str | None = None,
    version: Versions = "",
    workers: int | None = None,
    threshold: float = 0.5,
    fail_below: float | None = None,
    output: Output = "table",
) -> int:
    """Run another reward function over a run's samples, keep its scores on a topic of their own,
    and compare the two.

    Example: relax rescore configs/quickstart.toml --reward exact_match --name strict

    A second call continues where the first stopped. The limits of `[reward]` hold here too; its
    options, weights and routes are those of the run's own function, and hold for that one only.

    Args:
        reward: A name that `relax rewards list` knows, or path/to/file.py:function.
        name: Of the scores, for their topic `reward.scores.NAME`; by default after the function.
        workers: Child processes that run the function; by default `reward.processes`.
        threshold: Rewards from here on count as good, for the agreement.
        fail_below: Exit with 6 when Pearson's correlation is below this, or does not exist.
    """
    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.history.samples.filter import parse_bounds
    from relax_events.history.samples.rescoring import default_scores_name
    from relax_events.history.samples.rescoring import rescore as rescore_run
    from relax_events.rewards.trial import replace_function

    versions = parse_bounds(version, flag="--version")
    topic_name = name or default_scores_name(reward)
    with open_run_log(config, overrides, name="rescore") as log:
        result = rescore_run(
            log,
            replace_function(_find_limits(log.config), reward, option or [], workers=workers),
            name=topic_name,
            versions=versions,
            threshold=threshold,
            report=ProgressLines(),
        )
        note_unreadable(log)
        topic = log.plan.topic(log.plan.scores_entity(topic_name))
    if output == "json":
        print_json({"topic": topic, **asdict(result)})
    else:
        print_comparison(result, topic=topic)
    is_low = fail_below is not None and (result.pearson is None or result.pearson < fail_below)
    return CHECK_FOUND if is_low else 0


def _find_limits(config: RunConfig) -> RewardConfig:
    """Return the run's reward section; without its own function for a replay, whose run file
    repeats the settings of its parent.
    """
    if config.is_replay:
        return config.reward.model_copy(update={"function": "", "environment": ()})
    return config.reward


class ProgressLines:
    """Writes a line to stderr now and then."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def __call__(self, progress: RescoringProgress) -> None:
        """Write a line if the last one is some seconds old, or all is done."""
        is_done = progress.num_partitions_done == progress.num_partitions
        if is_done or time.monotonic() - self._shown_at >= LINE_SECONDS:
            self._shown_at = time.monotonic()
            counts = (
                f"{progress.num_scored} samples scored, {progress.num_failed} of them failed, "
                f"{progress.num_scored_before} were scored before"
            )
            print(
                f"{counts}; partition {progress.num_partitions_done} of {progress.num_partitions}",
                file=sys.stderr,
            )


def print_comparison(result: Comparison, *, topic: str) -> None:
    """Print what came out."""
    from relax_events.cli.output import print_pairs, print_table
    from relax_events.cli.run_reader import excerpt, format_number

    print_pairs(
        {
            "topic": topic,
            "samples": f"{result.num_samples}, {result.num_compared} of them compared",
            "failed": (
                f"{format_number(result.original_failed_ratio)} of the original, "
                f"{format_number(result.new_failed_ratio)} of the new"
            ),
            "mean reward": (
                f"{format_number(result.original_mean)} original, "
                f"{format_number(result.new_mean)} new"
            ),
            "mean absolute difference": format_number(result.mean_absolute_difference),
            "correlation": (
                f"{format_number(result.pearson)} Pearson, {format_number(result.spearman)} "
                "Spearman"
            ),
            "agreement": (
                f"{format_number(result.agreement_ratio)} on which side of {result.threshold:g}"
            ),
            "prompt groups": (
                f"{result.num_prompt_groups}, {result.num_reranked} of them ranked otherwise"
            ),
            "became informative": result.num_became_informative,
            "became uninformative": result.num_became_uninformative,
        }
    )
    if result.extremes:
        print("\nwhere they differ most")
        rows = [
            [
                pair.sample_id,
                pair.policy_version,
                format_number(pair.original),
                format_number(pair.new),
                excerpt(pair.completion, 80),
            ]
            for pair in result.extremes
        ]
        print_table(["sample", "version", "original", "new", "completion"], rows)
