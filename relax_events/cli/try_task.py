"""`relax try`: plays prompts of a run file without a run."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.config import EngineConfig
    from relax_events.episodes.chat_engine import ChatServer
    from relax_events.launcher.checks import Finding
    from relax_events.launcher.workbench import TriedGroup, TriedSample
    from relax_events.launcher.workbench_summary import Summary, TokenPrices

INTERRUPTED = 130
SAMPLES_PER_PROMPT = 4
HEAD_CHARACTERS, END_CHARACTERS = 1500, 500
REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
"""Such as the placeholders of an image."""


@dataclass
class _Played:
    """One model's prompts, as far as they were played."""

    groups: list[TriedGroup]
    num_asked: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False


def try_task(
    config: RunFile,
    *overrides: Overrides,
    prompts: Annotated[int, Parameter(name=["--prompts", "-n"])] = 4,
    samples: int | None = None,
    model: Annotated[list[str] | None, Parameter(negative="")] = None,
    url: str = "",
    key_variable: str = "",
    price: str = "",
    seconds: float = 600.0,
    full: bool = False,
    output: Output = "table",
) -> int:
    """Play the first prompts of a run file without a run: no broker, one process. Show for each
    sample the prompt as rendered, the transcript, its reward with the reasons, tokens and time;
    then what would keep a run from learning. The exit code is 6 when something would.

    Example: relax try configs/quickstart.toml -n 8

    Rewards and environments run confined, as in a run. Ctrl-C ends with what was played so far.

    Args:
        prompts: So many prompts.
        samples: Samples for each prompt; by default those of the run, at most 4.
        model: A model's folder instead of the run's; several are compared in a table, and `run` is
            the run's own. With --url a name that is no folder is a model of the server.
        url: A server of OpenAI's chat completions that plays the policy.
        key_variable: Name of the environment variable with the server's key.
        price: Of a million tokens in dollars, PROMPT/COMPLETION, such as 0.15/0.6; shows the cost.
        seconds: For each model; what has not ended then is left out.
        full: Show long texts whole.
        output: Text to read, or JSON for programs.
    """
    import logging

    import structlog

    from relax_events.cli.output import print_json
    from relax_events.episodes.chat_engine import ChatServer

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if prompts < 1 or (samples is not None and samples < 1) or seconds <= 0:
        raise ConfigError("-n, --samples and --seconds must be at least 1")
    prices = _read_prices(price)
    server = ChatServer(url=url, token_variable=key_variable) if url else None
    if server is not None:
        server.check_token()
    results, tree, is_good, is_interrupted = [], [], True, False
    for name in model or (["run"] if not url else [""]):
        playing = _Playing(config, overrides, name, prompts, samples, seconds)
        if server is not None and name != "run" and not (name and Path(name).exists()):
            playing.server = replace(server, model=name)
        played = playing.play(print_group=None if output == "json" else _Printer(is_full=full))
        summary, findings = playing.judge(played, prices)
        results.append(summary)
        tree.append(_build_tree(played, summary, findings))
        is_good &= not findings
        if output == "table":
            _print_summary(played, summary, findings)
        if is_interrupted := played.is_interrupted:
            break
    if output == "json":
        print_json(tree)
    elif len(results) > 1:
        _print_table(results)
    if is_interrupted:
        return INTERRUPTED
    return 0 if is_good else CheckFailed.exit_code


