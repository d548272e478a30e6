"""`relax rewards`: what can score a sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

if TYPE_CHECKING:
    from relax_events.rewards.trial import TriedCompletion

Output = Literal["table", "json"]
CHECK_FOUND = 6
app = App(name="rewards", help="Look at the reward functions that are installed, or at one of your own, and try them.\n\nExample: relax rewards list")


@app.command(name="list")
def list_rewards(*, output: Output = "table") -> None:
    """List the rewards that are installed, with what each checks.

    Example: relax rewards list

    Args:
        output: A table to read, or JSON for programs.
    """
    from relax_events.cli.output import print_json, print_table
    from relax_events.rewards.describing import describe_reward
    from relax_events.rewards.hub import reward_names

    found = [describe_reward(name) for name in reward_names()]
    if output == "json":
        print_json([{"name": one.name, "scores": one.scores, "summary": one.summary} for one in found])
    else:
        print_table(["reward", "scores", "what"], [[one.name, one.scores, one.summary] for one in found])


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
    from relax_events.rewards.describing import describe_reward

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
        rows = [[option.name, option.kind, "required" if option.is_required else repr(option.default)] for option in found.options]
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
    """Score completions as a run would, and show the answer that was found in each and why it is right or wrong.

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


def print_tried(one: TriedCompletion) -> None:
    """Print what there is to say about one completion."""
    from relax_events.cli.output import print_pairs

    said = {"reward": one.reward, **one.components, "error": one.error, "answer": one.answer, "found": one.place, "why": one.why}
    print_pairs({key: value for key, value in said.items() if value is not None})


def print_all_tried(tried: Sequence[TriedCompletion]) -> None:
    """Print a line for each completion."""
    from relax_events.cli.looking import excerpt
    from relax_events.cli.output import print_table

    rows = [
        [
            one.sample_id,
            "" if one.reward is None else f"{one.reward:g}",
            excerpt(one.answer or "", 40),
            one.place or "",
            excerpt(one.error or one.why or "", 80),
        ]
        for one in tried
    ]
    print_table(["line", "reward", "answer", "found", "why"], rows)
