"""What all sections of a run file have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeVar

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
out (`relax_events.planning.derived`).

It has its type from the start of a run on; before, in a run file as it was read, it may be None.
"""
BY_MACHINE = "derived by the machine"
"""Marks such a key that the machine decides too: a worker that is started by itself takes the value
of its own machine."""
Threads = Annotated[OrDerived[Annotated[int, Field(ge=0)]], BY_MACHINE]
"""CPU threads of a worker; 0 takes all processors."""
DERIVED: Any = None
"""The default of a derived key."""


def is_derived(field: FieldInfo) -> bool:
    """Return whether a key is derived where the run file leaves it out."""
    return any(isinstance(one, WrapValidator) and one.func is or_derived for one in field.metadata)


def get_tables(tree: Any, *names: str) -> list[Mapping[str, Any]]:
    """Return tables of a run file that is not validated yet; none unless all of them are there."""
    if not isinstance(tree, Mapping):
        return []
    tables = [table for name in names if isinstance(table := tree.get(name), Mapping)]
    return tables if len(tables) == len(names) else []


class Section(BaseModel):
    """A frozen table of a run file that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced, unvalidated as in pydantic, which would also
        accept names that are not fields.

        Raises:
            TypeError: A name is not a field of this section.
        """
        if unknown := set(update or ()) - set(type(self).model_fields):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)
