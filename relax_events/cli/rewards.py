"""`relax rewards`: what can score a sample."""

from __future__ import annotations

from typing import Literal

from cyclopts import App

Output = Literal["table", "json"]
app = App(name="rewards", help="Look at the reward functions that are installed, or at one of your own.\n\nExample: relax rewards list")


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
