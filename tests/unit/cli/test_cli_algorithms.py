"""`relax algorithms`: its output as a table and as JSON."""

from __future__ import annotations

import orjson
import pytest

from relax_events.cli.algorithms import algorithms
from relax_events.errors import ConfigError


def test_list_names_every_installed_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    algorithms()
    table = capsys.readouterr().out.splitlines()
    algorithms(output="json")
    rows = orjson.loads(capsys.readouterr().out)
    assert [line.split()[0] for line in table] == ["name", *(row["name"] for row in rows)]
    assert {"grpo", "dapo", "gspo", "sapo", "cispo", "rloo", "gdpo"} <= {
        row["name"] for row in rows
    }
    assert all(row["source"] for row in rows)


def test_show_prints_formula_source_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    algorithms("gspo")
    text = capsys.readouterr().out
    assert "s = exp(mean over the sample's tokens of lp_t - lo_t)" in text
    assert "arXiv 2507.18071" in text
    algorithms("gdpo", output="json")
    reported = orjson.loads(capsys.readouterr().out)
    assert (
        reported["needs"] == "rewards in components; the whole step before its first backward pass"
    )
    assert (reported["settings"]["clip_high"], reported["settings"]["whiten_advantages"]) == (
        "0.2",
        '"samples"',
    )
    assert "gate_positive" not in reported["settings"]


def test_show_lists_installed_algorithms_when_the_name_is_unknown() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.name = 'gpro' is not installed; installed are cispo, dapo"
    ):
        algorithms("gpro")
