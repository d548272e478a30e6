"""What all sections of a run file have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
ValueT = TypeVar("ValueT")


def or_derived(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Let None stand for a value that is derived when the run starts; check any other."""
    return None if value is None else validate(value)


OrDerived = Annotated[
    ValueT, WrapValidator(or_derived), PlainSerializer(lambda value: value, return_type=Any)
]
"""A key that is derived from the model, the run file and the machine where the run file leaves it
out (`relax_events.config.derived`).

It has its type from the start of a run on; before, in a run file as it was read, it may be None.
"""
DERIVED: Any = None
"""The default of such a key."""


def is_derived(field: FieldInfo) -> bool:
    """Return whether a key is derived where the run file leaves it out."""
    return any(isinstance(one, WrapValidator) and one.func is or_derived for one in field.metadata)


class Section(BaseModel):
    """A frozen table of a run file that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )
