"""The compatibility check accepts changes that readers of both releases can read, and names field,
reason and remedy of all others.
"""

from __future__ import annotations

import io
import json

import fastavro
import pytest
from event_samples import rolled_out
from schema_changes import ALLOWED, FORBIDDEN, ONE_WAY, changed, field, without_enum_default

from relax_events.events.codec import MAGIC, EventCodec
from relax_events.events.compatibility import compare, incompatibilities
from relax_events.events.parts import FinishReason
from relax_events.events.sample_columns import join_samples
from relax_events.events.schemas import Release, current_release, read_releases, schema_directory

NOW = Release("0.1.0", current_release(schema_directory()).schemas)
NAME = "relax.events.sample.PromptGroupEnded"


def test_current_schemas_are_compatible_with_every_release() -> None:
    releases = read_releases(schema_directory())
    assert releases
    assert [
        problem
        for release in releases
        for problem in incompatibilities(release, current_release(schema_directory()))
    ] == []


@pytest.mark.parametrize("change", ALLOWED)
def test_allowed_change_passes(change: str) -> None:
    assert incompatibilities(NOW, changed(ALLOWED[change])) == []


@pytest.mark.parametrize("change", FORBIDDEN)
def test_forbidden_change_is_named_with_its_remedy(change: str) -> None:
    edit, path, what, remedy = FORBIDDEN[change]
    problems = incompatibilities(NOW, changed(edit))
    matching = [problem for problem in problems if (problem.field, problem.what) == (path, what)]
    assert [remedy in problem.remedy for problem in matching] == [True], problems


@pytest.mark.parametrize("change", ONE_WAY)
def test_change_that_old_readers_cannot_read_names_the_old_release(change: str) -> None:
    problems = incompatibilities(NOW, changed(ONE_WAY[change]))
    assert problems
    assert all(
        problem.what.startswith("0.1.0 can't read what current writes: ") for problem in problems
    )


def test_unknown_enum_symbol_is_rejected_if_the_reader_has_no_default() -> None:
    old, new = changed(without_enum_default, "0.1.0"), changed(without_enum_default)
    symbols = field(new.schemas[NAME], "outcome")["type"]["symbols"]
    symbols[symbols.index("postponed")] = "adjourned"
    problems = incompatibilities(old, new)
    texts = [problem.what for problem in problems if problem.field == "outcome"]
    assert texts == [
        "current can't read what 0.1.0 wrote: symbol postponed is unknown and there is no default",
        "0.1.0 can't read what current writes: symbol adjourned is unknown and there is no default",
    ]


def test_new_event_is_compatible_with_old_releases() -> None:
    older = {name: schema for name, schema in NOW.schemas.items() if name != NAME}
    assert incompatibilities(Release("0.1.0", older), NOW) == []


def test_two_schemas_are_compared_under_the_names_given() -> None:
    edit, *_ = FORBIDDEN["type narrowed"]
    (problem,) = compare(
        NOW.schemas[NAME], changed(edit).schemas[NAME], old="the run's writer", new="ours"
    )
    assert (problem.schema, problem.what) == (
        NAME,
        "ours can't read what the run's writer wrote: long can't be read as int",
    )


@pytest.mark.parametrize("reason", [FinishReason.LATE, FinishReason.LOST])
def test_release_without_late_and_lost_reads_them_as_errors(reason: FinishReason) -> None:
    """Its trainer gives such a sample no baseline, and what has no loss token no gradient."""
    name = "relax.events.sample.SamplesRolledOut"
    (first, *_) = read_releases(schema_directory())
    assert reason.value not in json.dumps(first.schemas[name])
    samples = [rolled_out(), rolled_out(index=1, finish_reason=reason, error="its server is gone")]
    (record,) = join_samples(samples)
    data = EventCodec().encode(record)
    writer, reader = (
        fastavro.parse_schema(json.loads(json.dumps(release.schemas[name])), named_schemas={})
        for release in (NOW, first)
    )
    body = io.BytesIO(data[len(MAGIC) + 8 :])
    read = fastavro.schemaless_reader(body, writer, reader)
    assert read["finish_reason"] == ["stop", "error"]
    assert "error" not in read
