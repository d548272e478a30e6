"""Flags that select samples, shared by commands, and samples as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from relax_events.cli.output import (
    excerpt,
    format_number,
    format_time,
    print_fields,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from relax_events.events.parts import ChatMessage, ContentPart
    from relax_events.events.types import SampleScored
    from relax_events.history.samples.detail import SampleDetail, TokenRow
    from relax_events.history.samples.filter import SampleFilter
    from relax_events.history.samples.view import SampleLine


@dataclass(frozen=True)
class Which:
    """Which samples; all that is given must hold.

    Args:
        version: Policy version that generated them: 3, 3..7, 3.. or ..7.
        reward: Their reward: ..0.2 or 0.9.., both ends included.
        group: One prompt group, such as 000012-0003-0.
        sample: One sample, such as 000012-0003-0/5.
        step: The train step that trained them.
        worker: The rollout worker that generated them, such as rollout-1.
        contains: Text in the prompt or the completion.
    """

    version: str = ""
    reward: str = ""
    group: str = ""
    sample: str = ""
    step: int | None = None
    worker: str = ""
    contains: str = ""

    def as_filter(self) -> SampleFilter:
        """Check the flags.

        Raises:
            ConfigError: One of them is invalid; the text names it.
        """
        from relax_events.history.samples.filter import SampleFilter, parse_bounds

        return SampleFilter(
            versions=parse_bounds(self.version, flag="--version"),
            rewards=parse_bounds(self.reward, flag="--reward"),
            prompt_group_id=self.group,
            sample_id=self.sample,
            train_step=self.step,
            worker_id=self.worker,
            contains=self.contains,
        )

    @property
    def has_end(self) -> bool:
        """Whether the selection is in the past, so that no further samples can match."""
        return bool(
            self.group
            or self.sample
            or self.step is not None
            or (self.version and not self.version.endswith(".."))
        )


HEAD = (
    f"{'sample':<17} {'version':>7}  {'outcome':<13} {'reward':>7} {'tokens':>6}  {'end':<6}  "
    "completion"
)
FIXED_WIDTH = len(HEAD) - len("completion")
TOKEN_COLUMNS = [
    "position",
    "token",
    "text",
    "trained",
    "rollout",
    "actor",
    "reference",
    "teacher",
    "advantage",
]


def print_line(line: SampleLine, output: Literal["table", "json"], *, with_head: bool) -> None:
    """Print a sample of a list, for people or as a JSON object on a line."""
    if output == "json":
        print_json(line, on_a_line=True)
        return
    if with_head:
        print(HEAD)
    print(line_text(line, width=shutil.get_terminal_size((150, 24)).columns), flush=True)


def line_text(line: SampleLine, *, width: int) -> str:
    """Return a sample on one line; `trained +1` was trained one version behind, `open +1` is one
    behind the newest version now.
    """
    standing = (
        f"{line.outcome} {line.staleness:+d}"
        if line.outcome in ("trained", "open")
        else line.outcome
    )
    completion = excerpt(line.completion, max(width - FIXED_WIDTH, 20))
    numbers = (
        f"{line.policy_version:>7}  {standing:<13} {format_number(line.reward):>7} "
        f"{line.num_completion_tokens:>6}"
    )
    return f"{line.sample_id:<17} {numbers}  {line.finish_reason:<6}  {completion}"


def print_sample(detail: SampleDetail) -> None:
    """Print a sample as a conversation, with its outcome and its tokens."""
    print("\n".join(conversation_text(detail)))
    print()
    print_fields(sample_fields(detail))
    if detail.tokens:
        print()
        print_rows(
            TOKEN_COLUMNS, [token_cells(index, row) for index, row in enumerate(detail.tokens)]
        )


def conversation_text(detail: SampleDetail) -> Iterator[str]:
    """Give the lines of a sample's messages, its completion and its answer."""
    sample, score = detail.view.sample, detail.view.score
    for message in (*sample.messages, *sample.turns[:-1]):
        yield from indented(message.role, message_text(message))
    yield from indented("completion", sample.completion)
    yield from indented("answer", sample.answer)
    if score is not None and score.judge_response:
        yield from indented("judge response", score.judge_response)


def sample_fields(detail: SampleDetail) -> dict[str, Any]:
    """Return what became of a sample, and where it is from, for people."""
    sample, view = detail.view.sample, detail.view
    segments = ", ".join(
        f"{segment.num_tokens} tokens of version {segment.policy_version}"
        for segment in sample.version_segments
    )
    lengths = ", ".join(
        f"{length} (truncated)" if number in sample.truncated_paths else f"{length}"
        for number, length in enumerate(sample.path_lengths)
    )
    times = f", {detail.num_generations} times" if detail.num_generations > 1 else ""
    fields = {
        "sample": f"{sample.sample_id} at {view.position}",
        "generated": f"{format_time(sample.rolled_out_at)} by {sample.worker_id}{times}",
        "error": sample.error,
        "reward": score_text(view.score),
        "other scores": {name: score_text(score) for name, score in detail.other_scores.items()},
        "outcome": outcome_text(detail),
        "versions": f"{segments}; owned by version {sample.policy_version}",
        "tokens": (
            f"{sample.num_prompt_tokens} prompt, {view.num_completion_tokens} completion, ended by "
            f"{sample.finish_reason.value}"
        ),
        "paths": lengths and f"{len(sample.path_lengths)} of {lengths} tokens; shown is the last",
        "issued": (
            f"for step {sample.key.train_step}, slot {sample.key.group_index}, attempt "
            f"{sample.key.attempt}; row {sample.key.row} of the prompt stream"
        ),
    }
    return {name: value for name, value in fields.items() if value}


