"""Renders a prompt group as a card of an HTML page: the prompt with its media, and a row for each
sample. All external text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from relax_events.events.parts import ChatMessage, MediaRef
from relax_events.history.samples.view import SampleView
from relax_events.reports.chart_scales import format_number

MAX_CHARACTERS = 4000
"""Maximum length of one text."""
HEAD = (
    '<tr><th>sample</th><th class="number">reward</th><th>outcome</th><th '
    'class="number">tokens</th><th>end</th><th>answer</th></tr>'
)
RenderMedia = Callable[[MediaRef], str]


def render_group(
    views: Sequence[SampleView], *, newest_version: int, render_media: RenderMedia
) -> str:
    """Return the card of samples of one prompt group.

    Args:
        views: The samples, at least one.
        newest_version: Of the run, for the staleness of untrained samples.
        render_media: Renders media as HTML.
    """
    sample = views[0].sample
    origin = (
        f"version {sample.policy_version}, issued for step {sample.key.train_step}, row "
        f"{sample.key.row} "
        "of the prompt stream"
    )
    prompt = "".join(render_message(message, render_media) for message in sample.messages)
    answer = (
        f'<div class="message"><b>reference answer</b>{render_text(sample.answer)}</div>'
        if sample.answer
        else ""
    )
    rows = "".join(render_sample(view, newest_version=newest_version) for view in views)
    title = f"<h3>{escape(sample.prompt_group_id)} <small>{escape(origin)}</small></h3>"
    return f'<article class="card">{title}{prompt}{answer}<table>{HEAD}{rows}</table></article>'


def render_message(message: ChatMessage, render_media: RenderMedia) -> str:
    """Return a message: its texts, with its media between them."""
    parts = "".join(
        render_text(part.text or "") if part.media is None else render_media(part.media)
        for part in message.parts
    )
    return f'<div class="message"><b>{escape(message.role)}</b>{parts}</div>'


def render_sample(view: SampleView, *, newest_version: int) -> str:
    """Return a sample as a row of the card's table."""
    sample, line = view.sample, view.line(newest_version)
    outcome = (
        f"{line.outcome} in step {line.train_step}, {line.staleness:+d}"
        if line.train_step is not None
        else line.outcome
    )
    cells = "".join(render_cell(*cell) for cell in _numbers(view, outcome))
    judgement = view.score.judge_response if view.score is not None else ""
    judged = f'<div class="message"><b>judge</b>{render_text(judgement)}</div>' if judgement else ""
    index = escape(sample.sample_id.rpartition("/")[2])
    return f"<tr><td>{index}</td>{cells}<td>{render_text(sample.completion)}{judged}</td></tr>"


def _numbers(view: SampleView, outcome: str) -> Iterator[tuple[str, bool]]:
    failure = view.score.error if view.score is not None and view.score.reward is None else ""
    yield (
        ("-" if view.reward is None else format_number(view.reward))
        + (f" ({failure})" if failure else ""),
        True,
    )
    yield outcome, False
    yield str(view.num_completion_tokens), True
    yield view.sample.finish_reason.value, False


def render_cell(text: str, is_number: bool) -> str:
    """Return a cell of the table."""
    return f'<td class="number">{escape(text)}</td>' if is_number else f"<td>{escape(text)}</td>"


def render_text(text: str) -> str:
    """Return a text, truncated where it is long."""
    more = f" ... ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""
    return f'<span class="said">{escape(text[:MAX_CHARACTERS])}{more}</span>'
