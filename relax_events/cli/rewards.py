"""`relax rewards`: list, try and compare reward functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

if TYPE_CHECKING:
    from relax_events.config import RewardConfig, RunConfig
    from relax_events.history.run_log import RunLog
    from relax_events.rewards.comparison import DifferenceCounts, Differences
    from relax_events.rewards.trial import ScoredCompletion

LINE_SECONDS = 5.0
Output = Literal["table", "json"]
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

    Args:
        output: A table to read, or JSON for programs.
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
def show(name: str, *, output: Output = "table") -> None:
    """Show a reward: what it gives, the metadata it reads, its options, its source.

    Example: relax rewards show math

    This loads the file of a reward of your own.

    Args:
        name: Of an installed reward, or path/to/file.py:function.
        output: Text to read, or JSON for programs.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json, print_table
    from relax_events.rewards.registry import describe_reward

    found = describe_reward(name)
    if output == "json":
        print_json(asdict(found))
        return
    print(f"{found.name}: scores {found.scores}\n\n{found.text}")
    if found.failures:
        print("\nFailures")
        print("\n".join(found.failures))
    if found.metadata:
        print("\nMetadata that it reads")
        print_table(["key", "what"], [list(pair) for pair in found.metadata.items()])
    if found.options:
        print("\nOptions, for [reward.options]")
        rows = [
            [option.name, option.kind, "required" if option.is_required else repr(option.default)]
            for option in found.options
        ]
        print_table(["option", "type", "default"], rows)
    if found.source:
        print(f"\nSource: {found.source}")


@app.command
def score(
    name: str,
    *,
    completion: str | None = None,
    answer: str = "",
    prompt: str = "",
    metadata: str = "{}",
    jsonl: Path | None = None,
    option: list[str] | None = None,
    output: Output = "table",
) -> int:
    """Score completions as a run would, and show the answer that was found in each and why it is
    right or wrong.

    Example: relax rewards score math --completion Answer:100 --answer 100

    The exit code is 6 when a completion could not be scored.

    Args:
        name: Of an installed reward, or path/to/file.py:function.
        completion: What a model wrote; - reads it from stdin.
        answer: The reference answer.
        prompt: Text of the prompt.
        metadata: Of the sample, a JSON object.
        jsonl: Instead of these a file with an object a line: completion, answer, prompt, metadata.
        option: A setting of the function, NAME=VALUE; may be given several times.
        output: Text to read, or JSON for programs.
    """
    import sys
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.rescore import settings_for
    from relax_events.config import RewardConfig
    from relax_events.errors import ConfigError
    from relax_events.rewards.pool import RewardItem
    from relax_events.rewards.trial import parse_metadata, read_items, try_reward

    if (completion is None) == (jsonl is None):
        raise ConfigError("give either --completion or --jsonl")
    if jsonl is not None:
        items = list(read_items(jsonl))
    else:
        text = sys.stdin.read() if completion == "-" else completion or ""
        items = [RewardItem("1", text, answer, parse_metadata(metadata, "--metadata"), prompt)]
    tried = try_reward(settings_for(RewardConfig(), name, option or [], workers=None), items)
    if output == "json":
        print_json([asdict(one) for one in tried])
    elif jsonl is None:
        print_tried(tried[0])
    else:
        print_all_tried(tried)
    return CHECK_FOUND if any(one.error is not None for one in tried) else 0


