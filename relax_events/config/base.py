"""What all sections of a run file have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen table of a run file that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)
