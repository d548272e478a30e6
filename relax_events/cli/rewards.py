"""`relax rewards`: list reward functions, try them on texts, and compare their scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions, Output
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.config import RewardConfig, RunConfig
    from relax_events.objects import ObjectStore
    from relax_events.rewards.comparison import Comparison, Scorer
    from relax_events.rewards.pool import RewardItem
    from relax_events.rewards.trial import Completion, FunctionScorer

LINE_SECONDS = 5.0
Settings = Annotated[list[str] | None, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """A completion to score."""

    completion: str | None = None
    """Score what a model wrote; - reads it from stdin."""
    answer: str = ""
    """The reference answer."""
    prompt: str = ""
    """Text of the prompt."""
    metadata: str = "{}"
    """Of the sample, a JSON object."""

    def read(self) -> RewardItem:
        """Return the completion with what it is scored by."""
        from relax_events.rewards.pool import RewardItem
        from relax_events.rewards.trial import parse_metadata

        text = sys.stdin.read() if self.completion == "-" else self.completion or ""
        metadata = parse_metadata(self.metadata, "--metadata")
        return RewardItem("1", text, self.answer, metadata, self.prompt)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """How two scorers are compared."""

    option: Settings = None
    """A setting of the function, NAME=VALUE; may be given several times."""
    second_option: Settings = None
    """A setting of the second function."""
    version: str = ""
    """Only samples of these policy versions: 3, 3..7, 3.. or ..7."""
    threshold: float | None = None
    """Rewards from here on count as good, and only good and bad differ; without it the rewards
    themselves are compared."""
    limit: int = 10
    """So many examples, those that differ most."""
    workers: int | None = None
    """Child processes that run the function; by default `reward.processes`."""
    fail_below: float | None = None
    """Exit with 6 when Pearson's correlation is below this, or does not exist."""


NO_TEXT = TextOptions()
DEFAULT_COMPARISON = ComparisonOptions()


def rewards(
    name: str = "",
    second: str = "",
    *,
    text: TextOptions = NO_TEXT,
    jsonl: Path | None = None,
    run: str = "",
    keep: str = "",
    options: ComparisonOptions = DEFAULT_COMPARISON,
    trust_source: bool = False,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> int:
    """List the installed rewards, or describe one. Score completions by it as a run would, and show
    why each is right or wrong; compare two on the samples of a run; or keep new scores of a run.

    Example: relax rewards math --completion Answer:100 --answer 100 && relax rewards math gsm8k
        --run quickstart

    A description or a score loads the file of a reward of your own. The limits of `[reward]` are
    those of the run file, where the run is named by its id the defaults; the run's own function has
    its options. The exit code is 6 when a completion could not be scored.

    Args:
        name: An installed reward, or path/to/file.py:function.
        second: Compare with this one: count where they differ, and show examples with what each
            has read in them. Nothing is written.
        jsonl: Score a file with an object a line: completion, answer, prompt, metadata.
        run: Score the samples of this run, by its id or its run file.
        keep: Keep the scores of a run's samples on the topic `reward.scores.NAME`, and compare them
            with the recorded ones. A second call continues where the first stopped.
        trust_source: Don't ask about what the options of the run's own function name, where only
            the run's log says them.
    """
    from relax_events.rewards.trial import read_items

    source = _find_source({"--completion": text.completion, "--jsonl": jsonl, "--run": run or None})
    if second and source not in {"--jsonl", "--run"}:
        raise ConfigError("two functions are compared on --run or on --jsonl; give one of them")
    if not source:
        _describe(name, output)
        return 0
    if not name:
        raise ConfigError(f"no function is named for {source}; `relax rewards` lists them")
    if not second and jsonl is not None:
        return _score(name, list(read_items(jsonl)), options.option, output, is_one=False)
    if not second and not run:
        return _score(name, [text.read()], options.option, output, is_one=True)
    comparing = _Comparing(name, second, options)
    facts: dict[str, str] = {}
    if jsonl is not None:
        comparison = comparing.compare_texts(jsonl)
    else:
        comparison, facts = comparing.compare_samples(run, keep, broker, trusts=trust_source)
    return comparing.report(comparison, facts, output)


def _find_source(inputs: Mapping[str, object]) -> str:
    """Return the option that names what is scored; empty without one."""
    flags = [flag for flag, value in inputs.items() if value is not None]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} exclude each other; give one of them")
    return flags[0] if flags else ""


def _describe(name: str, output: Output) -> None:
    from relax_events.cli.output import print_json, print_rows
    from relax_events.cli.reward_rendering import print_description
    from relax_events.rewards.registry import describe_reward, reward_names

    if not name:
        rewards = [describe_reward(name) for name in reward_names()]
        rows = [[reward.name, reward.scores, reward.summary] for reward in rewards]
        print_rows(["name", "scores", "summary"], rows, output)
    elif output == "json":
        print_json(describe_reward(name))
    else:
        print_description(describe_reward(name))


