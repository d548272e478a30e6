"""Runs a critic that several ranks hold together. Rank 0 follows the run's log; it announces each
call of the critic to the others, with its samples, and all make it together.

    rank 0        CriticLearner, requests for values ──▶ LeadingCritic ──▶ critic
    other ranks       call, samples (broadcast) ──▶ follow_leader ────▶ critic

A rank waits between calls in the collective that brings the next one. While there is nothing to do
rank 0 calls often enough that no collective's deadline passes. The last call ends the others; where
rank 0 dies their collective fails, and all ranks start again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.errors import OutOfMemory, PoisonSample, RankLost, StepNotFinite
from relax_events.events.codec import EventCodec
from relax_events.events.parts import CheckpointRef
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleReady, SampleRolledOut
from relax_events.training.backend.protocol import Critic, ValueMetrics
from relax_events.training.batch.paths import longest_path
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.pending import PendingCheckpoint
from relax_events.training.ranks import Ranks
from relax_events.training.smaller_steps import SmallerSteps, StepBounds

CALLS_PER_DEADLINE = 4
"""So often at least rank 0 calls within a collective's deadline."""
LENGTH = Struct("<Q")
UNREAD: dict[str, Any] = dict.fromkeys((
    "actor_logprobs", "ref_logprobs", "teacher_logprobs", "topk_ids", "topk_teacher_logprobs",
    "turn_rewards", "token_rewards", "routed_experts",
))  # fmt: skip
"""Parts of a sample that no critic reads."""


class Call(IntEnum):
    """What the ranks are to do next."""

    WAIT = 0
    ACCUMULATE = 1
    STEP = 2
    SKIP_STEP = 3
    SCORE = 4
    SAVE = 5
    POLL = 6
    LOAD = 7
    END = 8
    DISCARD = 9
    SET_MAX_CELLS = 10


class CriticBounds(NamedTuple):
    """What fits the critic's device in the steps that it learns, and in the passes that compute
    values of the samples of a policy version.
    """

    steps: SmallerSteps
    values: SmallerSteps


class ProgressReport(Protocol):
    """Takes note that this process lives and works; see `Lifecycle`."""

    def tick(self, *, working: bool) -> None:
        """Send a heartbeat, if one is due."""

    def piece(self, name: str) -> AbstractContextManager[None]:
        """Declare one unit of work."""

    def transfer(self, name: str) -> AbstractContextManager[None]:
        """Declare the transfer of a whole model."""


class LeadingCritic:
    """Implements `Critic` on rank 0, for all ranks, and keeps its checkpoints. A critic of one rank
    announces nothing.
    """

    def __init__(
        self,
        critic: Critic,
        checkpoints: Checkpoints,
        *,
        ranks: Ranks,
        bounds: CriticBounds,
        timeout_seconds: float,
    ) -> None:
        """Lead the ranks, which wait in `follow_leader`.

        Args:
            critic: Rank 0's part.
            checkpoints: Of all ranks.
            ranks: This process and its peers.
            bounds: What fits the device.
            timeout_seconds: Deadline of a collective.
        """
        self._critic, self._checkpoints, self._ranks = critic, checkpoints, ranks
        self._bounds, self._budget = bounds, critic.max_cells
        self._wait_seconds = timeout_seconds / CALLS_PER_DEADLINE
        self._called_at = time.monotonic()
        self._codec = EventCodec()
        self._pending: PendingCheckpoint | None = None

    @property
    def policy_version(self) -> int:
        """The version that the last learned step produced."""
        return self._critic.policy_version

    def _call(self, call: Call, content: bytes = b"") -> None:
        if self._ranks.size > 1:
            self._ranks.broadcast(bytes([call]) + content)
            self._called_at = time.monotonic()

    def _encode(self, samples: Sequence[SampleReady | SampleRolledOut]) -> bytes:
        if self._ranks.size == 1:
            return b""
        read = (
            replace(sample, **UNREAD) if isinstance(sample, SampleReady) else sample
            for sample in samples
        )
        values = [self._codec.encode(sample) for sample in read]
        return b"".join(part for value in values for part in (LENGTH.pack(len(value)), value))

    def stay_in_touch(self) -> None:
        """Call the other ranks if they have waited long."""
        if time.monotonic() - self._called_at > self._wait_seconds:
            self._call(Call.WAIT)

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `Critic`."""
        self._call(Call.ACCUMULATE, self._encode(micro_batch))
        self._critic.accumulate(micro_batch)

    def step(self) -> ValueMetrics:
        """Normalise, clip, update; see `Critic`."""
        self._call(Call.STEP)
        return _step(self._critic, self._bounds)

    def discard(self) -> None:
        """Discard what was accumulated; see `Critic`."""
        self._call(Call.DISCARD)
        self._critic.discard()

    def set_max_cells(self, max_cells: int) -> None:
        """Set the budget of a pass from here on; see `Critic`."""
        if max_cells != self._critic.max_cells:
            self._call(Call.SET_MAX_CELLS, LENGTH.pack(max_cells))
            self._critic.max_cells = max_cells

    def skip_step(self) -> None:
        """Increment the version without an update; see `Critic`."""
        self._call(Call.SKIP_STEP)
        self._critic.skip_step()

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Call this after each long part of `step`; see `Critic`."""
        self._critic.on_progress(report_progress)

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Give the value at every loss token of samples of one policy version; see `Critic`.

        Raises:
            RankLost: Passes of several ranks don't fit; the next processes run smaller ones.
        """
        bounds = self._bounds.values.bounds(samples[0].policy_version) if samples else StepBounds()
        for sample in samples:
            length = longest_path(sample)
            if problem := bounds.describe_too_long(length):
                raise OutOfMemory(
                    problem, sample_id=sample.sample_id, num_paths=1, num_cells=length
                )
        self.set_max_cells(bounds.max_cells or self._budget)
        self._call(Call.SCORE, self._encode(samples))
        return _score(self._critic, samples, self._bounds, self._ranks)

    def save(self, extra: Mapping[str, Any]) -> None:
        """Start a checkpoint; the state may change as soon as this returns."""
        self._call(Call.SAVE)
        self._pending = self._checkpoints.save(self._critic.state(), extra=extra)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    def poll_checkpoint(self) -> CheckpointRef | None:
        """Return the checkpoint that has been written since the last call; without waiting."""
        if self._pending is None or not self._pending.is_written_here:
            return None
        self._call(Call.POLL)
        if (reference := self._pending.poll()) is not None:
            self._pending = None
        return reference

    def load(self, reference: CheckpointRef) -> bool:
        """Resume from a checkpoint; False where a rank can't read it, and nothing has changed."""
        named = [reference.policy_version, reference.uri, reference.digest.hex()]
        self._call(Call.LOAD, orjson.dumps(named))
        return _load(self._critic, self._checkpoints, reference)

    def end(self) -> None:
        """Let the other ranks end."""
        self._call(Call.END)


