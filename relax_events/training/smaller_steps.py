"""Remembers over a trainer's death that a step ran out of memory in its optimizer step, so that the
next process trains the step in smaller passes, or without what fits in none.

Other ranks wait in a collective then, or the weights have moved, so that the process can't
continue. The object lies in the folder of checkpoints of the step's version, and is deleted with
them. The critic's steps have objects of their own, and so have the values of the samples of a
version, which ranks compute together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson
import structlog

from relax_events.errors import OutOfMemory
from relax_events.events.parts import TOO_LARGE
from relax_events.objects import ObjectStore
from relax_events.training.ranks import Ranks

log = structlog.get_logger()
NAME = "out-of-memory"


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What fits the device in a step, in tokens: `max_cells` of a pass, and fewer than
    `path_tokens` of a path; 0 for no bound.
    """

    max_cells: int = 0
    path_tokens: int = 0

    def describe_too_long(self, longest_path: int) -> str:
        """Return why a prompt group with such a path is not trained; empty if it is."""
        if not self.path_tokens or longest_path < self.path_tokens:
            return ""
        return (
            f"{TOO_LARGE}: a path of {longest_path} tokens; one of {self.path_tokens} did not "
            "fit the device alone; lower engine.max_context_tokens, or set "
            "trainer.activation_checkpointing; run.max_failed_prompt_groups bounds how many "
            "prompt groups in a row may end so"
        )


class SmallerSteps:
    """The bounds of the steps that a trainer or critic begins with."""

    def __init__(
        self, store: ObjectStore, ranks: Ranks, *, folder: str = "checkpoints/", name: str = NAME
    ) -> None:
        """Know of none.

        Args:
            store: Of the run.
            ranks: This process and its peers.
            folder: Of the checkpoints.
            name: Of the objects.
        """
        self._store, self._ranks, self._folder, self._name = store, ranks, folder, name
        self._bounds: dict[int, StepBounds] = {}

    def read(self, first: int) -> None:
        """Read the bounds of all steps from the first one on: a step may have run out of memory
        before the one before it was committed, or before the newest checkpoint; collective.
        """
        bounds: list[tuple[int, dict[str, int]]] = []
        for key in () if self._ranks.rank else self._store.list(self._folder):
            version, _, name = key.removeprefix(self._folder).partition("/")
            if name == self._name and int(version) >= first:
                bounds.append((int(version), orjson.loads(self._store.get_at(key))))
        for step, values in orjson.loads(self._ranks.all_gather_bytes(orjson.dumps(bounds))[0]):
            self._bounds[step] = StepBounds(**values)
            log.warning("step.bounded", train_step=step, bounds=self._name, **values)

    def bounds(self, step: int) -> StepBounds:
        """Return the bounds of a step."""
        return self._bounds.get(step, StepBounds())

    def write(self, step: int, error: OutOfMemory, *, budget: int) -> None:
        """Bound a step that ran out of memory: at first to passes of half the size, then to one
        path in each, and where that does not fit, to shorter paths. Not collective.

        Args:
            step: Which this process can't train.
            error: Of its pass.
            budget: Of the run file, in tokens of a pass.
        """
        bounds = self.bounds(step)
        if error.num_paths == 1:
            bounds = StepBounds(bounds.max_cells, error.num_cells)
        else:
            half = max(1, min(error.num_cells, budget) // 2)
            bounds = StepBounds(1 if bounds.max_cells else half, bounds.path_tokens)
        self._store.put_at(f"{self._folder}{step:08d}/{self._name}", orjson.dumps(bounds))
        log.error(
            "step.out_of_memory",
            train_step=step,
            bounds=self._name,
            error=str(error),
            **asdict(bounds),
        )