@dataclass
class _Playing:
    """One model on the prompts of a run file."""

    config: Path
    overrides: Sequence[str]
    name: str
    num_prompts: int
    num_samples: int | None
    seconds: float
    server: ChatServer | None = None
    billed: tuple[int, int] | None = None
    engine: EngineConfig | None = None
    has_environment: bool = False

    def play(self, *, print_group: _Printer | None) -> _Played:
        """Play until all prompts are done, the time is up, or Ctrl-C."""
        from relax_events.config import load_run_config
        from relax_events.deadline import Deadline
        from relax_events.launcher.checked_run import CheckedRun
        from relax_events.launcher.hub_download import find_commit
        from relax_events.launcher.workbench import open_workbench

        own_model = (
            () if self.name == "run" or self.server is not None else (f"model.path={self.name}",)
        )
        loaded = load_run_config(
            self.config, (*self.overrides, *own_model), find_commit=find_commit
        )
        if own_model and not loaded.model.path.exists():
            raise ConfigError(f"--model {self.name} does not exist; give the folder of a model")
        count = self.num_samples or min(loaded.run.samples_per_prompt, SAMPLES_PER_PROMPT)
        run, played = CheckedRun(loaded), _Played([])
        with open_workbench(run, samples_per_prompt=count, server=self.server) as bench:
            self.engine, started = bench.config.engine, time.monotonic()
            self.has_environment = bool(bench.config.environment.name)
            if self.server is None:
                self.name = str(bench.config.model.path)
            elif not self.name:
                self.name = self.server.url
            try:
                for group in bench.play(self.num_prompts, Deadline(self.seconds)):
                    self._keep(played, group, print_group)
            except KeyboardInterrupt:
                played.is_interrupted = True
            for group in bench.end():
                self._keep(played, group, print_group)
            played.seconds, self.billed = time.monotonic() - started, bench.billed
            played.num_asked = bench.num_asked
        return played

    def _keep(self, played: _Played, group: TriedGroup, print_group: _Printer | None) -> None:
        played.groups.append(group)
        if print_group is not None:
            print_group(group)

    def judge(self, played: _Played, prices: TokenPrices | None) -> tuple[Summary, list[Finding]]:
        """Return the numbers, and what would keep a run from learning."""
        from relax_events.launcher.workbench_summary import find_problems, summarise

        summary = summarise(
            played.groups,
            model=self.name,
            seconds=played.seconds,
            num_asked=played.num_asked,
            prices=prices,
            billed=self.billed,
        )
        assert self.engine is not None, "it has played"
        findings = find_problems(
            played.groups,
            max_new_tokens=self.engine.sampling.max_new_tokens,
            max_context_tokens=self.engine.max_context_tokens,
            multi_turn=self.has_environment,
            num_asked=played.num_asked,
            max_seconds=math.inf if played.is_interrupted else self.seconds,
        )
        return summary, findings


def _read_prices(text: str) -> TokenPrices | None:
    from relax_events.launcher.workbench_summary import TokenPrices

    if not text:
        return None
    try:
        prompt, completion = map(float, text.split("/"))
    except ValueError:
        raise ConfigError(
            f"--price must be PROMPT/COMPLETION in dollars, such as 0.15/0.6, got {text!r}"
        ) from None
    return TokenPrices(prompt, completion)


@dataclass
class _Printer:
    """Prints prompts with their samples for people."""

    is_full: bool

    def __call__(self, group: TriedGroup) -> None:
        """Print a prompt once, where all samples have the same, and each sample."""
        from relax_events.cli.sample_rendering import indented

        issued = group.issued
        print(f"== prompt {issued.prompt_group_id}, row {issued.row} of the stream")
        shown = ""
        if group.failure:
            print(f"FAIL {group.failure}")
        if not group.samples:
            self._print(indented("messages", "\n".join(one.text for one in issued.messages)))
        for one in group.samples:
            if one.prompt != shown:
                shown = one.prompt
                self._print(indented("prompt as rendered", self._shorten(shown)))
                if issued.answer:
                    self._print(indented("answer", self._shorten(issued.answer)))
            self._print(self._describe(one))
        print(flush=True)

    def _describe(self, one: TriedSample) -> Iterator[str]:
        from relax_events.cli.sample_rendering import (
            indented,
            message_text,
            reward_text,
            score_text,
        )

        sample, score = one.sample, one.score
        yield (
            f"-- sample {sample.sample_id}: {one.num_sampled_tokens} tokens sampled, "
            f"{len(sample.tokens)} in all, ended by {sample.finish_reason.value}, "
            f"{one.seconds:.2f} s"
        )
        if sample.turns:
            for turn in sample.turns:
                yield from indented(turn.role, self._shorten(message_text(turn)))
        else:
            yield from indented("completion", self._shorten(sample.completion))
        if sample.error:
            yield f"error: {sample.error}"
        if score is None:
            yield "reward: the judge role's, which is not tried"
        else:
            yield f"reward: {score_text(score) if score.reward is None else reward_text(score)}"
        if one.why:
            yield f"why: {one.why}"

    def _shorten(self, text: str) -> str:
        """Leave out the middle of a long text, and write a repeated token once."""
        text = REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text)
        num_more = len(text) - HEAD_CHARACTERS - END_CHARACTERS
        if self.is_full or num_more <= 0:
            return text
        more = f"\n[{num_more} characters more; --full shows them]\n"
        return f"{text[:HEAD_CHARACTERS]}{more}{text[-END_CHARACTERS:]}"

    def _print(self, lines: Iterator[str]) -> None:
        from relax_events.printable import printable

        for line in lines:
            print("\n".join(map(printable, line.split("\n"))))


