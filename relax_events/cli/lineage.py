"""`relax lineage`: from weights to data, and from data to weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relax_events.cli.output import (
    excerpt,
    format_number,
    format_time,
    print_fields,
    print_json,
    print_rows,
)
from relax_events.cli.parameters import Output, Overrides, RunFile

if TYPE_CHECKING:
    from relax_events.history.lineage.prompt import PromptUse
    from relax_events.history.lineage.reader import SampleLineage, Stage
    from relax_events.history.lineage.version import VersionLineage

DIGEST_SIGNS = 12


def show_lineage(
    item: str, config: RunFile, *overrides: Overrides, output: Output = "table"
) -> None:
    """Follow weights back to data, and data to weights: what made a policy version, a sample's way
    record by record, or each use of a prompt and the train steps that it was in.

    Example: relax lineage version:1 configs/quickstart.toml && relax lineage 000000-0000-0/0
        configs/quickstart.toml

    Args:
        item: version:V, a policy version, of which 0 are the initial weights; the id of a sample,
            such as 000012-0003-0/5; the id of a prompt group, such as 000012-0003-0; or row:N, a
            row of the data, from 0.
    """
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.errors import ConfigError
    from relax_events.history.lineage.prompt import prompt_lineage
    from relax_events.history.lineage.reader import SampleLineage, sample_lineage
    from relax_events.history.lineage.version import VersionLineage, version_lineage

    kind, _, number = item.rpartition(":")
    if (kind and not (kind in ("version", "row") and number.isdecimal())) or item.isdecimal():
        raise ConfigError(
            f"{item!r} has no lineage; give version:V, row:N, or the id of a sample or of a prompt "
            "group"
        )
    with open_run_log(config, overrides, name="lineage") as log:
        lineage = (
            version_lineage(log, int(number))
            if kind == "version"
            else sample_lineage(log, item)
            if "/" in item
            else prompt_lineage(log, number)
        )
        note_unreadable(log)
    if output == "json":
        print_json(lineage)
    elif isinstance(lineage, VersionLineage):
        _print_version(lineage)
    elif isinstance(lineage, SampleLineage):
        print("\n".join(sample_lines(lineage)))
    else:
        _print_uses(lineage)


def _print_version(lineage: VersionLineage) -> None:
    digest = lineage.base_digest[:DIGEST_SIGNS] or "unknown"
    fields = {
        "version": lineage.policy_version,
        "published": f"{format_time(lineage.published_at)}  {lineage.published_position}",
        "weights": lineage.artifact,
        "adapters of": lineage.base_model and f"{lineage.base_model}, digest {digest}",
    }
    if lineage.train_step is None or lineage.committed_at is None:
        fields["made from"] = "the initial weights: no train step made them"
    else:
        counts = ", ".join(
            f"{count} {age} behind" for age, count in enumerate(lineage.staleness_counts) if count
        )
        fields |= {
            "made from": f"version {lineage.policy_version - 1} by train step {lineage.train_step}",
            "committed": f"{format_time(lineage.committed_at)}  {lineage.step_position}",
            "prompt groups": len(lineage.prompt_group_ids),
            "samples": f"{len(lineage.samples)}: {counts}",
            "scored by": {
                (
                    f"{reward.reward_name or 'unknown reward function'} "
                    f"{reward.reward_digest[:DIGEST_SIGNS] or 'unknown'}"
                ): f"{reward.num_samples} samples, mean {reward.mean_reward:.3f}"
                for reward in lineage.rewards
            },
        }
    print_fields({name: value for name, value in fields.items() if value not in ("", {})})
    if lineage.train_step is None:
        return
    print()
    rows = [
        [
            sample.sample_id,
            sample.policy_version,
            _row(sample.data_row, sample.row),
            format_number(sample.reward),
            format_number(sample.advantage),
            sample.position,
        ]
        for sample in lineage.samples
    ]
    print_rows(["sample", "version", "row", "reward", "advantage", "record"], rows)


def sample_lines(lineage: SampleLineage) -> Iterator[str]:
    """Give a sample's way as lines."""
    again = f", generated {lineage.num_generations} times" if lineage.num_generations > 1 else ""
    yield f"sample {lineage.sample_id}{again}"
    for stage in lineage.stages:
        yield f"  {format_time(stage.at)}  {stage.what:<11} {stage.position}"
        yield f"{'':<34}{facts_text(stage)}"
    if lineage.first_version is not None:
        yield f"in version {lineage.first_version} and every later one"


def facts_text(stage: Stage) -> str:
    """Return the details of a stage on one line; numbers and digests are shortened."""
    return ", ".join(
        f"{name} {_fact(name, value)}"
        for name, value in stage.facts.items()
        if value is not None and value != ""
    )


def _fact(name: str, value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else str(value)[:DIGEST_SIGNS]
        if name == "reward_digest"
        else str(value)
    )


def _print_uses(uses: list[PromptUse]) -> None:
    print(excerpt(uses[0].prompt, 150))
    print()
    rows = [
        [
            use.prompt_group_id,
            _row(use.data_row, use.row),
            format_time(use.issued_at),
            use.outcome,
            use.train_step,
            format_number(use.mean_reward),
            use.issued_position,
            use.ended_position or "-",
        ]
        for use in uses
    ]
    print_rows(
        [
            "prompt group",
            "row",
            "issued",
            "outcome",
            "step",
            "mean reward",
            "issued at",
            "ended at",
        ],
        rows,
    )
    for use in uses:
        if use.samples:
            print()
            lines = [
                [
                    line.sample_id,
                    line.policy_version,
                    line.outcome,
                    format_number(line.reward),
                    line.position,
                ]
                for line in use.samples
            ]
            print_rows(["sample", "version", "outcome", "reward", "record"], lines)


def _row(data_row: int | None, row: int) -> str:
    """Return a row of the data; a position in the stream of prompts, marked so, where the data is
    not at hand.
    """
    return f"#{row}" if data_row is None else str(data_row)
