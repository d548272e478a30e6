"""Untrusted text on a terminal."""

from __future__ import annotations

import io
import json

import pytest

from relax_events.cli.output import print_fields, print_json, print_rows
from relax_events.printable import PrintableStream, printable


def test_printable_escapes_control_characters() -> None:
    assert (
        printable("raised ValueError: \x1b]0;owned\x07\x1b[2J\r\x9b31m")
        == r"raised ValueError: \u001b]0;owned\u0007\u001b[2J\u000d\u009b31m"
    )
    assert printable("a\u202eb\u2066c") == r"a\u202eb\u2066c"
    assert printable("tab\tline\nÜmlaut 中文 🙂") == "tab\tline\nÜmlaut 中文 🙂"


def test_printed_tables_escape_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", PrintableStream(written))
    print_rows(["worker"], [["reward-0\x1b[2J"]])
    print_fields({"error": "\x07"})
    assert "\x1b" not in written.getvalue()
    assert "\x07" not in written.getvalue()
    assert r"reward-0\u001b[2J" in written.getvalue()


def test_printable_stream_keeps_json_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", PrintableStream(written))
    text = "".join(map(chr, range(0x100))) + "\u202e"
    print_json({"text": text})
    assert json.loads(written.getvalue()) == {"text": text}
