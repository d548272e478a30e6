"""`relax rewards`: list reward functions, try them on texts, and compare their scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from relax_events.cli.parameters import (
    DEFAULT_BROKER,
    BrokerOptions,
    Output,
    Overrides,
    RewardName,
    RewardOptions,
    RunFile,
    Versions,
)
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.config import RewardConfig, RunConfig
    from relax_events.rewards.comparison import Comparison

LINE_SECONDS = 5.0
NUM_EXAMPLES = 10
app = App(
    name="rewards",
    help=(
        "List the installed reward functions, inspect one, and try them on completions."
        "\n\nExample: relax rewards list"
    ),
)


@app.command(name="list")
def list_rewards(*, output: Output = "table") -> None:
    """List the rewards that are installed, with what each checks.

    Example: relax rewards list
    """
    from relax_events.cli.output import print_rows
    from relax_events.rewards.registry import describe_reward, reward_names

    rewards = [describe_reward(name) for name in reward_names()]
    rows = [[reward.name, reward.scores, reward.summary] for reward in rewards]
    print_rows(["name", "scores", "summary"], rows, output)


@app.command
def show(name: RewardName, *, output: Output = "table") -> None:
    """Show a reward: what it gives, the metadata it reads, its options, its source.

    Example: relax rewards show math

    This loads the file of a reward of your own.
    """
    from relax_events.cli.output import print_json
    from relax_events.cli.reward_rendering import print_description
    from relax_events.rewards.registry import describe_reward

    reward = describe_reward(name)
    if output == "json":
        print_json(asdict(reward))
    else:
        print_description(reward)


@app.command
def score(
    name: RewardName,
    *,
    completion: str | None = None,
    answer: str = "",
    prompt: str = "",
    metadata: str = "{}",
    jsonl: Path | None = None,
    option: RewardOptions = None,
    output: Output = "table",
) -> int:
    """Score completions as a run would, and show the answer that was found in each and why it is
    right or wrong.

    Example: relax rewards score math --completion Answer:100 --answer 100

    The exit code is 6 when a completion could not be scored.

    Args:
        completion: What a model wrote; - reads it from stdin.
        answer: The reference answer.
        prompt: Text of the prompt.
        metadata: Of the sample, a JSON object.
        jsonl: Instead of these a file with an object a line: completion, answer, prompt, metadata.
    """
    from relax_events.cli.output import print_json
    from relax_events.cli.reward_rendering import print_all_scored, print_scored
    from relax_events.config import RewardConfig
    from relax_events.rewards.pool import RewardItem
    from relax_events.rewards.trial import (
        FunctionScorer,
        parse_metadata,
        read_items,
        replace_function,
        split_into_batches,
    )

    if (completion is None) == (jsonl is None):
        raise ConfigError("give either --completion or --jsonl")
    if jsonl is not None:
        items = list(read_items(jsonl))
    else:
        text = sys.stdin.read() if completion == "-" else completion or ""
        items = [RewardItem("1", text, answer, parse_metadata(metadata, "--metadata"), prompt)]
    with FunctionScorer(replace_function(RewardConfig(), name, option or [])) as scorer:
        scored = [
            scorer.describe(one.item, result)
            for batch in split_into_batches(items)
            for one, result in zip(batch, scorer.score(batch), strict=True)
        ]
    if output == "json":
        print_json([asdict(one) for one in scored])
    elif jsonl is None:
        print_scored(scored[0])
    else:
        print_all_scored(scored)
    return CheckFailed.exit_code if any(one.error is not None for one in scored) else 0


@app.command
def compare(
    first: RewardName,
    second: RewardName,
    *,
    run: str = "",
    jsonl: Path | None = None,
    first_option: list[str] | None = None,
    second_option: list[str] | None = None,
    version: Versions = "",
    threshold: float | None = None,
    limit: int = 10,
    trust_source: bool = False,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Score the samples of a run by two reward functions, count where they differ, and show
    examples with what each has read in them.

    Example: relax rewards compare math gsm8k --run quickstart

    Nothing is written; `relax rewards rescore` keeps scores. The limits of `[reward]` are those of
    the run file, where the run is named by its id the defaults; the run's own function has its
    options.

    Args:
        run: Id of the run, or its run file.
        jsonl: Instead of a run a file with an object a line: completion, answer, prompt, metadata.
        first_option: A setting of the first function, NAME=VALUE; may be given several times.
        second_option: A setting of the second function.
        threshold: Rewards from here on count as good, and only good and bad differ; without it the
            rewards themselves are compared.
        limit: So many examples, those that differ most.
        trust_source: Don't ask about what the options of the run's own function name, where only
            the run's log says them.
    """
    from relax_events.cli.reward_rendering import print_comparison
    from relax_events.cli.run_reader import note_unreadable
    from relax_events.config import RewardConfig
    from relax_events.history.run_log import RunLog
    from relax_events.history.samples.filter import parse_bounds
    from relax_events.ops.rescoring import read_completions
    from relax_events.rewards.comparison import compare_scores
    from relax_events.rewards.trial import (
        FunctionScorer,
        read_items,
        replace_function,
        split_into_batches,
    )

    if bool(run) == (jsonl is not None):
        raise ConfigError("give either --run or --jsonl")
    if limit < 0:
        raise ConfigError(f"--limit must be >= 0, got {limit}")
    if version and jsonl is not None:
        raise ConfigError("--version selects samples of a run; leave it out with --jsonl")
    versions = parse_bounds(version, flag="--version")
    with ExitStack() as stack:
        limits = RewardConfig()
        if not jsonl:
            settings = stack.enter_context(broker.open_run(run, name="rewards"))
            log = stack.enter_context(RunLog(settings, name="rewards"))
            stack.callback(note_unreadable, log)
            limits = _find_section(log.config, run, (first, second), broker, trusts=trust_source)
        scorers = [
            stack.enter_context(FunctionScorer(replace_function(limits, name, options or [])))
            for name, options in ((first, first_option), (second, second_option))
        ]
        comparison = compare_scores(
            split_into_batches(read_items(jsonl))
            if jsonl
            else read_completions(log, versions, scorers),
            *scorers,
            threshold=threshold,
            num_examples=limit,
            report=report_progress(),
        )
    print_comparison(comparison, output)


