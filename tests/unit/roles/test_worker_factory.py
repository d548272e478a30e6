from dataclasses import fields

import pytest

from relax_events.events.types import SampleRolledOut
from relax_events.roles.worker_factory import UNREAD_ARRAYS, UNREAD_BY_OTHERS

pytestmark = pytest.mark.unit


def test_unread_arrays_are_fields_of_a_sample() -> None:
    names = {field.name for field in fields(SampleRolledOut)}
    assert {name for left in (*UNREAD_ARRAYS.values(), UNREAD_BY_OTHERS) for name in left} <= names
