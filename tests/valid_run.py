"""The log of a valid run, for tests to change: given to a ledger directly, or written to a broker
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from event_samples import changed, committed, ended, issued, published, ready, rolled_out, scored
from small_settings import small_run

from relax_events.events.generations import mark_generation
from relax_events.events.parts import (
    FinishReason,
    Outcome,
    SampleEvent,
    TopicOffset,
    VersionSegment,
)
from relax_events.events.types import Event, SampleRolledOut
from relax_events.history.ledger_advantages import RecordedAdvantages, choose_settings
from relax_events.projections.ledger import Ledger
from relax_events.staleness import IssuedGroup
from relax_events.topics import TopicPlan, compute_shard

MAX_STALENESS = 1
GROUPS_PER_STEP = 2
SAMPLES_PER_PROMPT = 2
MEAN, DEVIATION = 0.25, math.sqrt(0.125) + 1e-6
"""Of the rewards 0 and 0.5: grpo divides by the deviation with n - 1."""
LATE = "000040-0000-0"
"""A prompt group that no step of a test has reached."""
SETTINGS: dict[str, Any] = {
    "run": {
        "id": "valid",
        "num_steps": 100,
        "max_staleness": MAX_STALENESS,
        "prompts_per_step": GROUPS_PER_STEP,
        "samples_per_prompt": 2,
    },
    "model": {"path": "model"},
    "data": {"source": "jsonl:rows"},
    "broker": {
        "partitions_per_version": 2,
        "prompt_queue": "consumer_group",
        "queue_partitions": 2,
    },
}


def recorded_advantages() -> RecordedAdvantages:
    """Return a check of the advantages of valid runs."""
    config = small_run(SETTINGS)
    recorded = [(config.algorithm, config.engine.sampling.max_new_tokens)]
    return RecordedAdvantages(choose_settings(recorded, is_this_release=True), None)


class ValidRun:
    """Events by partition, as (entity, partition): the offset of each is its index in the list.

    Step s trains the prompt groups issued for it, which version s - 1 generated. Slot 1 of step 1
    is filled at the second attempt.
    """

    def __init__(self, num_steps: int = 6, *, run_id: str = "valid") -> None:
        self.plan = TopicPlan.from_config(
            small_run({**SETTINGS, "run": SETTINGS["run"] | {"id": run_id}})
        )
        self.log: dict[tuple[str, int], list[Event]] = {}
        self._publish(0)
        for step in range(num_steps):
            self._train(step)

    def at(self, entity: str, partition: int = 0) -> list[Event]:
        """Return the events of a partition."""
        return self.log.setdefault((entity, partition), [])

    def change(self, entity: str, index: int, partition: int = 0, **fields: Any) -> None:
        """Change fields of an event."""
        events = self.at(entity, partition)
        events[index] = changed(events[index], **fields)

    def change_sample(self, entity: str, name: str, **fields: Any) -> None:
        """Change fields of the first event about a sample."""
        partition, offset = self.find(entity, sample_id=name)
        self.change(entity, offset, partition, **fields)

    def find(self, entity: str, **fields: Any) -> tuple[int, int]:
        """Return partition and offset of the first event with these values."""
        for (name, partition), events in sorted(self.log.items()):
            for offset, event in enumerate(events):
                if name == entity and all(
                    getattr(event, field, None) == value for field, value in fields.items()
                ):
                    return partition, offset
        raise AssertionError(f"{entity} has no event with {fields}")

    def items(self) -> Iterator[tuple[TopicOffset, Event]]:
        """Yield all events with their offsets."""
        for (entity, partition), events in self.log.items():
            for offset, event in enumerate(events):
                yield TopicOffset(self.plan.topic(entity), partition, offset), event

    def ledger(self, **settings: Any) -> Ledger:
        """Return a ledger of these events."""
        settings.setdefault("advantages", recorded_advantages())
        ledger = Ledger(MAX_STALENESS, **settings)
        for at, event in self.items():
            ledger.apply(event, at)
        return ledger

    def issue(self, group_id: str, *, of: int = SAMPLES_PER_PROMPT) -> None:
        """Issue a prompt group."""
        event = issued(group_id, of=of)
        first = max(event.train_step - MAX_STALENESS, 0)
        self.at("prompt.groups", compute_shard(group_id, shards=self.plan.queue_partitions)).append(
            replace(event, required_policy_version=first)
        )

    def generate(self, group_id: str, *, version: int) -> list[tuple[int, int]]:
        """Generate a prompt group, score it and make it ready; return the partition and offset of
        each ready sample."""
        partition = self.plan.partition(group_id, version)
        samples = [
            rolled_out(
                group_id, index, version=version, tokens=np.array([5, 6, 7, index], np.int32)
            )
            for index in range(SAMPLES_PER_PROMPT)
        ]
        mark_generation(samples)
        locations = []
        for index, sample in enumerate(samples):
            reward, generation = index / 2, sample.key.generation_digest
            self.at("rollout.samples", partition).append(sample)
            self.at("reward.scores", partition).append(
                scored(group_id, index, version=version, reward=reward, generation=generation)
            )
            locations.append((partition, len(self.at("advantage.samples", partition))))
            self.at("advantage.samples", partition).append(
                ready(
                    group_id,
                    index,
                    version=version,
                    generation_digest=generation,
                    tokens=sample.tokens,
                    advantages=sample.loss_mask * np.float32((reward - MEAN) / DEVIATION),
                    reward=reward,
                )
            )
        return locations

    def mark(self, group_id: str) -> None:
        """Give the records of a prompt group the digest of the samples that are there now."""
        samples = [
            event
            for (entity, _), events in self.log.items()
            for event in events
            if isinstance(event, SampleRolledOut) and event.prompt_group_id == group_id
        ]
        mark_generation(samples)
        digest = samples[0].key.generation_digest
        for entity in ("reward.scores", "advantage.samples"):
            for sample in samples:
                self.change_sample(entity, sample.sample_id, generation_digest=digest)

    def end(self, group_id: str, outcome: Outcome, *, version: int, step: int) -> None:
        """End a prompt group."""
        trained = outcome is Outcome.TRAINED
        end = ended(group_id, outcome, version=version, reason="" if trained else "because")
        mean = (SAMPLES_PER_PROMPT - 1) / 4 if trained else None
        self.at("control.prompt-group-outcomes").append(
            replace(end, trainer_version=step, mean_reward=mean)
        )

    def _publish(self, version: int) -> None:
        locations = [
            (entity, partition)
            for entity in ("rollout.samples", "reward.scores", "advantage.samples")
            for partition in self._slot(version)
        ]
        starts = [
            TopicOffset(self.plan.topic(entity), partition, len(self.at(entity, partition)))
            for entity, partition in locations
        ]
        self.at("control.policy-versions").append(published(version, start_offsets=starts))

    def _slot(self, version: int) -> range:
        return self.plan.partitions_of_version(version)

    def _train(self, step: int) -> None:
        groups = [f"{step:06d}-{index:04d}-0" for index in range(GROUPS_PER_STEP)]
        for group in groups:
            self.issue(group)
        version = max(step - MAX_STALENESS, 0)
        if step == 1:
            self.end(groups[1], Outcome.FAILED, version=version, step=step)
            groups[1] = groups[1][:-1] + "1"
            self.issue(groups[1])
        locations = [
            location for group in groups for location in self.generate(group, version=version)
        ]
        partitions, offsets = np.array(locations).T
        counts = [0] * (step - version) + [len(locations)]
        topic = self.plan.topic("advantage.samples")
        consumed = [
            TopicOffset(topic, partition, len(self.at("advantage.samples", partition)))
            for partition in self._slot(version)
        ]
        names = [f"{group}/{index}" for group in groups for index in range(SAMPLES_PER_PROMPT)]
        zeros = np.zeros(len(names), np.int32)
        layout = {
            "partitions": partitions.astype(np.int32),
            "offsets": offsets.astype(np.int64),
            "ranks": zeros,
            "micro_batches": zeros,
        }
        event = committed(
            step,
            prompt_group_ids=groups,
            sample_ids=names,
            staleness_counts=counts,
            consumed=consumed,
            **layout,
        )
        self.at("control.train-steps").append(event)
        for group in groups:
            self.end(group, Outcome.TRAINED, version=version, step=step)
        self._publish(step + 1)


Tampering = Callable[[ValidRun], None]


def _step(run: ValidRun, step: int) -> Any:
    return run.at("control.train-steps")[step]


def _drop(run: ValidRun, entity: str, **fields: Any) -> None:
    """Remove a record; where later offsets must stay, put another producer's record there."""
    partition, offset = run.find(entity, **fields)
    foreign = {
        "rollout.samples": rolled_out,
        "reward.scores": scored,
        "advantage.samples": ready,
        "prompt.groups": issued,
    }.get(entity)
    run.at(entity, partition)[offset : offset + 1] = (
        [] if foreign is None else [foreign("000900-0000-0")]
    )