def _print_summary(played: _Played, summary: Summary, findings: Sequence[Finding]) -> None:
    from relax_events.cli.output import format_number, print_fields, print_findings
    from relax_events.launcher.workbench_summary import draw_histogram, list_rewards

    if played.is_interrupted:
        print("interrupted; what was played so far:", file=sys.stderr, flush=True)
    mean = format_number(summary.reward_mean)
    margin = "" if summary.reward_stderr is None else f" +- {summary.reward_stderr:.3f}"
    fields: dict[str, Any] = {
        "model": summary.model,
        "samples": (
            f"{summary.num_samples}, of {summary.num_prompts} of {summary.num_asked} prompts"
        ),
        "reward": f"{mean}{margin}, spread {format_number(summary.reward_spread)}",
        "equal rewards": f"in {summary.num_equal} of {summary.num_compared} prompt groups",
        "ended by": (
            f"length {summary.num_truncated}, late {summary.num_late}, lost {summary.num_lost}"
        ),
        "tokens": (
            f"{format_number(summary.tokens_mean, 1)} sampled a sample, "
            f"{summary.num_sampled_tokens} in all; {summary.num_prompt_tokens} others"
        ),
        "seconds": f"{summary.seconds:.1f}",
    }
    if summary.cost is not None:
        fields["cost"] = f"${summary.cost:.6f}"
    print_fields(fields)
    if rewards := [reward for group in played.groups for reward in list_rewards(group)]:
        print("\nrewards")
        print("\n".join(draw_histogram(rewards)))
    print()
    print_findings(findings)
    if not findings and summary.num_samples:
        print("ok   nothing found that would keep a run from learning")
    sys.stdout.flush()


def _print_table(results: Sequence[Summary]) -> None:
    from relax_events.cli.output import format_number, print_rows

    print()
    print_rows(
        ["model", "reward", "+-", "spread", "equal", "cut off", "tokens", "seconds", "cost"],
        [
            [
                one.model,
                format_number(one.reward_mean),
                format_number(one.reward_stderr),
                format_number(one.reward_spread),
                f"{one.num_equal}/{one.num_compared}",
                f"{one.num_truncated}/{one.num_samples}",
                format_number(one.tokens_mean, 1),
                f"{one.seconds:.1f}",
                "-" if one.cost is None else f"${one.cost:.6f}",
            ]
            for one in results
        ],
    )


def _build_tree(played: _Played, summary: Summary, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "summary": asdict(summary),
        "findings": [{"what": one.what, "text": one.text} for one in findings],
        "is_interrupted": played.is_interrupted,
        "prompts": [_build_group_tree(group) for group in played.groups],
    }


def _build_group_tree(group: TriedGroup) -> dict[str, Any]:
    return {
        "prompt_group_id": group.issued.prompt_group_id,
        "row": group.issued.row,
        "answer": group.issued.answer,
        "tools": group.issued.tools,
        "failure": group.failure,
        "samples": [_build_sample_tree(one) for one in group.samples],
    }


def _build_sample_tree(one: TriedSample) -> dict[str, Any]:
    from relax_events.cli.sample_rendering import message_text, score_document

    return {
        "sample_id": one.sample.sample_id,
        "prompt": one.prompt,
        "completion": one.sample.completion,
        "turns": [{"role": turn.role, "content": message_text(turn)} for turn in one.sample.turns],
        "finish_reason": one.sample.finish_reason.value,
        "error": one.sample.error,
        "score": None if one.score is None else score_document(one.score),
        "why": one.why,
        "num_prompt_tokens": one.sample.num_prompt_tokens,
        "num_sampled_tokens": one.num_sampled_tokens,
        "num_tokens": len(one.sample.tokens),
        "seconds": one.seconds,
    }