@app.command
def rescore(
    config: RunFile,
    *overrides: Overrides,
    reward: str,
    option: RewardOptions = None,
    name: str | None = None,
    version: Versions = "",
    workers: int | None = None,
    threshold: float | None = None,
    fail_below: float | None = None,
    output: Output = "table",
) -> int:
    """Score the samples of a run by another reward function, keep its scores on a topic of their
    own, and compare them with the recorded ones.

    Example: relax rewards rescore configs/quickstart.toml --reward exact_match --name strict

    A second call continues where the first stopped. The limits of `[reward]` hold here too; its
    options, weights and routes are those of the run's own function, and hold for that one only.

    Args:
        reward: A name that `relax rewards list` knows, or path/to/file.py:function.
        name: Of the scores, for their topic `reward.scores.NAME`; by default after the function.
        workers: Child processes that run the function; by default `reward.processes`.
        threshold: Rewards from here on count as good, and only good and bad differ; without it the
            rewards themselves are compared.
        fail_below: Exit with 6 when Pearson's correlation is below this, or does not exist.
    """
    from relax_events.cli.reward_rendering import print_comparison
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.history.samples.filter import parse_bounds
    from relax_events.objects import ObjectStore
    from relax_events.ops.rescoring import (
        RecordedScores,
        default_scores_name,
        open_kept_scores,
        read_completions,
    )
    from relax_events.rewards.comparison import compare_scores
    from relax_events.rewards.trial import FunctionScorer, replace_function

    versions = parse_bounds(version, flag="--version")
    scores_name = name or default_scores_name(reward)
    with open_run_log(config, overrides, name="rewards") as log:
        section = replace_function(_find_limits(log.config), reward, option or [], workers=workers)
        store = ObjectStore.open(log.config.objects_uri, uri_aliases=log.config.objects.uri_aliases)
        with (
            FunctionScorer(section, store) as function,
            open_kept_scores(log, function, scores_name) as kept,
        ):
            comparison = compare_scores(
                read_completions(log, versions, [function]),
                RecordedScores(log, versions),
                kept,
                threshold=threshold,
                num_examples=NUM_EXAMPLES,
                report=report_progress(),
            )
        note_unreadable(log)
        topic = log.plan.topic(log.plan.scores_entity(scores_name))
    counts = f"{kept.num_scored} samples scored, {kept.num_failed} of them failed"
    print(f"{counts}, {kept.num_scored_before} were scored before", file=sys.stderr)
    print_comparison(comparison, output, {"topic": topic})
    pearson = comparison.pearson
    is_low = fail_below is not None and (pearson is None or pearson < fail_below)
    return CheckFailed.exit_code if is_low else 0


def _find_limits(config: RunConfig) -> RewardConfig:
    """Return the run's reward section; without its own function for a replay, whose run file
    repeats the settings of its parent.
    """
    if config.is_replay:
        return config.reward.model_copy(update={"function": "", "environment": ()})
    return config.reward


def _find_section(
    settings: RunConfig,
    run: str,
    functions: tuple[str, str],
    broker: BrokerOptions,
    *,
    trusts: bool,
) -> RewardConfig:
    """Return the reward section to use: of the caller's run file, or of the log where one of the
    functions is the run's own and the user accepts it.

    Raises:
        UntrustedSettingsError: The log's section names external values that the user has not
            accepted.
    """
    from functools import partial

    from relax_events.cli.output import accept_source
    from relax_events.cli.run_reader import is_run_file
    from relax_events.config import RewardConfig, load_run_config
    from relax_events.history.runs.inherited_code import read_own_run_files, require_trusted_reward

    if is_run_file(run):
        return _find_limits(settings)
    if settings.reward.function not in functions:
        return RewardConfig()
    named = load_run_config(broker.config) if broker.config is not None else None
    return require_trusted_reward(
        settings,
        run_files=read_own_run_files(broker.directory, run, named=named),
        accept=partial(accept_source, trusts=trusts),
    )


def report_progress() -> Callable[[Comparison], None]:
    """Return a function that writes counts to stderr every few seconds."""
    shown_at = time.monotonic()

    def report(counts: Comparison) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= LINE_SECONDS:
            shown_at = time.monotonic()
            text = f"{counts.num_samples} samples compared, {counts.num_differ} differ"
            print(text, file=sys.stderr)

    return report
