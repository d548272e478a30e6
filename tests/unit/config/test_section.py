"""Sections of a run file: copies with other values."""

from __future__ import annotations

import pytest

from relax_events.config.run_config import ParentSection


def test_copy_replaces_the_named_fields_and_keeps_the_original() -> None:
    section = ParentSection(run="first", from_version=2)
    copy = section.model_copy(update={"from_version": 3})
    assert (copy.run, copy.from_version, section.from_version) == ("first", 3, 2)


def test_copy_with_an_unknown_field_is_rejected() -> None:
    with pytest.raises(TypeError, match="ParentSection has no field source"):
        ParentSection().model_copy(update={"source": "first"})