def score_text(score: SampleScored | None) -> str:
    """Say what a reward function gave."""
    if score is None:
        return "not scored"
    origin = (
        f"by {score.reward_name} (version {score.reward_digest[:12] or 'unknown'}) in "
        f"{score.seconds:.3f} s"
    )
    if score.reward is None:
        return f"failed {origin}: {score.error}" if score.error else "none: no function scores it"
    return f"{reward_text(score)} {origin}"


def reward_text(score: SampleScored) -> str:
    """Return a reward with its parts."""
    from relax_events.history.samples.view import list_values

    parts = [f"{name} {value:g}" for name, value in score.components.items()]
    if (by_turn := list_values(score.turn_rewards)) is not None:
        parts.append(f"by turn {' '.join(f'{value:g}' for value in by_turn)}")
    if score.token_rewards is not None:
        parts.append(f"by token, {len(score.token_rewards)} of them")
    text = ", ".join(parts)
    return f"{score.reward:g}{f' ({text})' if text else ''}"


def score_document(score: SampleScored) -> dict[str, Any]:
    """Return a score for programs; rewards by turn and token that lie in the object store are left
    out.
    """
    from relax_events.history.samples.view import list_values

    shown = {
        "turn_rewards": list_values(score.turn_rewards),
        "token_rewards": list_values(score.token_rewards),
    }
    return asdict(replace(score, turn_rewards=None, token_rewards=None)) | shown


def outcome_text(detail: SampleDetail) -> str:
    """Describe the outcome of a sample."""
    view, ended = detail.view, detail.view.outcome_event
    if view.train_step is not None:
        behind = f"{view.staleness(detail.newest_version)} versions behind"
        return (
            f"trained in step {view.train_step}, {behind}; in version {view.train_step + 1} and "
            "later"
        )
    return f"{view.outcome}{f': {ended.reason}' if ended is not None and ended.reason else ''}"


def message_text(message: ChatMessage) -> str:
    """Return a message with its thoughts and tool calls, its media as `part_text` has them."""
    from relax_events.data.messages import describe_message

    return describe_message(message, show_part=part_text)


def part_text(part: ContentPart) -> str:
    """Return a piece of a message; media as their type, size and address."""
    media = part.media
    if media is None:
        return part.text or ""
    extent = f"{media.extent}, " if media.extent else ""
    return f"[{media.media_type}, {extent}{media.num_bytes} bytes: {media.uri}]"


def indented(name: str, text: str) -> Iterator[str]:
    """Give a named text, its lines indented; what a terminal would obey is written out."""
    shown = "".join(
        sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text
    )
    yield f"{name}:"
    yield textwrap.indent(shown, "    ") if shown else "    (empty)"


def token_cells(index: int, row: TokenRow) -> list[Any]:
    """Return a token as cells of a table."""
    logprobs = (row.rollout_logprob, row.actor_logprob, row.ref_logprob, row.teacher_logprob)
    numbers = (
        format_number(value if row.is_trained else None, 4) for value in (*logprobs, row.advantage)
    )
    return [
        index,
        row.token,
        excerpt(row.text, 24) if row.text.strip() else repr(row.text),
        "yes" if row.is_trained else "",
        *numbers,
    ]


def sample_document(detail: SampleDetail) -> dict[str, Any]:
    """Return a sample for programs."""
    sample, view, ready = detail.view.sample, detail.view, detail.ready
    return {
        **asdict(view.line(detail.newest_version)),
        "messages": [
            {"role": message.role, "content": message_text(message)} for message in sample.messages
        ],
        "turns": [
            {"role": message.role, "content": message_text(message)} for message in sample.turns
        ],
        "answer": sample.answer,
        "metadata": sample.metadata,
        "row": sample.key.row,
        "score": score_document(view.score) if view.score else None,
        "other_scores": {
            name: score_document(score) for name, score in detail.other_scores.items()
        },
        "ended": asdict(view.outcome_event) if view.outcome_event else None,
        "versions": [asdict(segment) for segment in sample.version_segments],
        "num_prompt_tokens": sample.num_prompt_tokens,
        "path_lengths": sample.path_lengths,
        "truncated_paths": sample.truncated_paths,
        "num_generations": detail.num_generations,
        "ready_at": ready.position if ready else None,
        "tokens": [asdict(row) for row in detail.tokens],
    }
