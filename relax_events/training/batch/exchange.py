"""Moves encoded samples to the ranks that train them.

    rank that reads the partition ──▶ data leader that the plan names ──▶ its model-parallel peers

Samples travel as the bytes of their records, behind a header that says where they lie on the log.
Only samples that another rank trains leave their rank; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

from relax_events.training.ranks import Ranks

HEADER = Struct("<iqiHI")
"""Partition, offset, index in the prompt group, bytes of the prompt group's id, bytes of the
record."""


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample as its record's bytes, with the record's partition and offset."""

    prompt_group_id: str
    index: int
    partition: int
    offset: int
    value: bytes

    @property
    def sample_key(self) -> tuple[str, int]:
        """Prompt group and index: what a plan names the sample by."""
        return self.prompt_group_id, self.index


def exchange_samples(
    samples: Iterable[EncodedSample],
    ranks_by_sample: Mapping[tuple[str, int], int],
    *,
    ranks: Ranks,
) -> dict[tuple[str, int], EncodedSample]:
    """Return the samples that this rank trains; collective.

    Args:
        samples: Read by this rank; none on a rank that is no data leader.
        ranks_by_sample: Data-parallel rank of each sample, by prompt group and index.
        ranks: This process and its peers.
    """
    topology, data = ranks.topology, ranks.at.data
    kept: list[EncodedSample] = []
    leaving: dict[int, list[EncodedSample]] = {leader: [] for leader in topology.data_leaders()}
    for sample in samples:
        target = ranks_by_sample[sample.sample_key]
        (kept if target == data else leaving[topology.data_leader(target)]).append(sample)
    received = ranks.exchange_bytes(
        [write_samples(leaving.get(rank, ())) for rank in range(ranks.size)]
    )
    if ranks.at.is_data_leader:
        kept += [sample for part in received for sample in read_samples(part)]
    if topology.model > 1:
        mine = write_samples(kept) if ranks.at.is_data_leader else None
        kept = list(read_samples(ranks.share_with_peers(mine)))
    return {sample.sample_key: sample for sample in kept}


def write_samples(samples: Sequence[EncodedSample]) -> bytes:
    """Serialise samples."""
    frames: list[bytes] = []
    for sample in samples:
        group_id = sample.prompt_group_id.encode()
        header = sample.partition, sample.offset, sample.index, len(group_id), len(sample.value)
        frames += [HEADER.pack(*header), group_id, sample.value]
    return b"".join(frames)


def read_samples(data: bytes) -> Iterator[EncodedSample]:
    """Yield what `write_samples` wrote."""
    at = 0
    while at < len(data):
        partition, offset, index, id_bytes, num_bytes = HEADER.unpack_from(data, at)
        begin = at + HEADER.size
        value = begin + id_bytes
        at = value + num_bytes
        yield EncodedSample(data[begin:value].decode(), index, partition, offset, data[value:at])