def _older_tokens(run: ValidRun) -> None:
    """The tokens are of version 2, every record about them names 3: the trainer's counts would
    agree."""
    for entity in ("rollout.samples", "advantage.samples"):
        run.change_sample(
            entity,
            "000004-0000-0/0",
            version_segments=[VersionSegment(2, 1), VersionSegment(3, 1)],
            min_policy_version=2,
        )
    run.mark("000004-0000-0")
    run.change(
        "control.prompt-group-outcomes",
        run.find("control.prompt-group-outcomes", prompt_group_id="000004-0000-0")[1],
        policy_version=2,
    )


def _newer_tokens(run: ValidRun) -> None:
    for entity in ("rollout.samples", "advantage.samples"):
        run.change_sample(
            entity,
            "000004-0000-0/0",
            version_segments=[VersionSegment(3, 1), VersionSegment(5, 1)],
            max_policy_version=5,
        )
    run.mark("000004-0000-0")


def _other_offset(run: ValidRun) -> None:
    step = _step(run, 3)
    step.offsets[0], step.offsets[1] = step.offsets[1], step.offsets[0]


def _train_half(run: ValidRun) -> None:
    step = _step(run, 3)
    keep = np.array([0, 2, 3])
    layout = {
        name: getattr(step, name)[keep]
        for name in ("partitions", "offsets", "ranks", "micro_batches")
    }
    run.change(
        "control.train-steps",
        3,
        sample_ids=[step.sample_ids[index] for index in keep],
        staleness_counts=[0, 3],
        **layout,
    )
    run.change(
        "control.prompt-group-outcomes",
        run.find("control.prompt-group-outcomes", prompt_group_id="000003-0000-0")[1],
        mean_reward=0.0,
    )


