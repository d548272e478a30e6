"""Traces cover each trained prompt group from prompt to step although a rollout worker is killed,
and an unavailable collector delays no worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from harness import FaultRun, assert_ledger_balances
from otlp_receiver import Collector, ReceivedSpan, collecting

from relax_events.events.types import TrainStepCommitted
from relax_events.runtime.failpoints import VARIABLE

LOST = 'relax_spans_dropped_total{reason="collector",role="trainer"}'
PATH = {
    "issue prompt.groups": "relax-prompter",
    "wait prompt.groups": "relax-rollout",
    "generate prompt.groups": "relax-rollout",
    "score rollout.samples": "relax-reward",
    "wait rollout.samples": "relax-advantage",
    "advantage rollout.samples": "relax-advantage",
    "wait advantage.samples": "relax-trainer",
    "train advantage.samples": "relax-trainer",
}
KILLED = "rollout.before_settle:4=kill"
"""Its samples are acknowledged, no one has heard of its spans."""
EVALUATORS = {"relax-reference", "relax-actor-forward"}


def redelivered(span: ReceivedSpan) -> bool:
    return bool(span.facts["relax.delivery"] > 1)


def committed(run: FaultRun) -> list[TrainStepCommitted]:
    events = [run.decode(record) for record in run.records("control.train-steps")]
    return [event for event in events if isinstance(event, TrainStepCommitted)]


def traces_of(collector: Collector) -> dict[bytes, list[ReceivedSpan]]:
    traces = defaultdict(list)
    for span in collector.spans:
        traces[span.key[0]].append(span)
    return traces


def assert_is_traced(step: TrainStepCommitted, collector: Collector) -> None:
    """Assert that a step's span links the prompt groups that it trained, and that the trace of each
    is whole, connected, and leads to the step."""
    (span,) = [
        span
        for span in collector.named("step advantage.samples")
        if span.facts["relax.train_step"] == step.train_step
    ]
    (publication,) = [
        other
        for other in collector.named("publish control.policy-versions")
        if other.parent == span.key[1]
    ]
    assert publication.facts["relax.policy_version"] == step.policy_version
    traces = traces_of(collector)
    found = []
    for trace_id, root_id in span.links:
        trace = traces[trace_id]
        (root,) = [one for one in trace if not one.parent]
        assert (root.name, root.key, root.kind) == (
            "issue prompt.groups",
            (trace_id, root_id),
            "PRODUCER",
        )
        assert {one.parent for one in trace if one is not root} == {root_id}, (
            "every span hangs on the root"
        )
        assert {one.facts["relax.prompt_group_id"] for one in trace} == {
            root.facts["relax.prompt_group_id"]
        }
        (trained,) = [one for one in trace if one.name == "train advantage.samples"]
        assert (trained.links, trained.kind) == ((span.key,), "CONSUMER")
        assert trained.facts["messaging.destination.name"].endswith(".advantage.samples")
        assert span.began_ns <= trained.began_ns <= trained.ended_ns <= span.ended_ns
        found.append(root.facts["relax.prompt_group_id"])
    assert found == step.prompt_group_ids


def assert_shows_the_whole_path(trace: list[ReceivedSpan]) -> None:
    services = {span.name: span.service for span in trace if span.service not in EVALUATORS}
    assert services == PATH
    assert {span.service for span in trace if span.name == "evaluate rollout.samples"} == EVALUATORS
    generated = next(span for span in trace if span.name == "generate prompt.groups")
    assert (generated.facts["relax.num_samples"], generated.facts["relax.engine"]) == (
        4,
        "transformers",
    )
    assert 4 <= generated.facts["relax.num_tokens"] <= 24
    assert generated.facts["messaging.kafka.offset"] >= 0


def test_trained_prompt_groups_are_traced_and_a_lost_collector_is_tolerated(
    start_run: Callable[..., FaultRun],
) -> None:
    with collecting() as collector:
        run = start_run(
            run={"num_steps": 40}, telemetry={"traces": {"endpoint": collector.endpoint}}
        )
        run.variables[VARIABLE] = KILLED
        process = run.start()
        run.wait_until(
            lambda: any(redelivered(span) for span in collector.named("generate prompt.groups")),
            "another took up its work",
        )
        num_traced = run.state.num_steps + 2
        run.wait_until_steps(num_traced)
        run.wait_until(
            lambda: len(collector.named("step advantage.samples")) >= num_traced,
            "the steps' spans came",
        )
    run.wait_until(lambda: run.metrics("trainer-0").get(LOST, 0) > 0, "the trainer lost spans")
    assert run.state.num_steps < run.config.run.num_steps, "the collector went away within the run"
    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)

    steps = committed(run)[
        : num_traced - 1
    ]  # of the last one others than the trainer may not have sent all
    for step in steps:
        assert_is_traced(step, collector)
    trained = {name for step in steps for name in step.prompt_group_ids}
    resumed_work = {
        span.facts["relax.prompt_group_id"]: span.key[0]
        for span in collector.named("generate prompt.groups")
        if redelivered(span)
    }
    assert resumed_work.keys() & trained, (
        "what the killed worker held was trained, and is among the traced"
    )
    assert_shows_the_whole_path(
        traces_of(collector)[resumed_work[min(resumed_work.keys() & trained)]]
    )
