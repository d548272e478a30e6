"""Choose the replica of a prompt group: the replica that had it before, else by hash and load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from relax_events.engines.replicas.policies import max_samples_per_engine, rank_engines
from relax_events.engines.replicas.replica import Replica

MAX_REMEMBERED_GROUPS = 8192
"""Prompt groups whose engine is remembered: between two turns no engine has samples of the group.
"""


class PromptGroupPlacement:
    """Orders the replicas for each prompt group, and remembers which one had it."""

    def __init__(self) -> None:
        self._replica_of_group: OrderedDict[str, Replica] = OrderedDict()

    def candidates(
        self, group_id: str, serving: Iterable[Replica], *, num_new: int
    ) -> list[Replica]:
        """Order the replicas that may take samples of a prompt group: the replica that had
        some, replicas with room in the group's order, then the least busy.

        A replica that has failed, and not finished a sample since, takes one prompt group only.

        Args:
            group_id: The prompt group.
            serving: The serving replicas.
            num_new: Samples to assign.
        """
        ready = {
            replica.name: replica
            for replica in serving
            if not (replica.circuit_breaker.is_half_open and replica.num_samples)
        }
        if not ready:
            return []
        num_samples = sum(replica.num_samples for replica in ready.values())
        most = max_samples_per_engine(num_samples, num_new=num_new, num_engines=len(ready))
        order = [ready[name] for name in rank_engines(group_id, ready)]
        rest = sorted(order, key=lambda replica: replica.num_samples)
        has_room = [replica for replica in order if replica.num_samples + num_new <= most]
        holders = [replica for replica in order if replica is self._replica_of_group.get(group_id)]
        return list(dict.fromkeys([*holders, *has_room, *rest]))

    def remember(self, group_id: str, replica: Replica) -> None:
        """Remember which replica has a prompt group; the oldest prompt groups are forgotten."""
        self._replica_of_group[group_id] = replica
        self._replica_of_group.move_to_end(group_id)
        if len(self._replica_of_group) > MAX_REMEMBERED_GROUPS:
            self._replica_of_group.popitem(last=False)
