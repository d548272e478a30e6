"""The rules between keys of different sections. A rule is a function that gives a sentence for each
violation: the keys, their values, the reason and the remedy (ADR 54).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_events.config.rules.data import check_learning
from relax_events.config.rules.generation import (
    check_environment,
    check_judge,
    check_servers,
    check_teachers,
)
from relax_events.config.rules.training import (
    check_backend,
    check_critic_ranks,
    check_optimizer_steps,
    check_parent,
    check_token_staleness,
)
from relax_events.config.rules.workers import (
    check_hosts,
    check_hybrid,
    check_partitions,
    check_time_share,
)

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig

RULES = (
    check_learning,
    check_environment,
    check_partitions,
    check_optimizer_steps,
    check_token_staleness,
    check_hybrid,
    check_backend,
    check_time_share,
    check_hosts,
    check_critic_ranks,
    check_parent,
    check_servers,
    check_teachers,
    check_judge,
)


def find_violation(config: RunConfig) -> str | None:
    """Return the first violation of a rule; None where a run file keeps them all."""
    return next((text for rule in RULES for text in rule(config)), None)
