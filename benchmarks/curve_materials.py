"""What the learning curves start from: one model for all of them, a teacher, pairs of answers. Each is made when it is first asked for, and kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import quickstart
from relax_events.config import load_run_config
from relax_events.data.sources import open_stream

PLACE = "{materials}"
PREPARE_SECONDS = 900.0
NUM_PAIRS = 4096
LETTERS = "ABCDE"
TEACHER = ("warm_start.steps=1000", "warm_start.target_loss=0.02")
"""A start so long that nearly all of the teacher's answers are right."""


def provide(settings: Iterable[str], folder: Path) -> list[str]:
    """Put a folder in the place of `{materials}` in settings, and make what they name there.

    Raises:
        CalledProcessError: A model could not be made; what was said stands above.
    """
    wanted = list(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        if any(f"{PLACE}/{name}" in setting for setting in wanted) and not (folder / name).exists():
            make(folder / name)
    return [setting.replace(PLACE, str(folder)) for setting in wanted]


def make_model(path: Path, overrides: Iterable[str] = ()) -> None:
    """Make the quickstart's model, with its supervised start."""
    command = [sys.executable, "-m", "relax_events.cli", "models", "prepare", str(quickstart.CONFIG), f"model.path={path}", *overrides]
    subprocess.run(command, check=True, timeout=PREPARE_SECONDS, stdout=subprocess.DEVNULL)


def make_teacher(path: Path) -> None:
    """Make the same model with a longer start."""
    make_model(path, TEACHER)


def make_pairs(path: Path) -> None:
    """Write prompts of the quickstart, each with the right answer and one that has a wrong letter."""
    stream, chance = open_stream(load_run_config(quickstart.CONFIG, environment={}).data, seed=0), random.Random(0)
    rows = []
    for number in range(NUM_PAIRS):
        row = stream[number]
        prompt = [{"role": message.role, "content": message.text} for message in row.messages]
        rows.append({"prompt": prompt, "chosen": row.answer, "rejected": with_wrong_letter(row.answer, chance)})
    draft = path.with_suffix(".draft")
    draft.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    draft.rename(path)


def with_wrong_letter(answer: str, chance: random.Random) -> str:
    """Replace one of an answer's letters by another one."""
    at = chance.choice([place for place, letter in enumerate(answer) if letter in LETTERS])
    other = chance.choice([letter for letter in LETTERS if letter != answer[at]])
    return answer[:at] + other + answer[at + 1 :]


MAKERS: dict[str, Callable[[Path], None]] = {"model": make_model, "teacher": make_teacher, "pairs.jsonl": make_pairs}