def _train_slot_again(run: ValidRun) -> None:
    """The step trains a second attempt of a slot together with the first one."""
    group = "000003-0000-1"
    run.issue(group)
    locations = run.generate(group, version=2)
    step = _step(run, 3)
    partitions, offsets = np.array(locations).T
    layout = {
        "partitions": partitions,
        "offsets": offsets,
        "ranks": np.zeros(2),
        "micro_batches": np.zeros(2),
    }
    wider = {
        name: np.concatenate([getattr(step, name), added.astype(getattr(step, name).dtype)])
        for name, added in layout.items()
    }
    names = {
        "prompt_group_ids": [*step.prompt_group_ids, group],
        "sample_ids": [*step.sample_ids, f"{group}/0", f"{group}/1"],
    }
    run.change("control.train-steps", 3, staleness_counts=[0, 6], **names, **wider)
    run.end(group, Outcome.TRAINED, version=2, step=3)


def _train_again(run: ValidRun) -> None:
    """Step 1 trains what step 0 trained."""
    former = _step(run, 0)
    fields = ("prompt_group_ids", "sample_ids", "partitions", "offsets")
    dropped = _step(run, 1).prompt_group_ids
    run.change(
        "control.train-steps",
        1,
        staleness_counts=[0, 4],
        **{name: getattr(former, name) for name in fields},
    )
    for entity in ("control.prompt-group-outcomes", "prompt.groups"):
        for group in dropped:
            _drop_all(run, entity, group)


def _drop_all(run: ValidRun, entity: str, group_id: str) -> None:
    for (name, _), events in run.log.items():
        if name == entity:
            events[:] = [
                event for event in events if getattr(event, "prompt_group_id", "") != group_id
            ]


def change_step(run: ValidRun, step: int, **changes: Any) -> None:
    run.change("control.train-steps", step, **changes)


def _end_at(run: ValidRun, group_id: str, **changes: Any) -> None:
    run.change(
        "control.prompt-group-outcomes",
        run.find("control.prompt-group-outcomes", prompt_group_id=group_id)[1],
        **changes,
    )


def _below_consumed(run: ValidRun) -> None:
    """Step 2 commits offsets behind what step 4 will train."""
    step = _step(run, 4)
    partition = int(step.partitions[0])
    topic = run.plan.topic("advantage.samples")
    consumed = [position for position in _step(run, 2).consumed if position.partition != partition]
    change_step(
        run, 2, consumed=[*consumed, TopicOffset(topic, partition, int(step.offsets[0]) + 1)]
    )


def _consumed_back(run: ValidRun) -> None:
    position = _step(run, 3).consumed[0]
    change_step(
        run, 5, consumed=[*_step(run, 5).consumed, replace(position, offset=position.offset - 1)]
    )


def _leave_open(run: ValidRun) -> None:
    """A batch slot of step 3 was issued once more, though its prompt group was trained."""
    run.issue("000003-0000-1")


