"""`relax rewards`: list, try and compare reward functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from relax_events.cli.parameters import (
    DEFAULT_BROKER,
    BrokerOptions,
    Output,
    RewardName,
    RewardOptions,
    Versions,
)

if TYPE_CHECKING:
    from relax_events.config import RewardConfig, RunConfig
    from relax_events.history.run_log import RunLog
    from relax_events.rewards.comparison import DifferenceCounts, Differences
    from relax_events.rewards.pool import RewardItem

LINE_SECONDS = 5.0
CHECK_FOUND = 6
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
    from relax_events.cli.output import print_json, print_table
    from relax_events.rewards.registry import describe_reward, reward_names

    found = [describe_reward(name) for name in reward_names()]
    if output == "json":
        print_json(
            [{"name": one.name, "scores": one.scores, "summary": one.summary} for one in found]
        )
    else:
        print_table(
            ["reward", "scores", "what"], [[one.name, one.scores, one.summary] for one in found]
        )


@app.command
def show(name: RewardName, *, output: Output = "table") -> None:
    """Show a reward: what it gives, the metadata it reads, its options, its source.

    Example: relax rewards show math

    This loads the file of a reward of your own.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.reward_rendering import print_description
    from relax_events.rewards.registry import describe_reward

    found = describe_reward(name)
    if output == "json":
        print_json(asdict(found))
    else:
        print_description(found)


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
    import sys
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.reward_rendering import print_all_tried, print_tried
    from relax_events.config import RewardConfig
    from relax_events.errors import ConfigError
    from relax_events.rewards.pool import RewardItem
    from relax_events.rewards.trial import (
        parse_metadata,
        read_items,
        replace_function,
        try_reward,
    )

    if (completion is None) == (jsonl is None):
        raise ConfigError("give either --completion or --jsonl")
    if jsonl is not None:
        items = list(read_items(jsonl))
    else:
        text = sys.stdin.read() if completion == "-" else completion or ""
        items = [RewardItem("1", text, answer, parse_metadata(metadata, "--metadata"), prompt)]
    tried = try_reward(replace_function(RewardConfig(), name, option or []), items)
    if output == "json":
        print_json([asdict(one) for one in tried])
    elif jsonl is None:
        print_tried(tried[0])
    else:
        print_all_tried(tried)
    return CHECK_FOUND if any(one.error is not None for one in tried) else 0


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

    Nothing is written; `relax rescore` keeps scores. The limits of `[reward]` are those of the run
    file, where the run is named by its id the defaults; the run's own function has its options.

    Args:
        run: Id of the run, or its run file.
        jsonl: Instead of a run a file with an object a line: completion, answer, prompt, metadata.
        first_option: A setting of the first function, NAME=VALUE; may be given several times.
        second_option: A setting of the second function.
        threshold: Rewards from here on count as good, and only good and bad differ; without it the
            rewards themselves are compared.
        limit: So many examples, evenly selected from all.
        trust_source: Don't ask about what the options of the run's own function name, where only
            the run's log says them.
    """
    from relax_events.cli.reward_rendering import show_differences
    from relax_events.errors import ConfigError

    if bool(run) == (jsonl is not None):
        raise ConfigError("give either --run or --jsonl")
    if limit < 0:
        raise ConfigError(f"--limit must be >= 0, got {limit}")
    pair = _RewardPair(
        first,
        second,
        first_option or [],
        second_option or [],
        threshold=threshold,
        num_examples=limit,
    )
    if jsonl is None:
        found = _compare_run(pair, run, broker, version=version, trusts=trust_source)
    elif version:
        raise ConfigError("--version selects samples of a run; leave it out with --jsonl")
    else:
        found = _compare_file(pair, jsonl)
    show_differences(found, output)


@dataclass(frozen=True, slots=True)
class _RewardPair:
    """Two reward functions with their options, and how they are compared."""

    first: str
    second: str
    first_options: Sequence[str]
    second_options: Sequence[str]
    threshold: float | None
    num_examples: int

    def compare(self, limits: RewardConfig, items: Iterable[RewardItem]) -> Differences:
        """Score completions by both functions.

        Args:
            limits: The reward section that holds the limits.
            items: The completions.
        """
        from relax_events.rewards.comparison import compare_rewards
        from relax_events.rewards.trial import replace_function

        return compare_rewards(
            replace_function(limits, self.first, self.first_options),
            replace_function(limits, self.second, self.second_options),
            items,
            threshold=self.threshold,
            limit=self.num_examples,
            report=CountLines(),
        )


def _compare_file(pair: _RewardPair, jsonl: Path) -> Differences:
    """Compare both functions on the completions of a file."""
    from relax_events.config import RewardConfig
    from relax_events.rewards.trial import read_items

    return pair.compare(RewardConfig(), read_items(jsonl))


def _compare_run(
    pair: _RewardPair, run: str, broker: BrokerOptions, *, version: str, trusts: bool
) -> Differences:
    """Compare both functions on the samples of a run."""
    from relax_events.cli.run_reader import note_unreadable
    from relax_events.history.samples.filter import parse_bounds
    from relax_events.history.samples.reader import read_generated_samples
    from relax_events.rewards.scoring import build_reward_item

    versions = parse_bounds(version, flag="--version")
    with _open_log(run, broker) as log:
        section = _find_section(log.config, run, pair, broker, trusts=trusts)
        items = (build_reward_item(sample) for sample in read_generated_samples(log, versions))
        found = pair.compare(section, items)
        note_unreadable(log)
    return found


@contextmanager
def _open_log(run: str, broker: BrokerOptions) -> Iterator[RunLog]:
    """Open the log of a run that is named by its run file or by its id."""
    from relax_events.cli.run_reader import is_run_file, open_run_log
    from relax_events.history.run_log import RunLog

    if is_run_file(run):
        with open_run_log(Path(run), (), name="rewards") as log:
            yield log
        return
    with (
        broker.open_run(run, name="rewards") as settings,
        RunLog(settings, name="rewards") as log,
    ):
        yield log


def _find_section(
    settings: RunConfig, run: str, pair: _RewardPair, broker: BrokerOptions, *, trusts: bool
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

    if is_run_file(run) and not settings.is_replay:
        return settings.reward
    if is_run_file(run) or settings.reward.function not in (
        pair.first,
        pair.second,
    ):  # the run file of a replay repeats the settings of its parent
        return RewardConfig()
    named = load_run_config(broker.config) if broker.config is not None else None
    return require_trusted_reward(
        settings,
        own=read_own_run_files(broker.directory, run, named=named),
        accept=partial(accept_source, trusts=trusts),
    )


class CountLines:
    """Writes a line to stderr now and then."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def __call__(self, counts: DifferenceCounts) -> None:
        """Write a line if the last one is some seconds old."""
        import sys

        if time.monotonic() - self._shown_at >= LINE_SECONDS:
            self._shown_at = time.monotonic()
            print(
                f"{counts.num_samples} samples compared, {counts.num_differ} differ",
                file=sys.stderr,
            )
