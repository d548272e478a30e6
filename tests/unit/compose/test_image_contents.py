"""The images' build context has every folder that the wheel is made of."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]


@pytest.mark.parametrize("folder", [*WHEEL["packages"], *WHEEL["force-include"]])
def test_image_copies_every_folder_of_the_wheel(folder: str) -> None:
    assert f"COPY {folder} {folder}" in (ROOT / "compose/Dockerfile").read_text().splitlines()
    assert f"!{folder}" in (ROOT / ".dockerignore").read_text().splitlines()