def _pass_over(run: ValidRun) -> None:
    """The end that the advantage role requested is before the offsets that the trainer has
    consumed, and never came."""
    group = LATE
    run.issue(group)
    partition = run.plan.partition(group, 4)
    run.at("advantage.samples", partition).append(ended(group, Outcome.FILTERED, version=4))
    consumed = TopicOffset(
        run.plan.topic("advantage.samples"), partition, len(run.at("advantage.samples", partition))
    )
    change_step(run, 5, consumed=[consumed])


def _external_group_trained(run: ValidRun) -> None:
    external_id = "000003-1000000-0"
    for events in run.log.values():
        for index, event in enumerate(events):
            if getattr(event, "prompt_group_id", "") == "000003-0000-0":
                changes: dict[str, Any] = {"prompt_group_id": external_id}
                if isinstance(event, SampleEvent) or hasattr(event, "group_index"):
                    changes |= {"group_index": IssuedGroup.parse(external_id).slot.group_index}
                if hasattr(event, "sample_id"):
                    changes |= {"sample_id": f"{external_id}/{event.sample_id[-1]}"}
                events[index] = changed(event, **changes)
    run.mark(external_id)
    step = _step(run, 3)
    names = [name.replace("000003-0000-0", external_id) for name in step.sample_ids]
    change_step(run, 3, prompt_group_ids=[external_id, step.prompt_group_ids[1]], sample_ids=names)


def _again(run: ValidRun, entity: str, index: int, **changes: Any) -> None:
    run.at(entity).append(replace(run.at(entity)[index], **changes))


TAMPERINGS: dict[str, Tampering] = {
    "sample trained twice": _train_again,
    "batch slot of a train step trained twice": _train_slot_again,
    "prompt group not trained completely": _train_half,
    "sample of a trained prompt group was not trained": lambda run: run.at(
        "rollout.samples", 0
    ).append(rolled_out("000003-0000-0", 2, of=3)),
    "sample trained that was never generated": lambda run: _drop(
        run, "rollout.samples", sample_id="000003-0000-0/0"
    ),
    "sample trained with other tokens or versions than were generated": lambda run: (
        run.change_sample(
            "advantage.samples", "000003-0000-0/0", tokens=np.array([5, 6, 9, 9], np.int32)
        )
    ),
    "sample trained with another loss mask, log-probabilities, segments, paths, temperature or "
    "media than were generated": lambda run: run.change_sample(
        "advantage.samples", "000003-0000-0/0", temperature=0.5
    ),
    "sample trained with numbers of another model that no record of it gives": lambda run: (
        run.change_sample(
            "advantage.samples", "000003-0000-0/0", ref_logprobs=np.zeros(4, np.float32)
        )
    ),
    "sample trained with advantages that its rewards don't give": lambda run: run.change_sample(
        "advantage.samples", "000003-0000-0/0", advantages=np.array([0, 0, 0.5, 0.5], np.float32)
    ),
    "samples of a trained prompt group are not those of its generation digest": lambda run: [
        run.change_sample(entity, "000003-0000-0/0", finish_reason=FinishReason.ABORT)
        for entity in ("rollout.samples", "advantage.samples")
    ].clear(),
    "trained offset holds another record than the train step says": _other_offset,
    "sample trained with a reward that no score gives": lambda run: run.change_sample(
        "reward.scores", "000003-0000-0/0", reward=0.25
    ),
    "prompt group trained that was never issued": lambda run: _drop(
        run, "prompt.groups", prompt_group_id="000003-0000-0"
    ),
    "external prompt group trained": _external_group_trained,
    "train step reports wrong staleness counts": lambda run: change_step(
        run, 3, staleness_counts=[4]
    ),
    "train step that skipped its update committed other weights": lambda run: (
        change_step(run, 2, weights_digest=b"1" * 32),
        change_step(run, 3, update_skipped=True, weights_digest=b"2" * 32),
    )[0],
    "train step contradicts itself": lambda run: change_step(
        run, 3, prompt_group_ids=_step(run, 3).prompt_group_ids[:1]
    ),
    "prompt group trained without an outcome on control.prompt-group-outcomes": lambda run: (
        _drop_all(run, "control.prompt-group-outcomes", "000003-0000-0")
    ),
    "prompt group with outcome trained that no step trained": lambda run: (
        run.issue(LATE),
        run.end(LATE, Outcome.TRAINED, version=5, step=5),
    )[0],
    "outcome of a prompt group contradicts its train step": lambda run: _end_at(
        run, "000003-0000-0", trainer_version=2
    ),
    "prompt group with two different outcomes": lambda run: run.end(
        "000003-0000-0", Outcome.FAILED, version=2, step=5
    ),
    "prompt group ended twice": lambda run: _again(run, "control.prompt-group-outcomes", 3),
    "prompt group ended untrained without a reason": lambda run: _end_at(
        run, "000001-0001-0", reason=""
    ),
    "prompt group of a trained step without an outcome": _leave_open,
    "committed offsets passed a prompt group without an outcome": _pass_over,
    "consumed offset went back": _consumed_back,
    "sample trained below the consumed offset": _below_consumed,
    "train steps not in order": lambda run: _again(
        run, "control.train-steps", 3, prompt_group_ids=[], sample_ids=[], **_NOTHING
    ),
    "policy versions not in order": lambda run: _again(run, "control.policy-versions", 3),
    "two histories on one log": lambda run: run.at("control.policy-versions").append(published(0)),
    "policy version published without its train step": lambda run: run.at(
        "control.policy-versions"
    ).append(published(7)),
}
"""What breaks one promise, and that one alone, by the words with which the ledger finds it."""