def _score(
    name: str, items: list[RewardItem], option: Settings, output: Output, *, is_one: bool
) -> int:
    from relax_events.cli.output import print_json
    from relax_events.cli.reward_rendering import print_all_scored, print_scored
    from relax_events.config import RewardConfig
    from relax_events.rewards.trial import FunctionScorer, replace_function, split_into_batches

    with FunctionScorer(replace_function(RewardConfig(), name, option or [])) as scorer:
        scored = [
            scorer.describe(one.item, result)
            for batch in split_into_batches(items)
            for one, result in zip(batch, scorer.score(batch), strict=True)
        ]
    if output == "json":
        print_json(scored)
    elif is_one:
        print_scored(scored[0])
    else:
        print_all_scored(scored)
    return CheckFailed.exit_code if any(one.error is not None for one in scored) else 0


@dataclass(frozen=True)
class _Comparing:
    """How two scorers are compared: one or two functions, each with its options; one function is
    compared with a run's recorded scores.
    """

    name: str
    second: str
    options: ComparisonOptions

    def __post_init__(self) -> None:
        if self.options.limit < 0:
            raise ConfigError(f"--limit must be >= 0, got {self.options.limit}")

    @property
    def functions(self) -> list[tuple[str, Sequence[str]]]:
        """Return the functions with their settings."""
        first = (self.name, self.options.option or ())
        return [first, (self.second, self.options.second_option or ())] if self.second else [first]

    def compare_texts(self, jsonl: Path) -> Comparison:
        """Compare two functions on the completions of a file."""
        from relax_events.config import RewardConfig
        from relax_events.rewards.trial import read_items, split_into_batches

        if self.options.version:
            raise ConfigError("--version selects samples of a run; leave it out with --jsonl")
        with ExitStack() as stack:
            first, second = self._open(stack, RewardConfig(), None)
            return self._compare(split_into_batches(read_items(jsonl)), first, second)

    def compare_samples(
        self, run: str, keep: str, broker: BrokerOptions, *, trusts: bool
    ) -> tuple[Comparison, dict[str, str]]:
        """Compare on a run's samples, and return the comparison with the topic of kept scores."""
        from relax_events.cli.run_reader import is_run_file, note_unreadable
        from relax_events.history.run_log import RunLog
        from relax_events.history.samples.filter import parse_bounds
        from relax_events.objects import ObjectStore
        from relax_events.ops.rescoring import RecordedScores, open_kept_scores, read_completions

        if bool(keep) == bool(self.second) or (keep and not is_run_file(run)):
            raise ConfigError(
                "give a second function to compare with, or --keep NAME and the run's file to keep "
                "the scores of one"
            )
        versions = parse_bounds(self.options.version, flag="--version")
        with ExitStack() as stack:
            settings = stack.enter_context(broker.open_run(run, name="rewards"))
            log = stack.enter_context(RunLog(settings, name="rewards"))
            stack.callback(note_unreadable, log)
            names = [name for name, _ in self.functions]
            limits = _find_section(log.config, run, names, broker, trusts=trusts)
            objects = log.config.objects
            store = (
                ObjectStore.open(log.config.objects_uri, uri_aliases=objects.uri_aliases)
                if is_run_file(run)
                else None
            )
            scorers = self._open(stack, limits, store)
            completions = read_completions(log, versions, scorers)
            if not keep:
                return self._compare(completions, *scorers), {}
            kept = stack.enter_context(open_kept_scores(log, scorers[0], keep))
            comparison = self._compare(completions, RecordedScores(log, versions), kept)
            counts = f"{kept.num_scored} samples scored, {kept.num_failed} of them failed"
            print(f"{counts}, {kept.num_scored_before} were scored before", file=sys.stderr)
            return comparison, {"topic": log.plan.topic(log.plan.scores_entity(keep))}

    def _open(
        self, stack: ExitStack, limits: RewardConfig, store: ObjectStore | None
    ) -> list[FunctionScorer]:
        from relax_events.rewards.trial import FunctionScorer, replace_function

        sections = [
            replace_function(limits, name, assignments, workers=self.options.workers)
            for name, assignments in self.functions
        ]
        return [stack.enter_context(FunctionScorer(section, store)) for section in sections]

    def _compare(
        self, batches: Iterable[list[Completion]], first: Scorer, second: Scorer
    ) -> Comparison:
        from relax_events.rewards.comparison import compare_scores

        return compare_scores(
            batches,
            first,
            second,
            threshold=self.options.threshold,
            num_examples=self.options.limit,
            report=report_progress(),
        )

    def report(self, comparison: Comparison, facts: Mapping[str, str], output: Output) -> int:
        """Print a comparison, and return the exit code."""
        from relax_events.cli.reward_rendering import print_comparison

        print_comparison(comparison, output, facts)
        least, pearson = self.options.fail_below, comparison.pearson
        is_low = least is not None and (pearson is None or pearson < least)
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
    functions: Sequence[str],
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
