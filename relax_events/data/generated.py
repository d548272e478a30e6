"""Generate prompts by the tasks of the package reasoning-gym."""

from __future__ import annotations

import warnings
from typing import Any

import orjson

from relax_events.config import RowsConfig
from relax_events.data.rows import InvalidRows, PromptRow, add_system_prompt
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.events.parts import ChatMessage

# A task's problem i comes from seed + i; the stride separates the problems of runs with
# neighbouring seeds.
SEED_STRIDE = 1_000_003


class GeneratedSource:
    """Problems of one reasoning-gym task, generated on demand: the same seed and index give the
    same problem.

    A row's metadata holds what the task's verifier needs to score an answer in another process:
    task, options, and the generator's entry.
    """

    def __init__(self, task: str, config: RowsConfig, *, seed: int) -> None:
        """Set up the generator.

        Args:
            task: A name that reasoning-gym registers, such as `spell_backward`.
            config: Gives the number of rows, the generator's options and the system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it rejects these options. EnvironmentProblem:
                reasoning-gym is not installed.
        """
        self.invalid_rows = InvalidRows("data")
        self._task = task
        self._config = config
        self._problems = create_task(
            task, size=config.num_problems, seed=seed * SEED_STRIDE % 2**31, options=config.options
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._config.num_problems

    def row(self, index: int) -> PromptRow:
        """Generate one problem."""
        if not 0 <= index < self.num_rows:
            raise IndexError(
                f"row {index} of reasoning_gym:{self._task}: data.num_problems is {self.num_rows}"
            )
        entry = self._problems[index]
        messages = add_system_prompt(
            [ChatMessage.of_text("user", entry["question"])], self._config.system_prompt
        )
        metadata = {"task": self._task, "options": self._config.options, "entry": entry}
        text = orjson.dumps(
            metadata, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        ).decode()
        return PromptRow(messages, str(entry["answer"] or ""), text)


def create_task(
    task: str, *, size: int = 1, seed: int = 0, options: dict[str, Any] | None = None
) -> Any:
    """Set up a reasoning-gym task.

    Raises:
        ConfigError: There is no such task, or it does not take these options.
        EnvironmentProblem: reasoning-gym is not installed.
    """
    package = import_reasoning_gym()
    known = package.factory.DATASETS
    if task not in known:
        raise ConfigError(
            f"reasoning-gym has no task {task!r}; set data.source = 'reasoning_gym:<task>' "
            f"to one of {', '.join(sorted(known))}"
        )
    try:
        return package.create_dataset(task, size=size, seed=seed, **(options or {}))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym's task {task!r} does not take data.options {options}: {error}"
        ) from None


def import_reasoning_gym() -> Any:
    """Import the package, which takes seconds.

    Raises:
        EnvironmentProblem: reasoning-gym is not installed.
    """
    try:
        with warnings.catch_warnings():
            # One of its dependencies compares with `is` to a string; a user can't fix that warning.
            warnings.simplefilter("ignore")
            import reasoning_gym
    except ImportError as error:
        raise EnvironmentProblem(
            f"reasoning_gym: sources need the package reasoning-gym ({error}); install "
            "relax-events[tasks]"
        ) from None
    return reasoning_gym
