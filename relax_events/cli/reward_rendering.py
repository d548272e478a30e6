"""Prints what reward functions give: to one completion, to many, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from relax_events.cli.output import (
    excerpt,
    format_number,
    print_fields,
    print_json,
    print_rows,
)
from relax_events.cli.parameters import Output
from relax_events.printable import printable

if TYPE_CHECKING:
    from relax_events.rewards.comparison import Comparison
    from relax_events.rewards.registry import RewardDescription
    from relax_events.rewards.trial import ScoredCompletion


def print_description(reward: RewardDescription) -> None:
    """Print what a reward gives, the metadata that it reads, its options and its source."""
    print(f"{reward.name}: scores {reward.scores}\n\n{reward.text}")
    if reward.failures:
        print("\nFailures")
        print("\n".join(reward.failures))
    if reward.metadata:
        print("\nMetadata that it reads")
        print_rows(["key", "what"], [list(pair) for pair in reward.metadata.items()])
    if reward.options:
        print("\nOptions, for [reward.options]")
        rows = [
            [option.name, option.kind, "required" if option.is_required else repr(option.default)]
            for option in reward.options
        ]
        print_rows(["option", "type", "default"], rows)
    if reward.source:
        print(f"\nSource: {reward.source}")


def print_comparison(
    result: Comparison, output: Output, facts: Mapping[str, str] | None = None
) -> None:
    """Print counts and metrics, and each example with what both scorers have read from it.

    Args:
        result: The comparison.
        output: For people or for programs.
        facts: Printed before it.
    """
    if output == "json":
        print_json({**(facts or {}), **asdict(result)})
        return
    rule = "" if result.threshold is None else f", by the side of {result.threshold:g}"
    lines: dict[str, Any] = {
        **(facts or {}),
        "first": result.first,
        "second": result.second,
        "samples": f"{result.num_samples}, {result.num_compared} of them compared",
        "agree": result.num_agree,
        "differ": (
            f"{result.num_differ}{rule}; first higher {result.num_first_higher}, second "
            f"higher {result.num_second_higher}"
        ),
        "failed": (
            f"{result.num_first_failed} of the first, {result.num_second_failed} of the "
            f"second, {result.num_both_failed} of both"
        ),
        "mean reward": (
            f"{format_number(result.first_mean)} first, {format_number(result.second_mean)} second"
        ),
        "mean absolute difference": format_number(result.mean_absolute_difference),
        "correlation": (
            f"{format_number(result.pearson)} Pearson, {format_number(result.spearman)} Spearman"
        ),
    }
    if result.num_prompt_groups:
        lines |= {
            "prompt groups": (
                f"{result.num_prompt_groups}, {result.num_reranked} of them ranked otherwise"
            ),
            "became informative": result.num_became_informative,
            "became uninformative": result.num_became_uninformative,
        }
    print_fields(lines)
    for example in result.examples:
        print(f"\nsample {excerpt(example.sample_id, 200)}")
        print_fields(
            {
                "reference": excerpt(example.answer, 200),
                "completion ends": excerpt(example.completion_end[-120:], 200),
                "first": printable(_format_score(example.first)),
                "second": printable(_format_score(example.second)),
            },
            indent=2,
        )


def _format_score(one: ScoredCompletion) -> str:
    """Format what a function returned, and what it has read."""
    if one.reward is None:
        return f"failed: {excerpt(one.error or '', 200)}"
    parts = [
        f"{one.reward:g}",
        excerpt(one.answer or "", 80),
        one.location or "",
        excerpt(one.why or "", 200),
    ]
    return ": ".join(part for part in parts if part)


def print_scored(one: ScoredCompletion) -> None:
    """Print the result of one completion."""
    fields = {
        "reward": one.reward,
        **one.components,
        "error": one.error,
        "answer": one.answer,
        "found": one.location,
        "why": one.why,
    }
    print_fields({key: value for key, value in fields.items() if value is not None})


def print_all_scored(scored: Sequence[ScoredCompletion]) -> None:
    """Print a line for each completion."""
    rows = [
        [
            one.sample_id,
            "" if one.reward is None else f"{one.reward:g}",
            excerpt(one.answer or "", 40),
            one.location or "",
            excerpt(one.error or one.why or "", 80),
        ]
        for one in scored
    ]
    print_rows(["line", "reward", "answer", "found", "why"], rows)
