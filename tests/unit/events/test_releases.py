"""Released schemas are files that are only ever added: read unchanged, rejected when altered,
compared field by field.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from schema_changes import ALLOWED, FORBIDDEN, changed, ended, field

from relax_events.cli.app import app
from relax_events.errors import CheckFailed, ConfigError, SchemaError
from relax_events.events.compatibility import Change, changes, field_rows
from relax_events.events.schemas import (
    Release,
    Schema,
    current_release,
    find_release,
    read_releases,
    schema_directory,
    write_release,
)

NAME = "relax.events.sample.PromptGroupEnded"
ENDED_FILE = "sample/PromptGroupEnded.avsc"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the schemas, and release them as 0.9.0 and 0.10.0."""
    copied = tmp_path / "schemas"
    shutil.copytree(schema_directory(), copied, ignore=shutil.ignore_patterns("released"))
    for version in ("0.10.0", "0.9.0"):
        write_release(copied, Release(version, current_release(copied).schemas))
    return copied


def edit(path: Path, change: str) -> None:
    """Change the source of the event that the changes are about."""
    schema: Schema = json.loads(path.read_text())
    edit, *_ = FORBIDDEN[change]
    edit({NAME: schema})
    path.write_text(json.dumps(schema))


def test_release_is_read_back_as_written(folder: Path) -> None:
    releases = read_releases(folder)
    assert [release.version for release in releases] == ["0.9.0", "0.10.0"]
    assert (
        releases[0].schemas
        == current_release(folder).schemas
        == find_release(folder, "0.9.0").schemas
    )
    assert find_release(folder, "current").version == "current"


def test_release_is_never_overwritten(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"0\.9\.0\.json exists; a release is never changed, take the next version",
    ):
        write_release(folder, Release("0.9.0", {}))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lambda text: text.replace('"row"', '"line"'),
            "has fingerprint [0-9a-f]{16}, the file says [0-9a-f]{16}",
        ),
        (lambda text: text[:-20], "is not a release: JSONDecodeError"),
        (
            lambda text: text.replace('"version": "0.9.0"', '"version": "soon"'),
            "a version must look like 1.2.3, got 'soon'",
        ),
        (lambda _: "[]", "is not a release: TypeError"),
    ],
)
def test_altered_release_is_refused(folder: Path, spoil: object, text: str) -> None:
    assert callable(spoil)
    path = folder / "released/0.9.0.json"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(SchemaError, match=text):
        read_releases(folder)


def test_error_for_unknown_release_or_event_lists_the_known_ones(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"there is no release '1\.0\.0'; released are 0\.9\.0, 0\.10\.0, and 'current' names",
    ):
        find_release(folder, "1.0.0")
    with pytest.raises(ConfigError, match=r"0\.9\.0 has no event 'Sample'; it has .*SamplesReady"):
        find_release(folder, "0.9.0").find("Sample")


def test_changes_are_listed_by_field() -> None:
    before = current_release(schema_directory()).schemas

    def all_of(schemas: dict[str, Schema]) -> None:
        for name in (
            "field with a default added",
            "field with a default removed",
            "symbol added to an enum with a default",
            "doc changed",
        ):
            ALLOWED[name](schemas)
        field(ended(schemas), "attempt")["type"] = "long"
        del schemas["relax.events.control.MetricsReported"]
        schemas["relax.events.sample.New"] = {
            "type": "record",
            "name": "New",
            "namespace": "relax.events.sample",
            "doc": "",
            "fields": [],
        }

    assert changes(before, changed(all_of).schemas) == [
        Change("relax.events.control.MetricsReported", "", "removed"),
        Change("relax.events.sample.New", "", "added"),
        Change(NAME, "judge", 'added, string, default "absent"'),
        Change(NAME, "attempt", "type int -> long"),
        Change(NAME, "row", "doc changed"),
        Change(
            NAME,
            "outcome",
            (
                "type Outcome (trained, filtered, expired, failed; else failed) -> Outcome "
                "(trained, filtered, expired, failed, postponed; else failed)"
            ),
        ),
        Change(NAME, "reason", "removed"),
    ]


def test_reordered_fields_are_reported_as_a_change() -> None:
    before = current_release(schema_directory()).schemas
    assert changes(before, changed(ALLOWED["order of the fields changed"]).schemas) == [
        Change(NAME, "", "fields in another order")
    ]


