"""What was played on the workbench as numbers, and what would keep a run from learning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

from relax_events.events.parts import FinishReason
from relax_events.launcher.checks import Finding
from relax_events.launcher.workbench import TriedGroup, TriedSample

NUM_BINS, BAR_WIDTH = 8, 40
MAX_EQUAL_RATIO = 0.5
MAX_TRUNCATED_RATIO = 0.25
MAX_VALUES = 4
MAX_FINDING_CHARACTERS = 900
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices in dollars for a million tokens."""

    prompt: float
    completion: float

    def compute_cost(self, num_prompt_tokens: int, num_completion_tokens: int) -> float:
        """Return the price of tokens, in dollars."""
        cost = num_prompt_tokens * self.prompt + num_completion_tokens * self.completion
        return cost / MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The samples of one model in numbers; None where there is nothing to compute one from.

    Attributes:
        model: Its folder, or its name at a server.
        num_asked: Prompts to play.
        num_prompts: Those of them that were begun.
        reward_mean: Over the samples that have a reward.
        reward_stderr: Of that mean, over the means of prompt groups.
        reward_spread: Standard deviation over the samples.
        num_equal: Prompt groups of two or more rewards that are all equal.
        num_compared: Prompt groups of two or more rewards.
        tokens_mean: Sampled tokens of a sample.
        seconds: Of the whole play.
        cost: In dollars.
    """

    model: str
    num_asked: int
    num_prompts: int
    num_samples: int
    num_scored: int
    reward_mean: float | None
    reward_stderr: float | None
    reward_spread: float | None
    num_equal: int
    num_compared: int
    num_truncated: int
    num_late: int
    num_lost: int
    num_reward_errors: int
    num_refused: int
    num_prompt_tokens: int
    num_sampled_tokens: int
    tokens_mean: float | None
    seconds: float
    cost: float | None = None


def summarise(
    groups: Sequence[TriedGroup],
    *,
    model: str,
    seconds: float,
    num_asked: int,
    prices: TokenPrices | None = None,
    billed: tuple[int, int] | None = None,
) -> Summary:
    """Compute the numbers of what was played.

    Args:
        groups: The prompts with their samples.
        model: Its folder or name.
        seconds: Of the whole play.
        num_asked: Prompts to play.
        prices: Of its tokens, if they are known.
        billed: Prompt and completion tokens that a server counted; by default those of the
            samples.
    """
    samples = [sample for group in groups for sample in group.samples]
    means = [fmean(rewards) for group in groups if (rewards := list_rewards(group))]
    compared = _list_compared_rewards(groups)
    reasons = Counter(one.sample.finish_reason for one in samples)
    num_read = sum(map(count_read_tokens, samples))
    num_sampled = sum(one.num_sampled_tokens for one in samples)
    all_rewards = [reward for group in groups for reward in list_rewards(group)]
    return Summary(
        model=model,
        num_asked=num_asked,
        num_prompts=len(groups),
        num_samples=len(samples),
        num_scored=len(all_rewards),
        reward_mean=fmean(all_rewards) if all_rewards else None,
        reward_stderr=_compute_stderr(means),
        reward_spread=pstdev(all_rewards) if all_rewards else None,
        num_equal=sum(len(set(rewards)) == 1 for rewards in compared),
        num_compared=len(compared),
        num_truncated=reasons[FinishReason.LENGTH],
        num_late=reasons[FinishReason.LATE],
        num_lost=reasons[FinishReason.LOST],
        num_reward_errors=sum(bool(one.score and one.score.error) for one in samples),
        num_refused=sum(group.cause == "refused" for group in groups),
        num_prompt_tokens=num_read,
        num_sampled_tokens=num_sampled,
        tokens_mean=num_sampled / len(samples) if samples else None,
        seconds=seconds,
        cost=None if prices is None else prices.compute_cost(*(billed or (num_read, num_sampled))),
    )


def list_rewards(group: TriedGroup) -> list[float]:
    """Return the rewards of a prompt group's samples that have one."""
    scores = [one.score.reward for one in group.samples if one.score is not None]
    return [reward for reward in scores if reward is not None]


