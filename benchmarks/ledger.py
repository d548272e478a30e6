"""What the ledger takes of a long log: `python -m benchmarks.ledger`. With `--before CHECKOUT` another
checkout reads the same log in turn.

The log is a file: records as the codec encodes them, in the order and the blocks of `LedgerReader`.
A broker would add the same requests on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import (
    ChatMessage,
    FinishReason,
    ObjectRef,
    Outcome,
    SampleKey,
    TopicOffset,
    VersionSegment,
)
from relax_events.events.sample_columns import join_samples, split_samples
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    Sample,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.projections.ledger import Ledger
from relax_events.topics.plan import TopicPlan

SAMPLES_PER_PROMPT, PROMPTS_PER_STEP = 8, 128
SAMPLES_PER_STEP = SAMPLES_PER_PROMPT * PROMPTS_PER_STEP
NUM_PARTITIONS = 3
BLOCK_RECORDS = 5_000
STEPS_PER_BLOCK = BLOCK_RECORDS // (3 * PROMPTS_PER_STEP)
HEADER = struct.Struct("<bqiI")
"""Position in `ENTITIES`, offset, partition and length of a record."""
ENTITIES = (
    "control.policy-versions",
    "prompt.groups",
    "rollout.samples",
    "reward.scores",
    "advantage.samples",
    "control.train-steps",
    "control.prompt-group-outcomes",
)
SCHEMA, END_OF_BLOCK = -1, -2
"""Stand for an entity: a schema, and the end of a block, which has a version as its offset."""


class LogFile:
    """Writes a run's records to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._codec = file, EventCodec()
        self._ends: dict[tuple[int, int], int] = {}
        for schema in self._codec.published_form().values():
            self._write(SCHEMA, 0, 0, schema)

    def _write(self, place: int, offset: int, partition: int, value: bytes) -> None:
        self._file.write(HEADER.pack(place, offset, partition, len(value)))
        self._file.write(value)

    def append(self, entity: str, event: Event, partition: int = 0) -> int:
        """Write an event, and return its offset."""
        place = ENTITIES.index(entity)
        offset = self._ends.get((place, partition), 0)
        self._ends[place, partition] = offset + 1
        self._write(place, offset, partition, self._codec.encode(event))
        return offset

    def append_samples(self, entity: str, samples: Sequence[Sample], partition: int) -> int:
        """Write the samples of a prompt group as one record, and return its offset."""
        (record,) = join_samples(samples)
        return self.append(entity, record, partition)

    def end_block(self, below: int) -> None:
        """Write that all records of the versions below this one are there."""
        self._write(END_OF_BLOCK, below, 0, b"")


@dataclass(frozen=True, slots=True)
class Generation:
    """The samples of a prompt group on each of their topics."""

    rolled_out: list[SampleRolledOut]
    scored: list[SampleScored]
    ready: list[SampleReady]