_NOTHING: dict[str, Any] = {
    "partitions": np.zeros(0, np.int32),
    "offsets": np.zeros(0, np.int64),
    "ranks": np.zeros(0, np.int32),
    "micro_batches": np.zeros(0, np.int32),
    "staleness_counts": [],
    "consumed": [],
}


def _regenerate(run: ValidRun, name: str, *entities: str) -> None:
    """Have records of a sample belong to another generation."""
    for entity in entities:
        run.change_sample(entity, name, generation_digest="other")


def refuse_sample(run: ValidRun, name: str, *, mean_reward: float) -> None:
    """Let a sample be trained without a reward, since its scoring failed."""
    run.change_sample("reward.scores", name, reward=None, error="no verdict")
    run.change_sample("advantage.samples", name, reward=None)
    for index in range(SAMPLES_PER_PROMPT):  # the other is alone
        other = f"{name.rpartition('/')[0]}/{index}"
        run.change_sample("advantage.samples", other, advantages=np.zeros(4, np.float32))
    _end_at(run, name.rpartition("/")[0], mean_reward=mean_reward)


SEVERAL: dict[str, tuple[Tampering, set[str]]] = {
    "a score of another generation": (
        lambda run: [
            _regenerate(run, f"000003-0000-0/{index}", "rollout.samples", "advantage.samples")
            for index in range(2)
        ].clear(),
        {"sample trained with a reward that no score gives"},
    ),
    "samples of two generations": (
        lambda run: _regenerate(
            run, "000003-0000-0/0", "rollout.samples", "reward.scores", "advantage.samples"
        ),
        {"prompt group not trained completely"},
    ),
    "tokens older than the bound": (
        _older_tokens,
        {
            "staleness above max_staleness",
            "train step reports wrong staleness counts",
        },
    ),
    "tokens newer than the trainer": (
        _newer_tokens,
        {"sample trained by an older version than generated it"},
    ),
    "a scored sample without its reward": (
        lambda run: (
            run.change_sample("advantage.samples", "000003-0000-0/1", reward=None),
            _end_at(run, "000003-0000-0", mean_reward=0.0),
        )[0],
        {
            "sample trained with a reward that no score gives",
            "sample trained with advantages that its rewards don't give",
        },
    ),
    "a refused sample with a reward": (
        lambda run: run.change_sample(
            "reward.scores", "000003-0000-0/1", reward=None, error="no verdict"
        ),
        {"sample trained with a reward that no score gives"},
    ),
    "an end whose mean reward counts a refused sample": (
        lambda run: refuse_sample(run, "000003-0000-0/1", mean_reward=0.25),
        {"outcome of a prompt group contradicts its train step"},
    ),
    "another reward in the ready record": (
        lambda run: (
            run.change_sample("advantage.samples", "000003-0000-0/0", reward=0.75),
            _end_at(run, "000003-0000-0", mean_reward=0.625),
        )[0],
        {
            "sample trained with a reward that no score gives",
            "sample trained with advantages that its rewards don't give",
        },
    ),
    "other rewards by turn in the ready record": (
        lambda run: run.change_sample(
            "advantage.samples", "000003-0000-0/0", turn_rewards=np.array([0.0])
        ),
        {"sample trained with a reward that no score gives"},
    ),
    "an end with another mean reward": (
        lambda run: _end_at(run, "000003-0000-0", mean_reward=0.5),
        {"outcome of a prompt group contradicts its train step"},
    ),
}
"""What breaks a promise and is seen in two ways, or breaks one in another way than in
`TAMPERINGS`."""
