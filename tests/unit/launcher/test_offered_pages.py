"""Pages that packages offer next to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.launcher.run import offer_pages
from relax_events.plugins import PAGES
from relax_events.reports.terminal import ProgressDisplay
from tests.unit.run_events import run_config


@pytest.mark.unit
@pytest.mark.parametrize(
    ("is_on", "is_installed", "text"),
    [
        (True, True, "watch this run: http://page\n"),
        (False, True, ""),
        (True, False, "this run has no page: "),
    ],
)
def test_page_is_offered_unless_it_is_turned_off_and_a_line_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, *, is_on: bool, is_installed: bool, text: str
) -> None:
    open_pages = []

    @contextmanager
    def offer(config: RunConfig, *, run_file: Path, show: Any) -> Iterator[None]:
        open_pages.append(run_file)
        show("http://page")
        yield
        open_pages.clear()

    def load(group: str) -> list[Any]:
        assert (group, is_on) == (PAGES, True)
        return [offer] if is_installed else []

    monkeypatch.setattr("relax_events.launcher.run.load_installed", load)
    config = run_config(num_steps=1)
    telemetry = config.telemetry.model_copy(update={"dashboard": is_on})
    config = config.model_copy(update={"telemetry": telemetry})
    stream = StringIO()
    with ProgressDisplay(config, stream=stream) as display, ExitStack() as stack:
        offer_pages(config, Path("run.json"), display, stack=stack)
        assert open_pages == [Path("run.json")][: is_on and is_installed]
    assert open_pages == []
    assert stream.getvalue().startswith(text)
    assert len(stream.getvalue().splitlines()) == bool(text)
