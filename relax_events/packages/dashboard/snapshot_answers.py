"""The answers that a snapshot of a run's page holds, as the page's server gives them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import structlog

from relax_events.api.errors import RelaxError
from relax_events.api.events import now_micros
from relax_events.api.log import RunLog
from relax_events.api.runs import RunConfig
from relax_events.packages.dashboard import details, views
from relax_events.packages.dashboard.registry import find_runbook
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.sample_columns import SampleQuery, SampleTable

log = structlog.get_logger()
WINDOWS = (30, 120, 600, 3600, 21600)
"""Of the timeline, seconds; as the page offers them."""
MAX_ROWS = 600
MAX_NEWEST = 200
MAX_DETAILED = 16
"""Samples with all their tokens, of the first and of the newest train step: those with the highest
and the lowest rewards, and the one in the middle."""
MAX_TOKENS = 1024
MAX_VERSIONS = 3
MAX_DEAD_LETTERS = 50
MAX_MEDIA_BYTES = 4 * 1024**2
NOT_SUMMED_UP = ("curves", "config", "evaluations", "weights_digests", "source", "staleness_counts")


def collect_answers(
    config: RunConfig, reader: RunReader, report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the page asks of its server, by the name of the question.

    What can't be read, for example since it was purged, is left out.

    Args:
        config: The run.
        reader: Of its log.
        report: As in `report.json`.
    """
    with ExitStack() as opened:
        run_log = _attempt(lambda of: opened.enter_context(details.open_log(of)), config)
        return _collect(config, reader, report, run_log)


def _collect(
    config: RunConfig, reader: RunReader, report: Mapping[str, Any], run_log: RunLog | None
) -> dict[str, Any]:
    table = reader.table
    dead_letters = _attempt(details.list_dead_letters, run_log, otherwise=[])
    alarms = views.list_alarms(reader, dead_letters)
    rows, detailed = choose_rows(table, report["curves"]["train_step"])
    answers: dict[str, Any] = {
        "run_id": config.run.id,
        "written_at": now_micros() // 1000,
        "report": {name: value for name, value in report.items() if name not in NOT_SUMMED_UP},
        "summary": views.build_summary(reader),
        "alarms": {"alarms": alarms},
        "overview": views.build_overview(reader),
        "fleet": views.build_fleet(reader),
        "timeline": {
            str(seconds): views.build_timeline(reader, seconds=seconds) for seconds in WINDOWS
        },
        "tails": views.build_tails(reader),
        "lag": {"rows": _attempt(details.read_lag, config, otherwise=[])},
        "config": {"config": report["config"], "other": {}},
        "dead-letters": {"rows": dead_letters[:MAX_DEAD_LETTERS]},
        "dead_letters": {
            letter["id"]: shown
            for letter in dead_letters[:MAX_DEAD_LETTERS]
            if (shown := _attempt(details.show_dead_letter, run_log, letter["id"]))
        },
        "runbooks": {
            alarm["runbook"]: text
            for alarm in alarms
            if alarm["runbook"] and (text := _attempt(find_runbook, alarm["runbook"]))
        },
        "samples": {
            "rows": table.describe(rows),
            "num_samples": len(table),
            "choices": views.build_choices(table),
        },
        "texts": _attempt(details.read_texts, run_log, table, rows, otherwise={}),
        "source": _source(report),
    }
    return answers | _read_details(run_log, table, detailed) | _read_lineage(run_log, reader)


def choose_rows(table: SampleTable, steps: list[int]) -> tuple[list[int], list[int]]:
    """Return the rows that a snapshot lists, and those among them with all their tokens.

    Listed are the newest, others at even distances over the run, and those of the first and of the
    newest train step.

    Args:
        table: All samples.
        steps: The committed train steps.
    """
    newest = table.select(SampleQuery(count=MAX_NEWEST)).rows
    spread = np.linspace(0, len(table) - 1, min(MAX_ROWS - MAX_NEWEST, len(table))).astype(int)
    detailed: list[int] = []
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        bounds = {"step": (float(step), float(step))}
        query = SampleQuery(bounds=bounds, outcome="trained", sort="reward", count=len(table))
        rows = list(table.select(query).rows)
        half = MAX_DETAILED // 4
        if len(rows) > 2 * half:
            rows = [*rows[:half], rows[len(rows) // 2], *rows[-half:]]
        detailed += rows
    listed = dict.fromkeys(int(row) for row in [*newest, *spread.tolist(), *detailed])
    return sorted(listed), [int(row) for row in dict.fromkeys(detailed)]


def _read_details(run_log: RunLog | None, table: SampleTable, rows: list[int]) -> dict[str, Any]:
    """Return the chosen samples with their tokens, and their media as `data:` addresses."""
    samples: dict[int, Any] = {}
    media: dict[str, str] = {}
    left = MAX_MEDIA_BYTES
    for row in rows:
        sample = _attempt(details.read_sample, run_log, table, row)
        if sample is None:
            continue
        sample["tokens_table"] = sample["tokens_table"][:MAX_TOKENS]
        samples[row] = sample
        for number in range(len(sample["media"])):
            shown = _attempt(details.render_media, run_log, table, row, number, 0)
            if shown is None or len(shown[1]) > left:
                continue
            left -= len(shown[1])
            media[f"{row}/{number}"] = (
                f"data:{shown[0]};base64,{base64.b64encode(shown[1]).decode()}"
            )
    return {"details": samples, "media": media}


def _read_lineage(run_log: RunLog | None, reader: RunReader) -> dict[str, Any]:
    """Return where the newest versions come from."""
    newest = reader.table.newest_version
    versions = range(max(newest - MAX_VERSIONS + 1, 0), newest + 1)
    return {
        "newest_version": newest,
        "versions": {
            version: lineage
            for version in versions
            if (lineage := _attempt(details.read_lineage_of_version, run_log, version))
        },
    }


def _source(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the overview of the run that a replay or fork began from."""
    source = report["source"]
    if source is None:
        return None
    return {
        "run_id": source["run_id"],
        "overview": {
            "steps": report["curves"]["train_step"],
            "committed_at": [],
            "columns": source["curves"],
            "phases": {},
            "marks": [],
            "staleness_counts": [],
            "components": {},
            "evaluations": [],
            "groups": {"steps": [], "signalless": [], "truncated": []},
        },
    }


def _attempt(read: Callable[..., Any], source: Any, *arguments: Any, otherwise: Any = None) -> Any:
    """Return what a call reads from a source, or something else where there is no source, or it or
    a store does not have it.
    """
    if source is None:
        return otherwise
    try:
        return read(source, *arguments)
    except (RelaxError, OSError) as error:
        log.debug("report.part_not_read", error=str(error))
        return otherwise
