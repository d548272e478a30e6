"""Writes the run files that the package brings, so that the commands of the docs work where there
is no checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from relax_events.errors import ConfigError

PACKAGED = Path(__file__).parent / "configs"
CHECKOUT = Path(__file__).parents[3] / "configs"


@cache
def locate_examples() -> Path:
    """Return the folder of the run files: inside an installed package, or at the top of a
    checkout.
    """
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def write_examples(folder: Path, *, force: bool = False) -> list[Path]:
    """Write every run file that the package brings, and the files that they name; return their
    paths.

    A file that is already there with the same content is left alone.

    Args:
        folder: Where to write; created when missing.
        force: Overwrite files whose content differs.
    Raises:
        ConfigError: A file differs; nothing has been written.
    """
    texts = {folder / name: content for name, content in _read_examples(locate_examples())}
    changed = [
        path for path, content in texts.items() if path.exists() and path.read_bytes() != content
    ]
    if changed and not force:
        raise ConfigError(
            f"{', '.join(map(str, changed))} differ from the run files of this release; give "
            "another folder, or --force to overwrite them"
        )
    for path, content in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return sorted(texts)


def _read_examples(source: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix in {".toml", ".py", ".jsonl"}:
            yield path.relative_to(source), path.read_bytes()