def generate(
    generator: np.random.Generator, step: int, index: int, *, num_tokens: int
) -> Generation:
    """Generate a prompt group of random tokens, half of each sample a completion, with rewards 0
    and 1 and the advantages of grpo.
    """
    from relax_events.events.generations import mark_generation

    half = num_tokens // 2
    mask = (np.arange(num_tokens) >= half).astype(np.uint8)
    rewards = generator.integers(0, 2, SAMPLES_PER_PROMPT).astype(np.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    group_id, version = f"{step:06d}-{index:04d}-0", max(step - 1, 0)
    rolled_out = []
    for number in range(SAMPLES_PER_PROMPT):
        key = SampleKey(
            sample_id=f"{group_id}/{number}",
            prompt_group_id=group_id,
            sample_index=number,
            samples_per_prompt=SAMPLES_PER_PROMPT,
            train_step=step,
            group_index=index,
            attempt=0,
            row=step * PROMPTS_PER_STEP + index,
            policy_version=version,
            min_policy_version=version,
            max_policy_version=version,
        )
        rolled_out.append(
            SampleRolledOut(
                key=key,
                tokens=generator.integers(0, 150_000, num_tokens).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=-mask * generator.random(num_tokens, dtype=np.float32),
                num_prompt_tokens=half,
                temperature=1.0,
                finish_reason=FinishReason.STOP,
                version_segments=[VersionSegment(version, half)],
                completion="4 and a few words more",
                messages=[ChatMessage.of_text("user", "What is 2 + 2?")],
            )
        )
    mark_generation(rolled_out)
    pairs = list(zip(rolled_out, rewards.tolist(), advantages.tolist(), strict=True))
    ready = [
        SampleReady(
            key=sample.key,
            **{name: getattr(sample, name) for name in SHARED_FIELDS},
            advantages=mask * np.float32(advantage),
            reward=reward,
        )
        for sample, reward, advantage in pairs
    ]
    scores = [
        SampleScored(key=sample.key, reward=reward, reward_name="exact_match")
        for sample, reward, _ in pairs
    ]
    return Generation(rolled_out, scores, ready)


SHARED_FIELDS = (
    *("tokens", "loss_mask", "rollout_logprobs", "num_prompt_tokens", "temperature"),
    *("finish_reason", "version_segments"),
)
"""Fields of a rolled-out sample that the advantage role passes on."""


def write_log(path: Path, *, num_samples: int, num_tokens: int) -> int:
    """Write the log of a run of whole steps, and return its number of samples.

    Args:
        path: The file.
        num_samples: At least so many.
        num_tokens: Of each sample.
    """
    generator = np.random.default_rng(0)
    num_steps = -(-num_samples // SAMPLES_PER_STEP)
    with path.open("wb") as file:
        log = LogFile(file)
        _publish(log, 0)
        for first in range(0, num_steps, STEPS_PER_BLOCK):
            _write_block(
                log, generator, range(first, min(first + STEPS_PER_BLOCK, num_steps)), num_tokens
            )
    return num_steps * SAMPLES_PER_STEP


def _publish(log: LogFile, version: int) -> None:
    artifact = ObjectRef(f"file:///weights/{version:08d}/manifest.json", bytes(32), 10)
    event = PolicyVersionPublished(
        policy_version=version, artifact=artifact, transports=["store"], start_offsets=[]
    )
    log.append("control.policy-versions", event)


def _write_block(
    log: LogFile, generator: np.random.Generator, steps: range, num_tokens: int
) -> None:
    """Write what `LedgerReader` reads between two calls of `finalize`."""
    groups = [(step, index) for step in steps for index in range(PROMPTS_PER_STEP)]
    for step in steps:
        _publish(log, step + 1)
    for step, index in groups:
        log.append("prompt.groups", _issue(step, index))
    generations = [
        generate(generator, step, index, num_tokens=num_tokens) for step, index in groups
    ]
    offsets = []
    for (step, _), generation in zip(groups, generations, strict=True):
        partition = step % NUM_PARTITIONS
        log.append_samples("rollout.samples", generation.rolled_out, partition)
        log.append_samples("reward.scores", generation.scored, partition)
        offsets.append(log.append_samples("advantage.samples", generation.ready, partition))
    for place, step in enumerate(steps):
        rows = slice(place * PROMPTS_PER_STEP, (place + 1) * PROMPTS_PER_STEP)
        log.append("control.train-steps", _commit(step, generations[rows], offsets[rows]))
        for generation in generations[rows]:
            log.append("control.prompt-group-outcomes", _end(step, generation))
    log.end_block(steps.stop)


def _issue(step: int, index: int) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=f"{step:06d}-{index:04d}-0",
        train_step=step,
        group_index=index,
        attempt=0,
        row=step * PROMPTS_PER_STEP + index,
        required_policy_version=max(step - 1, 0),
        samples_per_prompt=SAMPLES_PER_PROMPT,
        messages=[ChatMessage.of_text("user", "What is 2 + 2?")],
        seed=1,
        lost_worker="",
    )


def _commit(
    step: int, generations: Sequence[Generation], offsets: Sequence[int]
) -> TrainStepCommitted:
    names = [sample.sample_id for one in generations for sample in one.ready]
    zeros = np.zeros(len(names), np.int32)
    topic = TopicPlan.build_topic_name("ledger", "advantage.samples")
    partition = step % NUM_PARTITIONS
    return TrainStepCommitted(
        train_step=step,
        policy_version=step + 1,
        prompt_group_ids=[one.ready[0].prompt_group_id for one in generations],
        sample_ids=names,
        partitions=zeros + np.int32(partition),
        offsets=np.repeat(np.array(offsets, np.int64), SAMPLES_PER_PROMPT),
        ranks=zeros,
        micro_batches=zeros,
        consumed=[TopicOffset(topic, partition, offsets[-1] + 1)],
        staleness_counts=[0] * (step - max(step - 1, 0)) + [len(names)],
        metrics={"reward_mean": 0.5},
        phase_seconds={},
        weights_digest=bytes(32),
    )


def _end(step: int, generation: Generation) -> PromptGroupEnded:
    key = generation.ready[0].key
    rewards = [sample.reward for sample in generation.ready if sample.reward is not None]
    return PromptGroupEnded(
        prompt_group_id=key.prompt_group_id,
        train_step=step,
        group_index=key.group_index,
        attempt=0,
        row=key.row,
        outcome=Outcome.TRAINED,
        policy_version=key.policy_version,
        trainer_version=step,
        mean_reward=sum(rewards) / len(rewards),
    )


def read_records(file: BinaryIO) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the place in `ENTITIES`, the partition, the offset and the value of each record."""
    while header := file.read(HEADER.size):
        place, offset, partition, num_bytes = HEADER.unpack(header)
        yield place, partition, offset, file.read(num_bytes)


def read_log(path: Path) -> dict[str, Any]:
    """Read a log into this checkout's ledger; return what this process used. A process that reads
    a broker's log has the modules of a reader, so this one has them, too.
    """
    import_module("relax_events.history.ledger")
    codec, ledger = EventCodec(), _open_ledger()
    topics = [TopicPlan.build_topic_name("ledger", entity) for entity in ENTITIES]
    started = time.process_time()
    with path.open("rb") as file:
        for place, partition, offset, value in read_records(file):
            if place == SCHEMA:
                codec.learn(value)
            elif place == END_OF_BLOCK:
                ledger.finalize(offset)
            else:
                at = TopicOffset(topics[place], partition, offset)
                for event in split_samples(codec.decode(value)):
                    ledger.apply(event, at)
    totals, problems = ledger.totals(), ledger.problems()
    return {
        "seconds": time.process_time() - started,
        "num_bytes": read_peak_bytes(),
        "num_samples": totals["samples_trained"],
        "problems": problems,
        "unverified": ledger.unverified(),
    }


def read_peak_bytes() -> int:
    """Return the largest resident memory of this process; `ru_maxrss` would be the parent's, where
    that is larger.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _open_ledger() -> Ledger:
    """Return an empty ledger, which computes advantages again if this checkout's does."""
    try:
        from relax_events.history.ledger_advantages import RecordedAdvantages, choose_settings
    except ImportError:
        return Ledger(1)
    config = RunConfig.model_validate(
        {"run": {"id": "ledger"}, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
    )
    settings = choose_settings([(config.algorithm, 8192)], is_this_release=True)
    return Ledger(1, advantages=RecordedAdvantages(settings, None))


def measure(checkout: Path, path: Path) -> dict[str, Any]:
    """Read a log by the ledger of a checkout, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--read", path],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} can't read the log: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result["problems"] or result["unverified"]:
        raise RuntimeError(f"{checkout}: {result['problems']} {result['unverified']}")
    return result


def rows(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Return the table of the medians, and of the ratios of the same round to the first checkout.

    Args:
        results: Of each round, by checkout.
    """
    (_, first), *_ = results.items()
    table = []
    for name, rounds in results.items():
        row = {"ledger": name}
        for key, unit, scale in (("seconds", "processor s", 1.0), ("num_bytes", "MB", 1e6)):
            values = [one[key] / scale for one in rounds]
            ratios = [one[key] / other[key] for one, other in zip(rounds, first, strict=True)]
            row[unit] = f"{statistics.median(values):,.1f}"
            row[f"{unit}, of the first"] = f"{statistics.median(ratios):.2f}"
        row["us a sample"] = (
            f"{1e6 * statistics.median(one['seconds'] / one['num_samples'] for one in rounds):.1f}"
        )
        table.append(row)
    return table


def main() -> None:
    """Write a log, let the checkouts read it in turn, and write the page."""
    parser = argparse.ArgumentParser(description="What the ledger takes of a long log.")
    parser.add_argument("--samples", type=int, default=1_000_000, help="trained samples of the log")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=3, help="readings by each checkout")
    parser.add_argument("--before", type=Path, help="another checkout, which takes turns with this")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read_log(arguments.read)))
        return
    from benchmarks import report

    checkouts = {"this": Path(__file__).parents[1]}
    if arguments.before:
        checkouts = {"before": arguments.before.resolve()} | checkouts
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="relax-ledger-") as folder:
        path = Path(folder) / "log"
        num_samples = write_log(path, num_samples=arguments.samples, num_tokens=arguments.tokens)
        for number in range(arguments.rounds):
            for name in list(checkouts)[:: 1 if number % 2 else -1]:
                results[name].append(measure(checkouts[name], path))
                print(name, results[name][-1], file=sys.stderr)
    report.write(
        "ledger",
        title=f"The ledger of {num_samples:,} samples of {arguments.tokens} tokens",
        command=f"python -m benchmarks.ledger --samples {arguments.samples} --tokens "
        f"{arguments.tokens} --rounds {arguments.rounds}"
        + (" --before CHECKOUT" if arguments.before else ""),
        rows=rows(results),
        data={"load": os.getloadavg()[0], "results": results},
    )


if __name__ == "__main__":
    main()