def test_nested_fields_are_shown_by_their_path() -> None:
    rows = {
        row.path: row
        for row in field_rows(current_release(schema_directory()).find("SamplesRolledOut"))
    }
    assert rows["version_segments"].type == "array of array of VersionSegment"
    assert (
        rows["version_segments[][].kept_cache"].type,
        rows["version_segments[][].kept_cache"].default,
    ) == ("boolean", "false")
    assert rows["lengths.reference.digest"].type == "Sha256 (32 bytes)"
    assert rows["messages[].parts[].media.digest"].doc == "SHA-256 of the encoded media."
    *_, issued_at, _ = field_rows(current_release(schema_directory()).find("PromptGroupIssued"))
    assert (issued_at.path, issued_at.logical_type) == ("issued_at", "timestamp-micros")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Call `relax` in this process; return its exit code and what it printed."""
    capsys.readouterr()
    code = app([*words])
    return code or 0, capsys.readouterr().out


def test_check_passes_and_lists_unreleased_schemas(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "schemas", "--check", "--directory", str(folder)) == (
        0,
        "every release reads what is written now, and the reverse\n",
    )
    source = folder / ENDED_FILE
    source.write_text(
        source.read_text().replace(
            '"fields": [',
            '"fields": [{"name": "judge", "type": "string", "doc": "New.", "default": ""},',
            1,
        )
    )
    code, out = run(capsys, "schemas", "--check", "--directory", str(folder))
    assert (code, out.splitlines()[-1]) == (0, f"not in any release as they stand: {NAME}")


def test_check_exits_with_6_and_names_every_broken_release(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder / ENDED_FILE, "type narrowed")
    code, out = run(capsys, "schemas", "--check", "--directory", str(folder), "--output", "json")
    problems = json.loads(out)["problems"]
    assert code == 6
    assert [problem["field"] for problem in problems] == ["row", "row"]
    assert [problem["what"] for problem in problems] == [
        f"current can't read what {version} wrote: long can't be read as int"
        for version in ("0.9.0", "0.10.0")
    ]
    code, out = run(capsys, "schemas", "--check", "--directory", str(folder))
    assert code == 6
    assert out.split("\n")[0].split() == ["schema", "field", "what", "remedy"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"type": "record", "name": "A"}',
        '{"type": "record", "name": "A", "namespace": "a"}',
    ],
)
def test_check_of_an_unreadable_schema_is_a_schema_error(folder: Path, text: str) -> None:
    (folder / ENDED_FILE).write_text(text)
    with pytest.raises(SchemaError, match=r"is not an Avro schema") as caught:
        app(["schemas", "--check", "--directory", str(folder)])
    assert caught.value.exit_code == 5


def test_release_dry_run_writes_nothing_and_versions_must_increase(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--directory", str(folder))
    assert run(capsys, "schemas", "--add", "1.0.0", "--dry-run", *at) == (0, "")
    assert not (folder / "released/1.0.0.json").exists()
    assert run(capsys, "schemas", "--add", "1.0.0", "--yes", *at) == (
        0,
        f"{folder / 'released/1.0.0.json'}\n",
    )
    assert read_releases(folder)[-1] == Release("1.0.0", current_release(folder).schemas)
    with pytest.raises(
        ConfigError, match=r"the version must be above 1\.0\.0, which is released, got 0\.11\.0"
    ):
        app(["schemas", "--add", "0.11.0", "--yes", *at])
    with pytest.raises(ConfigError, match=r"a version must look like 1\.2\.3, got 'next'"):
        app(["schemas", "--add", "next", "--yes", *at])


def test_release_of_a_breaking_change_is_refused(folder: Path) -> None:
    edit(folder / ENDED_FILE, "field renamed")
    with pytest.raises(
        CheckFailed,
        match=r"4 change\(s\) break a release, for example .*Ended line: current can't read what 0\.9\.0 wrote",
    ):
        app(["schemas", "--add", "1.0.0", "--yes", "--directory", str(folder)])


def test_show_gives_fingerprint_fields_and_the_whole_schema(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out = run(capsys, "schemas", "SamplesScored", "--output", "json")
    shown = json.loads(out)
    assert code == 0
    assert shown["schema"] == current_release(schema_directory()).find("SamplesScored")
    assert [row["path"] for row in shown["fields"]][:3] == [
        "key",
        "key.prompt_group_id",
        "key.samples_per_prompt",
    ]
    assert len(shown["fingerprint"]) == 16
    _, listed = run(capsys, "schemas")
    assert ["relax.events.sample.SamplesScored", shown["fingerprint"]] in [
        line.split()[:2] for line in listed.splitlines()
    ]


def test_diff_shows_what_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder / ENDED_FILE, "type narrowed")
    code, out = run(
        capsys, "schemas", "--since", "0.9.0", "--directory", str(folder), "--output", "json"
    )
    assert (code, json.loads(out)) == (
        0,
        [{"schema": NAME, "field": "row", "change": "type long -> int"}],
    )
    assert run(
        capsys, "schemas", "--since", "0.9.0", "--release", "0.10.0", "--directory", str(folder)
    ) == (
        0,
        "schema  field  change\n",
    )
