"""Renders prompt groups as HTML: a standalone page of samples.

A prompt group is a card: the prompt with its media, and a row for each sample. All external text is
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from html import escape
from importlib.resources import files
from pathlib import Path
from types import TracebackType

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, MediaRef
from relax_events.history.run_log import RunLog
from relax_events.history.samples.view import SampleView
from relax_events.reports.report_files import replace_file
from relax_events.reports.sample_media import MediaRenderer

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
        ("-" if view.reward is None else f"{view.reward:.6g}")
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


MIB = 1024**2
MAX_SAMPLES = 1000
"""Maximum samples of a page: a browser has to hold them."""
PAGE_BYTES = 32 * MIB
"""Maximum size of all media on a page."""


class SamplePage(AbstractContextManager["SamplePage"]):
    """Collects samples by prompt group and writes them into one file, atomically."""

    def __init__(self, log: RunLog, path: Path) -> None:
        """Write nothing yet.

        Args:
            log: The run's log.
            path: The file.
        """
        self._log, self._path = log, path
        self._media = MediaRenderer(log.config, max_bytes=PAGE_BYTES)
        self._groups: dict[tuple[str, int], list[SampleView]] = {}
        self.num_rows = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, self._render().encode(errors="replace"))

    @property
    def num_media(self) -> int:
        """Number of media on the page."""
        return self._media.num_rendered

    def add(self, view: SampleView) -> None:
        """Add a sample.

        Raises:
            ConfigError: There are more than a page can hold.
        """
        if self.num_rows == MAX_SAMPLES:
            raise ConfigError(
                f"a page holds at most {MAX_SAMPLES} samples; say which with --last, "
                "--limit, --step or --reward, or export .jsonl"
            )
        self._groups.setdefault(
            (view.sample.prompt_group_id, view.sample.policy_version), []
        ).append(view)
        self.num_rows += 1

    def _render(self) -> str:
        name = f"Samples of run {self._log.config.run.id}"
        cards = "".join(render_cards(self._groups.values(), self._log.newest_version, self._media))
        return render_page(
            name,
            (
                f"<header><h1>{name}</h1><p>{self.num_rows:,} samples of {len(self._groups):,} "
                f"prompt groups</p></header>{cards}"
            ),
        )


def render_cards(
    groups: Iterable[list[SampleView]], newest_version: int, media: MediaRenderer
) -> list[str]:
    """Return the cards of prompt groups."""
    return [
        render_group(views, newest_version=newest_version, render_media=media.render)
        for views in groups
    ]


def render_page(title: str, body: str) -> str:
    """Return a complete page; a content policy forbids it to load anything external and to run
    scripts.
    """
    style = files("relax_events.reports").joinpath("page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta '
        'name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
