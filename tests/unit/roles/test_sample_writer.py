"""What a rollout worker writes of a prompt group some of whose samples are lost."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from event_samples import issued

from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import EpisodeFailed
from relax_events.events.parts import FinishReason, Outcome, VersionSegment
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.leases import Lease
from relax_events.kafka.records import Record
from relax_events.roles.inflight_group import InflightGroup
from relax_events.roles.sample_writer import SampleWriter

GROUP = "000003-0001-0"
PROMPT = np.array([7, 8, 9], np.int32)
TOPK = {"distill_coefficient": 1.0, "distill_tokens": "student_topk", "distill_top_k": 2}


def build_sample(index: int, reason: FinishReason, **fields: Any) -> GeneratedSample:
    """Make a sample of two tokens; one that failed has them too."""
    is_failed = reason in (FinishReason.ERROR, FinishReason.LOST)
    tokens = np.array([4, 5 + index], np.int32)
    return GeneratedSample(
        **{
            "sample_id": f"{GROUP}/{index}",
            "prompt_group_id": GROUP,
            "tokens": tokens,
            "logprobs": np.full(2, -0.5, np.float32),
            "segments": (VersionSegment(4, 1), VersionSegment(5, 1)),
            "finish_reason": reason,
            "error": f"fault {index}: " + 1000 * "x" if is_failed else "",
        }
        | fields
    )


class Stage:
    """A writer whose worker keeps what is sent."""

    def __init__(self, config: Any) -> None:
        self.sent: list[Any] = []
        self.dead_letters: list[Exception] = []
        self.counted: Counter[str] = Counter()
        records = SimpleNamespace(
            producer=SimpleNamespace(send=lambda record, **_: self.sent.append(record)),
            build_for_samples=lambda _, samples: list(samples),
            build_end_request=lambda *fields: fields,
            dead_letter=lambda _, error: self.dead_letters.append(error),
            flush_dead_letters=lambda: None,
        )
        self.worker: Any = SimpleNamespace(
            config=config,
            worker_id="rollout-0",
            records=records,
            metrics=SimpleNamespace(
                count_tokens=lambda _: None, count_generated=self.counted.update
            ),
            lifecycle=SimpleNamespace(record_processed=lambda *_: None),
        )
        renderer: Any = SimpleNamespace(completion_text=lambda tokens: str(tokens.tolist()))
        self.writer = SampleWriter(self.worker, renderer, SimpleNamespace())  # type: ignore[arg-type]

    def send(self, samples: list[GeneratedSample]) -> list[Any]:
        lease = Lease(Record("queue", 0, 0, GROUP, b"", {}, 0), 1, lambda _: None)
        group = InflightGroup([lease], issued(GROUP, of=len(samples)), PROMPT)
        group.samples = samples
        self.writer.send([group], 0.0)
        return self.sent


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.LOST])
def test_lost_sample_is_recorded_as_its_prompt_alone(
    make_run_config: Any, reason: FinishReason
) -> None:
    samples = [build_sample(index, FinishReason.STOP) for index in range(3)]
    events: list[SampleRolledOut] = Stage(make_run_config()).send(
        [
            samples[0],
            build_sample(1, reason),
            build_sample(2, FinishReason.LATE, error="60 s"),
            build_sample(3, FinishReason.STOP),
        ]
    )
    assert [event.finish_reason.value for event in events] == ["stop", "lost", "late", "stop"]
    lost = events[1]
    assert np.array_equal(lost.tokens, PROMPT)
    assert not lost.loss_mask.any()
    assert not lost.rollout_logprobs.any()
    assert (lost.num_prompt_tokens, lost.completion, lost.version_segments) == (3, "[]", [])
    assert (lost.key.min_policy_version, lost.key.max_policy_version) == (4, 4)
    assert {event.key.policy_version for event in events} == {4}
    assert (len(lost.error), lost.error[:9]) == (600, "fault 1: ")
    assert [events[index].error for index in (0, 2)] == ["", "60 s"]
    assert len({event.key.generation_digest for event in events}) == 1


def test_prompt_group_with_too_few_usable_samples_ends_with_their_number(
    make_run_config: Any,
) -> None:
    stage = Stage(make_run_config(environment={"command": ("agent",)}))
    lost = [build_sample(index, FinishReason.LOST) for index in range(3)]
    ((group, outcome, reason),) = stage.send([*lost, build_sample(3, FinishReason.STOP)])
    assert (group, outcome) == (GROUP, Outcome.FAILED)
    assert reason.startswith(
        "engine: 1 of 4 samples are usable, 2 are needed (algorithm.min_samples_per_group): "
        "3 lost; first: fault 0: xxx"
    )
    assert len(reason) < 750
    (dead_letter,) = stage.dead_letters
    assert isinstance(dead_letter, EpisodeFailed)
    assert str(dead_letter) == reason


def test_lost_sample_has_arrays_of_the_shapes_of_the_others(make_run_config: Any) -> None:
    config = make_run_config(
        algorithm=TOPK, teacher={"model_path": "teacher"}, model={"routing_replay": "rollout"}
    )
    arrays = {
        "top_tokens": np.ones((2, 2), np.int32),
        "routed_experts": np.ones((4, 3, 2), np.uint8),
    }
    usable = [build_sample(index, FinishReason.STOP, **arrays) for index in range(2)]
    events = Stage(config).send([build_sample(2, FinishReason.LOST), *usable])
    assert events[0].topk_ids.shape == (0, 2)
    assert (events[0].routed_experts.shape, events[0].routed_experts.dtype) == ((2, 3, 2), "u1")
    assert not events[0].routed_experts.any()


def test_samples_are_counted_by_how_they_ended_also_of_a_failed_prompt_group(
    make_run_config: Any,
) -> None:
    stage = Stage(make_run_config())
    assert stage.counted == {"stop": 0, "length": 0, "late": 0, "lost": 0}, "an increase is seen"
    stop, length, late = FinishReason.STOP, FinishReason.LENGTH, FinishReason.LATE
    reasons = [stop, length, late, FinishReason.ERROR]
    stage.send([build_sample(index, reason) for index, reason in enumerate(reasons)])
    stage.send([build_sample(index, FinishReason.LOST) for index in range(3)])
    assert stage.counted == {"stop": 1, "length": 1, "late": 1, "lost": 4}
