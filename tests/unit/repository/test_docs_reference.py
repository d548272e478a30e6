"""The generated reference pages are up to date."""

import runpy
import sys
from pathlib import Path

import pytest

GENERATOR = Path(__file__).parents[3] / "docs" / "generate.py"


def test_reference_pages_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(GENERATOR), "--check"])
    assert (runpy.run_path(str(GENERATOR))["main"](), capsys.readouterr().out) == (
        0,
        "docs/reference is up to date\n",
    )