def _list_compared_rewards(groups: Sequence[TriedGroup]) -> list[list[float]]:
    """Return the rewards of each prompt group that has two or more."""
    return [rewards for rewards in map(list_rewards, groups) if len(rewards) > 1]


def count_read_tokens(one: TriedSample) -> int:
    """Return the tokens of a sample that the policy did not sample, each counted once."""
    return len(one.sample.tokens) - one.num_sampled_tokens


def _compute_stderr(means: Sequence[float]) -> float | None:
    if len(means) < 2:
        return None
    return stdev(means) / math.sqrt(len(means))


def draw_histogram(rewards: Sequence[float]) -> list[str]:
    """Return the distribution of rewards as lines: of each value where they are few, else of
    intervals of equal width.
    """
    values = sorted(set(rewards))
    if len(values) <= NUM_BINS:
        bars = [(f"{value:g}", sum(one == value for one in rewards)) for value in values]
    else:
        least, width = values[0], (values[-1] - values[0]) / NUM_BINS
        bins = Counter(min(int((one - least) / width), NUM_BINS - 1) for one in rewards)
        edges = [f"{least + number * width:.3g}" for number in range(NUM_BINS + 1)]
        bars = [(f"{edges[n]} to {edges[n + 1]}", bins[n]) for n in range(NUM_BINS)]
    longest, most = max(map(len, dict(bars)), default=0), max((n for _, n in bars), default=1)
    return [
        f"{name:>{longest}}  {'#' * math.ceil(count / most * BAR_WIDTH):<{BAR_WIDTH}} {count}"
        for name, count in bars
    ]


def find_problems(
    groups: Sequence[TriedGroup],
    *,
    max_new_tokens: int | None,
    max_context_tokens: int | None,
    multi_turn: bool = False,
    num_asked: int = 0,
    max_seconds: float = math.inf,
) -> list[Finding]:
    """Return what would keep a run on these prompts from learning, each with its remedy.

    Args:
        groups: The prompts with their samples.
        max_new_tokens: Bound of a sample's sampled tokens.
        max_context_tokens: Bound of prompt and completion together.
        multi_turn: Whether an environment or a program talks with the policy.
        num_asked: Prompts to play.
        max_seconds: Of the play; infinite where a person ended it.
    """
    samples = [sample for group in groups for sample in group.samples]
    limits = max_new_tokens, max_context_tokens
    return [
        *_find_refused(groups),
        *_find_stopped(groups, num_asked, max_seconds),
        *_find_truncated(samples, limits, multi_turn=multi_turn),
        *_find_late(samples),
        *_find_lost(groups, samples),
        *_find_reward_errors(samples),
        *_find_equal_rewards(groups),
        *_find_unused_tools(groups),
    ]


def _find_refused(groups: Sequence[TriedGroup]) -> Iterator[Finding]:
    """Prompts that no engine got, such as those whose tools the chat template does not show."""
    refused = [one.failure for one in groups if one.cause == "refused"]
    if refused:
        yield _build_finding(
            "prompts", f"{len(refused)} of {len(groups)} prompts can't be generated: {refused[0]}"
        )


def _find_stopped(
    groups: Sequence[TriedGroup], num_asked: int, max_seconds: float
) -> Iterator[Finding]:
    num_ended = sum(one.cause != "stopped" for one in groups)
    if num_ended < num_asked and math.isfinite(max_seconds):
        yield _build_finding(
            "time",
            f"{num_ended} of {num_asked} prompts ended within {max_seconds:g} s: raise --seconds, "
            "or ask for fewer prompts",
        )


