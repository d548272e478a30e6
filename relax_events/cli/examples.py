"""`relax examples`: the run files that the package brings."""

from __future__ import annotations

from pathlib import Path


def examples(folder: Path = Path("configs"), *, force: bool = False) -> int:
    """Write the run files that the package brings, the quickstart's among them.

    Example: relax examples && relax run configs/quickstart.toml

    Args:
        folder: Where to write them; `configs/lookup-agent.toml` expects its files in `configs`.
        force: Overwrite files that differ.
    """
    from relax_events.launcher.run_file.examples import write_examples

    for path in write_examples(folder, force=force):
        print(path)
    return 0
