"""Prints what reward functions give: to one completion, to many, and where two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from relax_events.cli.output import print_json, print_pairs, print_table
from relax_events.cli.parameters import Output
from relax_events.cli.run_reader import excerpt
from relax_events.printable import printable

if TYPE_CHECKING:
    from relax_events.rewards.comparison import Differences
    from relax_events.rewards.registry import RewardDescription
    from relax_events.rewards.trial import ScoredCompletion


def print_description(found: RewardDescription) -> None:
    """Print what a reward gives, the metadata that it reads, its options and its source."""
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


def show_differences(found: Differences, output: Output) -> None:
    """Print the counts, and each example with what both functions have read from it."""
    if output == "json":
        print_json(asdict(found))
        return
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