def _find_truncated(
    samples: Sequence[TriedSample], limits: tuple[int | None, int | None], *, multi_turn: bool
) -> Iterator[Finding]:
    truncated = [one for one in samples if one.sample.finish_reason is FinishReason.LENGTH]
    if not truncated or len(truncated) < MAX_TRUNCATED_RATIO * len(samples):
        return
    max_new, max_context = limits
    num_full = sum(
        max_context is not None and len(one.sample.tokens) >= max_context for one in truncated
    )
    turns = ", or environment.max_turns where its turns ran out" if multi_turn else ""
    remedy = (
        f"raise engine.max_context_tokens = {max_context}"
        if num_full > len(truncated) / 2
        else f"raise engine.sampling.max_new_tokens = {max_new}{turns}, or ask for shorter answers"
    )
    text = f"{len(truncated)} of {len(samples)} samples were cut off by their length: {remedy}"
    yield _build_finding("lengths", text)


def _find_late(samples: Sequence[TriedSample]) -> Iterator[Finding]:
    late = [one.sample for one in samples if one.sample.finish_reason is FinishReason.LATE]
    if late:
        yield _build_finding(
            "environment",
            f"{len(late)} of {len(samples)} samples made their environment late: {late[0].error}; "
            "raise the key that it names, or make the environment faster",
        )


def _find_lost(groups: Sequence[TriedGroup], samples: Sequence[TriedSample]) -> Iterator[Finding]:
    errors = [one.sample.error for one in samples if one.sample.finish_reason is FinishReason.LOST]
    failed = [one.failure for one in groups if not one.samples and one.cause == "lost"]
    if errors or failed:
        counts = f"{len(errors)} samples and {len(failed)} whole prompt groups were lost"
        yield _build_finding("samples", f"{counts}; the first: {(errors + failed)[0]}")


def _find_reward_errors(samples: Sequence[TriedSample]) -> Iterator[Finding]:
    errors = [one.score.error for one in samples if one.score is not None and one.score.error]
    if errors:
        yield _build_finding(
            "reward",
            f"{len(errors)} of {len(samples)} samples could not be scored, and would not be "
            f"trained; the first: {errors[0]}",
        )


def _find_equal_rewards(groups: Sequence[TriedGroup]) -> Iterator[Finding]:
    compared = _list_compared_rewards(groups)
    equal = [rewards[0] for rewards in compared if len(set(rewards)) == 1]
    if not equal or len(equal) <= MAX_EQUAL_RATIO * len(compared):
        return
    values = sorted(set(equal))
    is_low = values[-1] <= 0 or max(map(max, compared)) > values[-1]
    if len(values) > 1 and not is_low:
        remedy = (
            "the samples of a prompt hardly differ; raise engine.sampling.temperature, or take "
            "prompts that the model solves sometimes"
        )
    elif is_low:
        remedy = (
            "if no sample is right, take easier prompts, a stronger model, an SFT warm-up or a "
            "reward with parts; if some are, the reward does not read them"
        )
    else:
        remedy = "take harder prompts, or see whether a wrong answer gets less"
    shown = ", ".join(f"{value:g}" for value in values[:MAX_VALUES])
    yield _build_finding(
        "rewards",
        f"in {len(equal)} of {len(compared)} prompt groups all rewards are equal ({shown}), and "
        f"such groups train nothing: {remedy}",
    )


def _find_unused_tools(groups: Sequence[TriedGroup]) -> Iterator[Finding]:
    offered = [one for group in groups if group.issued.tools for one in group.samples]
    if offered and not any(
        turn.role == "tool" or turn.tool_calls for one in offered for turn in one.sample.turns
    ):
        yield _build_finding(
            "tools",
            f"none of {len(offered)} samples that were offered tools got a result of one: look "
            "above whether the prompt explains how to call them, and whether "
            "environment.tool_call_format fits the model",
        )


def _build_finding(what: str, text: str) -> Finding:
    return Finding(what, False, text[:MAX_FINDING_CHARACTERS])
