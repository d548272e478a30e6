"""A run that is checked: its run file, and what several checks read of it, each read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from relax_events.config import EvaluationDatasetConfig, RowsConfig, RunConfig
from relax_events.config.addresses import EMBEDDED
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.data.sources import (
    is_generated,
    named_evaluation_datasets,
    named_sources,
    open_source,
)
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.planning.derived import Derived
from relax_events.session.broker_address import OPERATOR, embedded_broker, with_broker_address
from relax_events.session.defaults import read_resolved, resolve_defaults
from relax_events.session.principals import apply_principal

Rows = TypeVar("Rows", bound=RowsConfig)
NUM_ROWS, NUM_THOROUGH_ROWS = 100, 2000


@dataclass
class CheckedRun:
    """A run file and the facts that its checks share.

    Attributes:
        config: The run file, with or without its derived keys.
        is_thorough: Whether rows are rendered by the thousand, and problems generated, whose
            libraries take seconds to import: for the doctor, which starts nothing.
        first_prompt: On which the reward is tried; set by the check of the data.
    """

    config: RunConfig
    is_thorough: bool = False
    first_prompt: PromptRow | None = None

    @cached_property
    def resolution(self) -> tuple[RunConfig, list[Derived]]:
        """The configuration with derived keys, and these; raises ConfigError where a checkpoint
        can't be read.
        """
        return resolve_defaults(
            self.config,
            earlier_config=read_resolved(self.config),
            has_broker=self.config.broker.bootstrap_servers == EMBEDDED,
        )

    @property
    def num_rows(self) -> int:
        """Rows of each source that are rendered."""
        return NUM_THOROUGH_ROWS if self.is_thorough else NUM_ROWS

    @cached_property
    def prompts(self) -> list[tuple[RowsConfig, PromptSource]]:
        """The opened sources of prompts, every row of a file checked; raises as `open_source`.

        None for a replay: the rest of its run file comes from the parent's log, and is not used.
        """
        return [] if self.config.is_replay else self._open(named_sources(self.config.data))

    @cached_property
    def evaluated(self) -> list[tuple[EvaluationDatasetConfig, PromptSource]]:
        """The opened datasets of evaluations; raises as `open_source`."""
        return self._open(named_evaluation_datasets(self.config.evaluation))

    def _open(self, named: list[tuple[str, Rows]]) -> list[tuple[Rows, PromptSource]]:
        return [
            (part, open_source(part, seed=self.config.run.seed, section=section))
            for section, part in named
            if self.is_thorough or not is_generated(part)
        ]

    @cached_property
    def embedded_broker(self) -> EmbeddedBroker | None:
        """The run's embedded broker; None for a cluster."""
        return embedded_broker(self.config)

    @property
    def has_stopped_broker(self) -> bool:
        """Whether nothing can be asked of the broker, since it is embedded and not running."""
        return self.embedded_broker is not None and not self.embedded_broker.is_running

    @cached_property
    def operator_config(self) -> RunConfig:
        """The configuration of an operator's client, with the running broker's address."""
        broker = self.embedded_broker
        reached = self.config if broker is None else with_broker_address(self.config, broker)
        return apply_principal(reached, OPERATOR)