def follow_leader(
    critic: Critic,
    checkpoints: Checkpoints,
    *,
    ranks: Ranks,
    bounds: CriticBounds,
    lifecycle: ProgressReport,
) -> None:
    """Make the calls that rank 0 announces, until the last one.

    Args:
        critic: This rank's part.
        checkpoints: Of all ranks.
        ranks: This process and its peers.
        bounds: What fits the device.
        lifecycle: Of this process.
    Raises:
        RankLost: Rank 0 has died, or is behind; or values did not fit this rank's device.
        OutOfMemory: A pass of this rank's part did not fit the device.
    """
    follower = _Follower(critic, checkpoints, bounds, ranks)
    while True:
        message = ranks.broadcast(None)
        call, content = Call(message[0]), memoryview(message)[1:]
        if call is Call.END:
            return
        declare = lifecycle.transfer if call in (Call.SAVE, Call.LOAD) else lifecycle.piece
        # what fails so on rank 0 too is for it to decide
        with declare("compute with rank 0"), suppress(PoisonSample, StepNotFinite):
            follower.make(call, content)
        lifecycle.tick(working=False)


class _Follower:
    """Makes the calls of rank 0."""

    def __init__(
        self, critic: Critic, checkpoints: Checkpoints, bounds: CriticBounds, ranks: Ranks
    ) -> None:
        self._critic, self._checkpoints = critic, checkpoints
        self._bounds, self._ranks = bounds, ranks
        self._codec = EventCodec()
        self._pending: PendingCheckpoint | None = None

    def make(self, call: Call, content: memoryview) -> None:
        """Make a call; collective, but for `WAIT`."""
        critic = self._critic
        match call:
            case Call.ACCUMULATE:
                critic.accumulate(list(_decode(self._codec, content)))
            case Call.STEP:
                _step(critic, self._bounds)
            case Call.DISCARD:
                critic.discard()
            case Call.SET_MAX_CELLS:
                (critic.max_cells,) = LENGTH.unpack(content)
            case Call.SKIP_STEP:
                critic.skip_step()
            case Call.SCORE:
                samples = list(_decode(self._codec, content))
                _score(critic, samples, self._bounds, self._ranks)
            case Call.SAVE:
                self._pending = self._checkpoints.save(critic.state(), extra={})
            case Call.POLL:
                assert self._pending is not None, "rank 0 polls what it has saved"
                if self._pending.poll() is not None:
                    self._pending = None
            case Call.LOAD:
                version, uri, digest = orjson.loads(content)
                reference = CheckpointRef(version, uri, bytes.fromhex(digest))
                _load(critic, self._checkpoints, reference)


def _decode(codec: EventCodec, content: memoryview) -> Iterator[Any]:
    at = 0
    while at < len(content):
        (num_bytes,) = LENGTH.unpack_from(content, at)
        at += LENGTH.size
        yield from split_samples(codec.decode(bytes(content[at : at + num_bytes])))
        at += num_bytes


def _step(critic: Critic, bounds: CriticBounds) -> ValueMetrics:
    """Take a step. Where it runs out of memory other ranks wait, or the weights have moved: the
    next process trains it in smaller passes.
    """
    try:
        return critic.step()
    except OutOfMemory as error:
        bounds.steps.write(critic.policy_version, error, budget=critic.max_cells)
        raise


def _score(
    critic: Critic, samples: Sequence[SampleRolledOut], bounds: CriticBounds, ranks: Ranks
) -> list[NDArray[np.float32]]:
    """Compute values. Where a pass of several ranks runs out of memory, the others wait: the next
    processes run smaller ones.
    """
    try:
        return critic.score(samples)
    except OutOfMemory as error:
        if ranks.size == 1:
            raise
        bounds.values.write(samples[0].policy_version, error, budget=critic.max_cells)
        raise RankLost(
            f"rank {ranks.rank} can't compute values with the others; all start again, with "
            f"smaller passes: {error}"
        ) from error


def _load(critic: Critic, checkpoints: Checkpoints, reference: CheckpointRef) -> bool:
    """Resume from a checkpoint if every rank can read it; collective."""
    restored = checkpoints.load_newest([reference])
    if restored is not None:
        critic.load_state(restored.state)
    return restored is not None