@app.command
def compare(
    first: str,
    second: str,
    *,
    run: str = "",
    jsonl: Path | None = None,
    first_option: list[str] | None = None,
    second_option: list[str] | None = None,
    version: str = "",
    threshold: float | None = None,
    limit: int = 10,
    trust_source: bool = False,
    config: Path | None = None,
    bootstrap_servers: str = "",
    directory: Path = Path(".relax"),
    output: Output = "table",
) -> None:
    """Score the samples of a run by two reward functions, count where they differ, and show
    examples with what each has read in them.

    Example: relax rewards compare math gsm8k --run quickstart

    Nothing is written; `relax rescore` keeps scores. The limits of `[reward]` are those of the run
    file, where the run is named by its id the defaults; the run's own function has its options.

    Args:
        first: An installed reward, or path/to/file.py:function.
        second: The other one.
        run: Id of the run, or its run file.
        jsonl: Instead of a run a file with an object a line: completion, answer, prompt, metadata.
        first_option: A setting of the first function, NAME=VALUE; may be given several times.
        second_option: A setting of the second function.
        version: Only samples of these policy versions: 3, 3..7, 3.. or ..7.
        threshold: Rewards from here on count as good, and only good and bad differ; without it the
            rewards themselves are compared.
        limit: So many examples, evenly selected from all.
        trust_source: Don't ask about what the options of the run's own function name, where only
            the run's log says them.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: Text to read, or JSON for programs.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.rescore import settings_for
    from relax_events.errors import ConfigError
    from relax_events.history.samples.filter import parse_bounds

    if bool(run) == (jsonl is not None):
        raise ConfigError("give either --run or --jsonl")
    if limit < 0:
        raise ConfigError(f"--limit must be >= 0, got {limit}")
    versions = parse_bounds(version, flag="--version")

    def sides(section: RewardConfig) -> tuple[RewardConfig, RewardConfig]:
        return (
            settings_for(section, first, first_option or [], workers=None),
            settings_for(section, second, second_option or [], workers=None),
        )

    if jsonl is not None:
        if version:
            raise ConfigError("--version selects samples of a run; leave it out with --jsonl")
        found = _compare_file(sides, jsonl, threshold=threshold, limit=limit)
    else:
        broker = Broker(config, bootstrap_servers, directory)
        found = _compare_run(
            sides,
            run,
            (first, second),
            broker,
            versions=versions,
            threshold=threshold,
            limit=limit,
            trusts=trust_source,
        )
    if output == "json":
        print_json(asdict(found))
    else:
        print_differences(found)


Sides = Callable[["RewardConfig"], tuple["RewardConfig", "RewardConfig"]]
"""Return the settings of both functions, given the reward section that holds the limits."""


@dataclass(frozen=True, slots=True)
class Broker:
    """The options that select a broker."""

    config: Path | None
    bootstrap_servers: str
    directory: Path


def _compare_file(sides: Sides, jsonl: Path, *, threshold: float | None, limit: int) -> Differences:
    """Compare both functions on the completions of a file."""
    from relax_events.config import RewardConfig
    from relax_events.rewards.comparison import compare_rewards
    from relax_events.rewards.trial import read_items

    return compare_rewards(
        *sides(RewardConfig()),
        read_items(jsonl),
        threshold=threshold,
        limit=limit,
        report=CountLines(),
    )


def _compare_run(
    sides: Sides,
    run: str,
    names: tuple[str, str],
    broker: Broker,
    *,
    versions: tuple[float, float],
    threshold: float | None,
    limit: int,
    trusts: bool,
) -> Differences:
    """Compare both functions on the samples of a run."""
    from relax_events.cli.run_reader import note_unreadable
    from relax_events.history.samples.reader import read_generated_samples
    from relax_events.rewards.comparison import compare_rewards
    from relax_events.rewards.scoring import build_reward_item

    with _opened(
        run,
        config=broker.config,
        bootstrap_servers=broker.bootstrap_servers,
        directory=broker.directory,
    ) as log:
        section = _section_of(
            log.config,
            run,
            names,
            config=broker.config,
            directory=broker.directory,
            trusts=trusts,
        )
        items = (build_reward_item(sample) for sample in read_generated_samples(log, versions))
        found = compare_rewards(
            *sides(section), items, threshold=threshold, limit=limit, report=CountLines()
        )
        note_unreadable(log)
    return found


@contextmanager
def _opened(
    run: str, *, config: Path | None, bootstrap_servers: str, directory: Path
) -> Iterator[RunLog]:
    """Open the log of a run that is named by its run file or by its id."""
    from relax_events.cli.run_reader import is_run_file, open_run, open_run_log
    from relax_events.history.run_log import RunLog

    if is_run_file(run):
        with open_run_log(Path(run), (), name="rewards") as log:
            yield log
        return
    named = open_run(
        run, config=config, bootstrap_servers=bootstrap_servers, directory=directory, name="rewards"
    )
    with named as settings, RunLog(settings, name="rewards") as log:
        yield log


def _section_of(
    settings: RunConfig,
    run: str,
    names: tuple[str, str],
    *,
    config: Path | None,
    directory: Path,
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

    if is_run_file(run) and not settings.is_replay:
        return settings.reward
    if (
        is_run_file(run) or settings.reward.function not in names
    ):  # the run file of a replay repeats the settings of its parent
        return RewardConfig()
    named = load_run_config(config) if config is not None else None
    return require_trusted_reward(
        settings,
        own=read_own_run_files(directory, run, named=named),
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


def print_differences(found: Differences) -> None:
    """Print the counts, and each example with what both functions have read from it."""
    from relax_events.cli.output import print_pairs
    from relax_events.cli.run_reader import excerpt
    from relax_events.printable import printable

    counts = found.counts
    rule = "" if found.threshold is None else f", by the side of {found.threshold:g}"
    print_pairs(
        {
            "first": found.first,
            "second": found.second,
            "samples": counts.num_samples,
            "agree": counts.num_agree,
            "differ": (
                f"{counts.num_differ}{rule}; first higher {counts.num_first_higher}, second "
                f"higher {counts.num_second_higher}"
            ),
            "failed": (
                f"{counts.num_first_failed} of the first, {counts.num_second_failed} of the "
                f"second, {counts.num_both_failed} of both"
            ),
        }
    )
    for example in found.examples:
        print(f"\nsample {excerpt(example.sample_id, 200)}")
        print_pairs(
            {
                "reference": excerpt(example.answer, 200),
                "completion ends": excerpt(example.completion_end[-120:], 200),
            },
            indent=2,
        )
        print_pairs(
            {
                "first": printable(_format_score(example.first)),
                "second": printable(_format_score(example.second)),
            },
            indent=2,
        )


def _format_score(one: ScoredCompletion) -> str:
    """Format what a function returned, and what it has read."""
    from relax_events.cli.run_reader import excerpt

    if one.reward is None:
        return f"failed: {excerpt(one.error or '', 200)}"
    parts = [
        f"{one.reward:g}",
        excerpt(one.answer or "", 80),
        one.location or "",
        excerpt(one.why or "", 200),
    ]
    return ": ".join(part for part in parts if part)


def print_tried(one: ScoredCompletion) -> None:
    """Print the result of one completion."""
    from relax_events.cli.output import print_pairs

    fields = {
        "reward": one.reward,
        **one.components,
        "error": one.error,
        "answer": one.answer,
        "found": one.location,
        "why": one.why,
    }
    print_pairs({key: value for key, value in fields.items() if value is not None})


def print_all_tried(tried: Sequence[ScoredCompletion]) -> None:
    """Print a line for each completion."""
    from relax_events.cli.output import print_table
    from relax_events.cli.run_reader import excerpt

    rows = [
        [
            one.sample_id,
            "" if one.reward is None else f"{one.reward:g}",
            excerpt(one.answer or "", 40),
            one.location or "",
            excerpt(one.error or one.why or "", 80),
        ]
        for one in tried
    ]
    print_table(["line", "reward", "answer", "found", "why"], rows)
