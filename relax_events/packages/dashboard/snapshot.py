"""Writes `report.html`: the page of a run with its data inside, in one file that needs no server.

The file holds the page's own modules and the answers that its server would give. A browser opens it
from the disk; its policy lets it load nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import orjson
import structlog

from relax_events.api.runs import RunConfig
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.snapshot_answers import collect_answers
from relax_events.secret_handling import write_private

log = structlog.get_logger()
STATIC = Path(__file__).parent / "static"
IMPORT = re.compile(r'((?:from|import) )"(\.{1,2}/[\w./]+\.js)"')
READ_SECONDS = 30.0
"""Samples that can't be read in this time are left out, the oldest first."""


def write_snapshot(config: RunConfig, report: Mapping[str, Any]) -> Path:
    """Write the page of a run as `report.html` into its folder, atomically, and return its path.

    Args:
        config: The run, with the broker's address filled in.
        report: As in `report.json`.
    """
    reader = RunReader(config).start()
    try:
        if not reader.wait(num_steps=report["steps"], timeout_seconds=READ_SECONDS):
            log.warning("report.incomplete", run_id=config.run.id, error=reader.status.trouble)
        answers = collect_answers(config, reader, report)
    finally:
        reader.close()
    path = config.run_directory / "report.html"
    write_private(path, render_snapshot(answers).encode(errors="replace"))
    return path


def render_snapshot(answers: Mapping[str, Any]) -> str:
    """Return the page as one file.

    Args:
        answers: What `collect_answers` returns.
    """
    data = orjson.dumps(answers, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    data = data.replace("<", "\\u003c")  # no text of the log can end the element
    imports = orjson.dumps({"imports": build_import_map()}).decode()
    start = 'import "relax/js/app.js";'
    scripts = " ".join(f"'{_hash(text)}'" for text in (imports, start))
    policy = (
        f"default-src 'none'; script-src {scripts} data:; style-src 'unsafe-inline'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    style = "\n".join(_read(name) for name in ("vendor/uPlot.min.css", "app.css"))
    icon = base64.b64encode(_read("icon.svg").encode()).decode()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(str(answers['run_id']))}</title>\n"
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n'
        f"<style>\n{style}\n</style>\n"
        f'<script type="application/json" id="snapshot">{data}</script>\n'
        f'<script type="importmap">{imports}</script>\n'
        f'<script type="module">{start}</script>\n'
        f"</head>\n{_body()}\n</html>\n"
    )


def build_import_map() -> dict[str, str]:
    """Return each module's name with its text as a `data:` address; modules name each other."""
    return {
        f"relax/{path.relative_to(STATIC).as_posix()}": _encode_module(path)
        for path in sorted(STATIC.rglob("*.js"))
    }


def _encode_module(path: Path) -> str:
    def rename(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve().relative_to(STATIC.resolve())
        return f'{match[1]}"relax/{target.as_posix()}"'

    text = IMPORT.sub(rename, path.read_text("utf-8"))
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _read(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def _body() -> str:
    """Return the body of the live page, which is the snapshot's too."""
    text = _read("index.html")
    return text[text.index("<body>") : text.index("</body>") + len("</body>")]


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
