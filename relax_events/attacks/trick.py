"""A program and its tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trick:
    """A program that must not pass.

    Attributes:
        name: The effect that it tries to have.
        program: Python source, without the function that the tests need or with a wrong one.
        tests: Tests in a published form.
    """

    name: str
    program: str
    tests: str
