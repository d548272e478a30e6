"""The ledger recomputes a run from its records: it finds every change to the log of a valid run, and
reports nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_samples import changed, ended, evaluated, issued, ready, rolled_out
from valid_run import (
    SEVERAL,
    TAMPERINGS,
    Tampering,
    ValidRun,
    change_step,
    recorded_advantages,
    refuse_sample,
)

from relax_events.events.parts import (
    FinishReason,
    ObjectRef,
    Outcome,
    StoredArray,
    TopicOffset,
)
from relax_events.events.types import PolicyVersionPublished, PromptGroupIssued, SampleReady
from relax_events.history.ledger import stable_ranges
from relax_events.projections.ledger import Ledger
from relax_events.projections.ledger_findings import REMEDIES, Rule

STRANGE = "000900-0000-0"
BY_HAND = {
    *(Rule.TOO_STALE, Rule.TRAINED_BY_OLDER_VERSION, Rule.MANIFEST, Rule.NOT_AS_SOURCE),
    *(Rule.UNREADABLE_CONTROL, Rule.ISSUED_TWICE),
}
"""Rules with tests of their own: below, in test_replays.py and in
tests/integration/test_ledger_reading.py."""


def rules(ledger: Ledger) -> set[str]:
    return {finding.rule.value for finding in ledger.findings()}


def test_ledger_of_a_valid_run_has_no_findings() -> None:
    ledger = ValidRun(6).ledger()
    totals = ledger.totals()
    assert ledger.problems() == []
    assert ledger.unverified() == []
    assert totals["outcomes"] == {
        "issued": 13,
        "trained": 12,
        "filtered": 0,
        "expired": 0,
        "failed": 1,
        "in_flight": 0,
    }
    assert (
        totals["samples_rolled_out"],
        totals["samples_trained"],
        totals["samples_foreign"],
        totals["rollouts_regenerated"],
    ) == (24, 24, 0, 0)
    assert (totals["steps"], totals["staleness_counts"], totals["samples_lost"]) == (
        6,
        [4, 20],
        0,
    )


def test_samples_of_a_skipped_update_are_counted_once() -> None:
    run = ValidRun(6)
    for step in (2, 3):
        partition, offset = run.find("control.train-steps", train_step=step)
        run.change(
            "control.train-steps",
            offset,
            partition,
            update_skipped=step == 3,
            weights_digest=b"2" * 32,
        )
    ledger = run.ledger()
    assert ledger.problems() == []
    assert (
        ledger.totals()["updates_skipped"],
        ledger.totals()["samples_trained"],
        ledger.totals()["outcomes"]["trained"],
    ) == (1, 24, 12)


def test_held_update_is_counted_apart_and_keeps_the_weights() -> None:
    run = ValidRun(6)
    for step in (0, 1):
        change_step(run, step, update_held=True)
    totals = run.ledger().totals()
    assert (totals["updates_held"], totals["updates_skipped"]) == (2, 0)
    assert run.ledger().problems() == []
    change_step(run, 1, weights_digest=b"2" * 32)
    assert rules(run.ledger()) == {Rule.SKIPPED_MOVED}


def test_ledger_counts_trained_samples_by_their_outcome() -> None:
    run = ValidRun(6)
    refuse_sample(run, "000003-0000-0/1", mean_reward=0.0)
    for entity in ("rollout.samples", "advantage.samples"):
        run.change_sample(entity, "000003-0001-0/0", finish_reason=FinishReason.LATE)
    run.mark("000003-0001-0")
    ledger = run.ledger()
    assert ledger.problems() == []
    assert ledger.totals()["samples_by_outcome"] == {
        "finished": 22,
        "truncated": 0,
        "late": 1,
        "lost": 0,
        "refused": 1,
    }


def test_ledger_counts_prompt_groups_that_are_too_large() -> None:
    run = ValidRun(6)
    assert run.ledger().totals()["prompt_groups_too_large"] == 0
    partition, offset = run.find("control.prompt-group-outcomes", outcome=Outcome.FAILED)
    reason = "out of memory: a path of sample 000001-0001-0/0, 20000 tokens, does not fit"
    run.change("control.prompt-group-outcomes", offset, partition, reason=reason)
    totals = run.ledger().totals()
    assert (totals["prompt_groups_too_large"], totals["outcomes"]["failed"]) == (1, 1)


@pytest.mark.parametrize("rule", TAMPERINGS)
def test_ledger_reports_only_the_violated_rule(rule: str) -> None:
    run = ValidRun(6)
    TAMPERINGS[rule](run)
    ledger = run.ledger()
    assert rules(ledger) == {rule}
    (finding,) = ledger.findings()
    assert finding.examples[0]
    assert str(finding).endswith(finding.remedy)


@pytest.mark.parametrize("name", SEVERAL)
def test_ledger_reports_every_rule_that_a_change_violates(name: str) -> None:
    tamper, expected = SEVERAL[name]
    run = ValidRun(6)
    tamper(run)
    assert rules(run.ledger()) == expected


OTHER_TRAJECTORY = Rule.OTHER_TRAJECTORY
ALTERATIONS: dict[str, tuple[dict[str, Any], Rule]] = {
    "reward": ({"reward": 0.125}, Rule.NOT_SCORED),
    "tokens": ({"tokens": np.array([5, 6, 9, 9], np.int32)}, Rule.OTHER_TOKENS),
    "loss mask": ({"loss_mask": np.array([0, 1, 1, 1], np.uint8)}, OTHER_TRAJECTORY),
    "log-probabilities": (
        {"rollout_logprobs": np.array([0, 0, -0.5, -0.26], np.float32)},
        OTHER_TRAJECTORY,
    ),
    "temperature": ({"temperature": 0.5}, OTHER_TRAJECTORY),
    "segments": ({"version_segments": []}, OTHER_TRAJECTORY),
    "advantages": (
        {"advantages": np.array([0, 0, -0.7071, -0.7071], np.float32)},
        Rule.OTHER_ADVANTAGES,
    ),
    "paths": ({"path_lengths": [2, 2]}, OTHER_TRAJECTORY),
}
"""Changed fields of a ready sample, and the rule that they break."""
TRAJECTORY = [name for name in ALTERATIONS if name not in ("reward", "advantages")]
ALTERED = [f"00000{step}-0000-0" for step in (3, 5, 8)]


@pytest.mark.parametrize("kind", ALTERATIONS)
def test_every_altered_sample_is_found(kind: str) -> None:
    run, (changes, rule) = ValidRun(12), ALTERATIONS[kind]
    for group_id in ALTERED:
        run.change_sample("advantage.samples", f"{group_id}/1", **changes)
    (finding,) = [finding for finding in run.ledger().findings() if finding.rule is rule]
    assert [example[:15] for example in finding.examples] == [f"{name}/1" for name in ALTERED]


@pytest.mark.parametrize("kind", TRAJECTORY)
def test_samples_altered_on_both_topics_are_found_by_the_digest_of_their_generation(
    kind: str,
) -> None:
    run, (changes, _) = ValidRun(12), ALTERATIONS[kind]
    for group_id in ALTERED:
        for entity in ("rollout.samples", "advantage.samples"):
            run.change_sample(entity, f"{group_id}/1", **changes)
    (finding,) = [
        finding for finding in run.ledger().findings() if finding.rule is Rule.OTHER_GENERATION
    ]
    assert [example[:13] for example in finding.examples] == ALTERED


def evaluate(run: ValidRun, name: str, role: str, topic: str, field: str) -> None:
    """Let a model compute numbers for a sample that is ready with them."""
    group_id, index = name.split("/")
    partition, offset = run.find("advantage.samples", sample_id=name)
    sample: Any = run.at("advantage.samples", partition)[offset]
    event = changed(
        evaluated(group_id, int(index), model_role=role),
        generation_digest=sample.key.generation_digest,
        values=np.array([0, 0, -0.5, -1.5], np.float32),
        topk_logprobs=np.full((2, 3), -2, np.float32) if role == "teacher" else None,
    )
    run.at(topic, partition).append(event)
    extra = {"topk_teacher_logprobs": event.topk_logprobs} if role == "teacher" else {}
    run.change("advantage.samples", offset, partition, **{field: event.values}, **extra)


MODELS = {
    "reference": ("reference.logprobs", "ref_logprobs"),
    "actor": ("actor.logprobs", "actor_logprobs"),
    "critic": ("critic.values", "values"),
    "teacher": ("teacher.logprobs", "teacher_logprobs"),
}


@pytest.mark.parametrize("role", MODELS)
def test_numbers_of_other_models_are_those_on_their_topics(role: str) -> None:
    run, (topic, field) = ValidRun(12), MODELS[role]
    for group_id in ALTERED:
        for index in range(2):
            evaluate(run, f"{group_id}/{index}", role, topic, field)
    ledger = run.ledger()
    assert (ledger.problems(), ledger.unverified()) == ([], [])
    forged = np.array([0, 0, -0.5, -1.25], np.float32)
    for group_id in ALTERED:
        run.change_sample("advantage.samples", f"{group_id}/1", **{field: forged})
    (finding,) = run.ledger().findings()
    assert finding.rule is Rule.OTHER_EVALUATION
    assert finding.examples == tuple(
        f"{name}/1 in train step {int(name[:6])}: {role}" for name in ALTERED
    )


def test_altered_teacher_sets_and_numbers_of_another_generation_are_found() -> None:
    run, name = ValidRun(6), "000003-0000-0/1"
    evaluate(run, name, "teacher", *MODELS["teacher"])
    run.change_sample("advantage.samples", name, topk_teacher_logprobs=np.zeros((2, 3), np.float32))
    evaluate(run, "000004-0000-0/0", "critic", *MODELS["critic"])
    run.change_sample("critic.values", "000004-0000-0/0", generation_digest="v2-of-another")
    (finding,) = run.ledger().findings()
    assert (finding.rule, finding.count) == (Rule.OTHER_EVALUATION, 2)


def test_stored_numbers_of_a_model_have_the_same_digest() -> None:
    run, name = ValidRun(6), "000003-0000-0/1"
    evaluate(run, name, "reference", *MODELS["reference"])
    values = np.array([0, 0, -0.5, -1.5], np.float32)
    run.change_sample("advantage.samples", name, ref_logprobs=store_array(values))
    assert run.ledger().problems() == []


@pytest.mark.parametrize("digest", ["", "0" * 32])
def test_samples_without_a_digest_that_can_be_recomputed_are_listed(digest: str) -> None:
    run = ValidRun(12)
    for index in range(2):
        for entity in ("rollout.samples", "reward.scores", "advantage.samples"):
            run.change_sample(entity, f"000003-0000-0/{index}", generation_digest=digest)
    ledger = run.ledger()
    assert ledger.problems() == []
    assert ledger.unverified() == [
        (
            "that the samples of 1 prompt groups are those that were generated together, since "
            "their generation has no digest of this release's form"
        )
    ]


def test_answers_of_the_data_have_no_segments_when_they_are_ready() -> None:
    run = ValidRun(6)
    for (entity, partition), events in run.log.items():
        for offset in range(len(events) if entity == "advantage.samples" else 0):
            run.change(entity, offset, partition, version_segments=[])
    ledger = run.ledger(has_rewards=False)
    assert (ledger.problems(), ledger.unverified()) == ([], [])


def test_arrays_in_the_object_store_have_the_same_digest() -> None:
    run = ValidRun(6)
    for entity, names in {
        "rollout.samples": ("tokens", "loss_mask"),
        "advantage.samples": ("tokens", "rollout_logprobs"),
    }.items():
        partition, offset = run.find(entity, sample_id="000003-0000-0/1")
        event: Any = run.at(entity, partition)[offset]
        stored = {name: store_array(getattr(event, name)) for name in names}
        run.change(entity, offset, partition, **stored)
    ledger = run.ledger()
    assert (ledger.problems(), ledger.unverified()) == ([], [])


def store_array(array: np.ndarray) -> StoredArray:
    values = array.tobytes()
    reference = ObjectRef("memory://a", hashlib.sha256(values).digest(), len(values))
    return StoredArray(array.dtype.str, array.shape, reference)


def test_records_of_a_generation_share_its_digest_in_memory() -> None:
    facts = ValidRun(1).ledger()._groups[0]["000000-0000-0"]
    (copy,) = facts.generated["000000-0000-0/0"]
    assert copy.rest is copy.whole
    assert (len(copy.tokens), len(copy.rest)) == (16, 16)
    strings = {id(copy.generation) for copies in facts.generated.values() for copy in copies}
    strings |= {id(record.generation) for record in facts.ready.values()}
    assert len(strings) == 1


@pytest.mark.parametrize(("lost_worker", "claims"), [("rollout-1", 0), (None, 1)])
def test_prompt_group_may_be_issued_once_more_for_a_silent_worker(
    lost_worker: str | None, claims: int
) -> None:
    run = ValidRun(6)
    run.issue("000003-0000-0")
    for (entity, partition), events in run.log.items():
        if entity == "prompt.groups" and events[-1].prompt_group_id == "000003-0000-0":
            run.change(entity, len(events) - 1, partition, lost_worker=lost_worker)
    ledger = run.ledger()
    assert (ledger.problems(), ledger.warnings()) == ([], [])
    assert len(ledger.unverified()) == claims


def test_prompt_group_that_was_issued_twice_is_named_and_breaks_no_promise() -> None:
    run = ValidRun(6)
    run.issue("000003-0000-0")
    ledger = run.ledger()
    assert (ledger.findings(), ledger.unverified()) == ([], [])
    (warning,) = ledger.warnings()
    assert str(warning).startswith("prompt group issued twice: 1, for example 000003-0000-0")
    assert ledger.totals()["prompt_groups_issued_twice"] == 1


def test_issue_that_a_stopped_prompter_writes_after_the_prompt_group_ended_is_named() -> None:
    run = ValidRun(30)
    ledger = Ledger(1, advantages=recorded_advantages())
    for below, (at, event) in in_step(run):
        ledger.apply(event, at)
        ledger.finalize(below)
    at = TopicOffset(run.plan.topic("prompt.groups"), 0, 1000)
    for lost_worker in ("", "rollout-1"):
        ledger.apply(replace(issued("000003-0000-0"), lost_worker=lost_worker), at)
    assert [one.count for one in ledger.warnings()] == [1]
    assert ledger.problems() == []


def test_second_history_on_a_log_is_named_instead_of_each_of_its_records() -> None:
    run, second = ValidRun(6), ValidRun(4)
    for entity in ("control.policy-versions", "control.train-steps"):
        run.at(entity).extend(second.at(entity))
    found = {finding.rule: finding for finding in run.ledger().findings()}
    history = found[Rule.TWO_HISTORIES]
    assert history.count == 2
    assert "publishes version 0 again, after 6" in history.examples[0] + history.examples[1]
    assert "commits train step 0 again, after 5" in history.examples[0] + history.examples[1]
    assert not found.keys() & {
        *(Rule.VERSION_ORDER, Rule.STEP_ORDER, Rule.OFFSET_WENT_BACK, Rule.TRAINED_BELOW_OFFSET),
        Rule.UNPAIRED,
    }


def test_every_rule_has_a_remedy_and_a_test() -> None:
    assert set(REMEDIES) == set(Rule)
    assert {Rule(name) for name in TAMPERINGS} | BY_HAND == set(Rule)


@pytest.mark.parametrize(
    "tamper", [lambda _: None, *TAMPERINGS.values()], ids=["nothing", *TAMPERINGS]
)
def test_incremental_finalization_does_not_change_ledger_findings(tamper: Tampering) -> None:
    """Fed version by version and settled behind each, as a long log is read."""
    run = ValidRun(30)
    tamper(run)
    ledger = Ledger(1, advantages=recorded_advantages())
    for below, (at, event) in in_step(run):
        ledger.apply(event, at)
        ledger.finalize(below)
    whole = run.ledger()
    assert rules(ledger) == rules(whole)
    assert ledger.totals() == whole.totals()


def in_step(run: ValidRun) -> list[tuple[int, Any]]:
    """Return the events, each with the step up to which all records are complete: the records of a
    prompt group and of a step come together."""

    def step_of(event: Any) -> int:
        for name in ("trainer_version", "train_step", "policy_version"):
            if hasattr(event, name):
                return int(getattr(event, name))
        return int(event.prompt_group_id[:6])

    newest, items = 0, []
    for at, event in run.items():
        step = step_of(event)
        if isinstance(event, PolicyVersionPublished):  # in the order of the log
            step = newest = max(newest, step)
        items.append((step, (at, event)))
    items.sort(key=lambda item: item[0])
    return [(max(step - 4, 0), item) for step, item in items]


def test_ledger_memory_does_not_grow_with_the_run() -> None:
    held = {}
    for num_steps in (40, 160):
        advantages = recorded_advantages()
        ledger, most = Ledger(1, advantages=advantages), 0
        for below, (at, event) in in_step(ValidRun(num_steps)):
            ledger.apply(event, at)
            ledger.finalize(below)
            most = max(most, ledger.num_held + advantages.num_held)
        assert advantages.num_held == 0
        assert ledger.problems() == []
        held[num_steps] = most
    assert held[160] == held[40] < 40 * 2


def test_spares_that_never_end_leave_only_their_names_in_memory() -> None:
    held = {}
    for num_steps in (40, 160):
        run, most = ValidRun(num_steps), 0
        for step in range(num_steps):
            run.issue(f"{step:06}-0002-0")
        ledger = Ledger(1, advantages=recorded_advantages())
        for below, (at, event) in in_step(run):
            ledger.apply(event, at)
            ledger.finalize(below)
            most = max(most, ledger.num_held)
        held[num_steps] = most
        assert ledger.totals() == run.ledger().totals()
        assert ledger.totals()["outcomes"]["in_flight"] == num_steps
    assert held[160] == held[40] < 40 * 3


def test_spare_that_ends_long_after_its_step_is_counted_once() -> None:
    run = ValidRun(40)
    run.issue("000003-0002-0")
    ledger = Ledger(1, advantages=recorded_advantages())
    for below, (at, event) in in_step(run):
        ledger.apply(event, at)
        ledger.finalize(below)
    outcomes = dict(ledger.totals()["outcomes"])
    at = TopicOffset(run.plan.topic("control.prompt-group-outcomes"), 0, 1000)
    samples = TopicOffset(run.plan.topic("rollout.samples"), 0, 1000)
    ledger.apply(rolled_out("000003-0002-0", 0), samples)
    ledger.apply(ended("000003-0002-0", Outcome.EXPIRED), at)
    totals = ledger.totals()
    assert ledger.problems() == []
    assert totals["outcomes"] == outcomes | {
        "in_flight": outcomes["in_flight"] - 1,
        "expired": outcomes["expired"] + 1,
    }
    assert totals["rollouts_regenerated"] == 0
    ledger.apply(ended("000003-0002-0", Outcome.EXPIRED), at)
    assert rules(ledger) == {Rule.DUPLICATE_OUTCOME}


def test_rejected_foreign_samples_are_counted_separately() -> None:
    run = ValidRun(6)
    for _ in range(2):
        run.at("rollout.samples", 0).append(rolled_out(STRANGE, 0))
    run.at("control.prompt-group-outcomes").append(ended(STRANGE, Outcome.FAILED))
    totals = run.ledger().totals()
    assert run.ledger().problems() == []
    assert (
        totals["samples_foreign"],
        totals["samples_rolled_out"],
        totals["rollouts_regenerated"],
    ) == (1, 24, 0)
    assert totals["outcomes"]["failed"] == 1


def test_regenerated_samples_are_counted_and_break_no_rule() -> None:
    run = ValidRun(6)
    run.generate("000003-0000-0", version=3)
    ledger = run.ledger()
    assert (ledger.problems(), ledger.totals()["rollouts_regenerated"]) == ([], 2)


@pytest.mark.parametrize("entity", ["advantage.samples", "prompt.end-requests"])
def test_request_to_end_a_prompt_group_is_not_an_outcome(entity: str) -> None:
    run = ValidRun(6)
    run.issue("000007-0000-0")
    run.at(entity, 0).append(ended("000007-0000-0", Outcome.FILTERED))
    ledger = run.ledger()
    assert (ledger.problems(), ledger.totals()["outcomes"]["in_flight"]) == ([], 1)


def test_forged_prompt_group_is_none_of_the_run() -> None:
    run, forged = ValidRun(6), "000002-0000-0"
    run.issue(forged, of=7)
    run.issue("000002-0099-0", of=7)

    def is_foreign(prompt: PromptGroupIssued) -> bool:
        return prompt.samples_per_prompt == 7

    assert run.ledger(is_foreign=is_foreign).totals() == ValidRun(6).ledger().totals()
    assert run.ledger(is_foreign=is_foreign).problems() == []
    assert len(run.ledger().problems()) > 0


@pytest.mark.parametrize(
    ("key", "is_generated", "broken"),
    [
        ("000007-0000-0", True, {"committed offsets passed a prompt group without an outcome"}),
        ("000000-0000-0", True, set()),
        ("000007-0000-0", False, set()),
    ],
)
def test_consumed_sample_of_an_open_prompt_group_is_found_unless_it_is_foreign(
    key: str, is_generated: bool, broken: set[str]
) -> None:
    run, group = ValidRun(6), "000007-0000-0"
    run.issue(group)
    if is_generated:
        run.generate(group, version=6)
    partition = run.plan.partition(group, 6)
    run.at("advantage.samples", partition).append(ready(group, 0, version=6))
    consumed = TopicOffset(
        run.plan.topic("advantage.samples"), partition, len(run.at("advantage.samples", partition))
    )
    change_step(run, 5, consumed=[consumed])
    ledger = Ledger(1)
    for at, event in run.items():
        is_sample = isinstance(event, SampleReady) and event.prompt_group_id == group
        ledger.apply(event, at, key=key if is_sample else "")
    assert rules(ledger) == broken


@pytest.mark.parametrize(
    ("outcome", "is_found"),
    [(Outcome.EXPIRED, True), (Outcome.TRAINED, False), (Outcome.FILTERED, False)],
)
def test_consumed_request_to_end_is_found_unless_its_writers_may_not_request_the_outcome(
    outcome: Outcome, is_found: bool
) -> None:
    run, group = ValidRun(6), "000007-0000-0"
    run.issue(group)
    run.at("prompt.end-requests", 0).append(ended(group, outcome))
    change_step(run, 5, consumed=[TopicOffset(run.plan.topic("prompt.end-requests"), 0, 1)])
    expected = {"committed offsets passed a prompt group without an outcome"}
    assert rules(run.ledger()) == (expected if is_found else set())


def test_spare_behind_the_last_trained_batch_slot_may_stay_open() -> None:
    run = ValidRun(6)
    run.issue("000003-0002-0")
    assert rules(run.ledger()) == set()


def test_open_prompt_group_is_allowed_until_the_end_for_unordered_batches() -> None:
    run = ValidRun(6)
    TAMPERINGS["prompt group of a trained step without an outcome"](run)
    assert rules(run.ledger(in_order=False, last_version=7)) == set()
    assert rules(run.ledger(in_order=False, last_version=6)) == {
        "prompt group of a trained step without an outcome"
    }


class GrowingLog:
    """A reader of topics on which a step is committed while their end offsets are queried."""

    def __init__(self, *answers: int) -> None:
        self._answers = list(answers)

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        return 0, self._answers.pop(0)


def test_stable_ranges_are_consistent_when_a_step_is_committed_meanwhile() -> None:
    """The step's record is written after the first query, its outcomes before the second: together
    they would be inconsistent."""
    reader: Any = GrowingLog(4, 40, 5, 40, 5, 40)
    spans = stable_ranges(reader, [("steps", 0), ("outcomes", 0)])
    assert spans == {("steps", 0): (0, 5), ("outcomes", 0): (0, 40)}
