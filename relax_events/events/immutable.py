"""The dataclass decorator of events, their parts and other values that are made for each sample.

To a type checker it is `dataclasses.dataclass`, so that assigning to a field of a frozen event is
an error. When the program runs, nothing guards the fields: a guarded dataclass sets each of its
fields by a call of its own, which takes four times as long to make, and a sample's event has more
than thirty fields with its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as immutable
else:
    from dataclasses import dataclass

    def immutable(*, frozen, **options):
        """Return the decorator of a dataclass that can be hashed if it is frozen."""
        return dataclass(unsafe_hash=frozen, **options)


__all__ = ["immutable"]
