"""Traces: the context on a record, the exported spans, and the cost without a collector."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from otlp_receiver import Collector, collecting
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from relax_events.config import RunConfig, TracesConfig
from relax_events.errors import ConfigError
from relax_events.kafka.records import Record
from relax_events.telemetry.component_metrics import SpanMetrics
from relax_events.telemetry.traces import (
    NOT_TRACED,
    Traces,
    factory,
    open_traces,
    require_tracing,
)
from relax_events.telemetry.traces import export as sending
from relax_events.telemetry.traces.recorded import derive_root, is_sampled

MakeRunConfig = Callable[..., RunConfig]
GROUP = "000007-0003-0"
FOREIGN = (
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def open_role(make_run_config: MakeRunConfig, collector: Collector) -> Callable[..., Traces]:
    """Return an opener of a role's traces: `open_role("trainer", ratio=0.5)`."""

    def opened(role: str, **keys: object) -> Traces:
        config = make_run_config(
            run={"id": "test"}, telemetry={"traces": {"endpoint": collector.endpoint, **keys}}
        )
        return open_traces(
            config, role=role, worker_id=f"{role}-0", counts=SpanMetrics(role, CollectorRegistry())
        )

    return opened


def record(
    headers: dict[str, str],
    *,
    topic: str = "prompt.groups",
    offset: int = 5,
    key: str = GROUP,
    age_seconds: float = 2.0,
) -> Record:
    return Record(
        f"relax.test.{topic}", 1, offset, key, b"", headers, int((time.time() - age_seconds) * 1000)
    )


def test_every_role_continues_the_trace_that_the_prompter_began(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    prompter, rollout, trainer = (open_role(role) for role in ("prompter", "rollout", "trainer"))
    prompter.begin_group(GROUP, topic="prompt.groups", train_step=7).end()
    headers = dict(prompter.get_headers(GROUP))
    assert headers.keys() == {"traceparent"}

    rollout.add_record(record(headers))
    rollout.record_wait(GROUP, "prompt.groups")
    work = rollout.begin("generate", GROUP, topic="prompt.groups", engine="transformers")
    assert rollout.get_headers(GROUP) == headers
    work.end({"policy_versions": [3, 4]})

    trainer.add_record(record(headers, topic="advantage.samples"))
    trainer.begin("train", GROUP, topic="advantage.samples", train_step=7).end()
    step = trainer.begin_train_step(
        7, began_ns=time.time_ns(), headers=[trainer.get_headers(GROUP), {}]
    )
    publication = trainer.begin_publication(step, 8, began_ns=time.time_ns())
    publication.end()
    step.end({"metric.loss": 0.5})
    for role in (prompter, rollout, trainer):
        role.close()

    spans = {span.name: span for span in collector.spans}
    root, wait, generate = (
        spans["issue prompt.groups"],
        spans["wait prompt.groups"],
        spans["generate prompt.groups"],
    )
    train, stepped, published = (
        spans["train advantage.samples"],
        spans["step advantage.samples"],
        spans["publish control.policy-versions"],
    )
    assert headers["traceparent"] == f"00-{root.key[0].hex()}-{root.key[1].hex()}-01"
    assert {span.key[0] for span in (root, wait, generate, train)} == {root.key[0]}
    assert {span.parent for span in (wait, generate, train)} == {root.key[1]}
    assert 1.9 <= (wait.ended_ns - wait.began_ns) / 1e9 < 60
    assert (train.links, stepped.links) == ((stepped.key,), (root.key,))
    assert (published.parent, published.key[0]) == (stepped.key[1], stepped.key[0])
    assert [span.kind for span in (root, wait, generate, stepped, published)] == [
        "PRODUCER",
        "INTERNAL",
        "CONSUMER",
        "CONSUMER",
        "PRODUCER",
    ]
    assert {span.service for span in collector.spans} == {
        "relax-prompter",
        "relax-rollout",
        "relax-trainer",
    }
    assert generate.facts["relax.policy_versions"] == [3, 4]
    conventional = {
        name: value for name, value in generate.facts.items() if name.startswith("messaging.")
    }
    assert conventional == {
        "messaging.system": "kafka",
        "messaging.client.id": "test.rollout-0",
        "messaging.operation.name": "generate",
        "messaging.operation.type": "process",
        "messaging.destination.name": "relax.test.prompt.groups",
        "messaging.destination.partition.id": "1",
        "messaging.kafka.offset": 5,
    }


def test_reissued_prompt_group_keeps_its_trace_and_next_attempt_links_to_it(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    one, other = open_role("prompter"), open_role("prompter")
    for prompter in (one, other):
        prompter.begin_group(GROUP, topic="prompt.groups").end()
    assert one.get_headers(GROUP) == other.get_headers(GROUP)
    one.begin_group("000007-0003-1", topic="prompt.groups", instead_of=GROUP).end()
    one.close()
    first, second = collector.spans
    assert second.links == (first.key,)
    assert second.key[0] != first.key[0]


def test_only_the_prompter_decides_which_prompt_groups_are_traced(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    names = [f"{step:06d}-{group_index:04d}-0" for step in range(100) for group_index in range(20)]
    chosen = {name for name in names if is_sampled(derive_root("test", name).trace_id, 0.25)}
    assert 0.2 < len(chosen) / len(names) < 0.3
    sampler = TraceIdRatioBased(0.25)
    assert chosen == {
        name
        for name in names
        if sampler.should_sample(None, derive_root("test", name).trace_id, "").decision.is_sampled()
    }

    prompter, rollout = open_role("prompter", ratio=0.25), open_role("rollout", ratio=0.25)
    for name in names[:40]:
        prompter.begin_group(name, topic="prompt.groups").end()
        rollout.add_record(record(dict(prompter.get_headers(name)), key=name))
        rollout.record_wait(name, "prompt.groups")
        rollout.begin("generate", name, topic="prompt.groups").end()
    prompter.close()
    rollout.close()
    assert {name for name in names[:40] if prompter.get_headers(name)} == chosen & set(names[:40])
    assert len(collector.spans) == 3 * len(chosen & set(names[:40]))
    assert len(chosen & set(names[:40])) > 0


@pytest.mark.parametrize(
    "header", ["", "nonsense", FOREIGN[:-1] + "0", "00-" + "0" * 32 + FOREIGN[35:]]
)
def test_record_without_a_sampled_context_is_not_traced(
    open_role: Callable[..., Traces], header: str
) -> None:
    rollout = open_role("rollout")
    rollout.add_record(record({"traceparent": header} if header else {}))
    rollout.record_wait(GROUP, "prompt.groups")
    assert rollout.begin("generate", GROUP, topic="prompt.groups") is NOT_TRACED
    assert rollout.get_headers(GROUP) == {}


def test_trace_of_an_external_prompt_group_is_continued(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    rollout = open_role("rollout")
    rollout.add_record(record({"traceparent": FOREIGN, "tracestate": "theirs=1"}))
    rollout.begin("generate", GROUP, topic="prompt.groups").end()
    rollout.close()
    assert rollout.get_headers(GROUP) == {"traceparent": FOREIGN, "tracestate": "theirs=1"}
    (span,) = collector.spans
    assert (span.key[0].hex(), span.parent.hex()) == (FOREIGN[3:35], FOREIGN[36:52])


def test_trace_of_an_untrained_prompt_group_ends_with_the_reason(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    trainer = open_role("trainer")
    trainer.add_record(record({"traceparent": FOREIGN}, topic="advantage.samples"))
    trainer.record_group_end(
        GROUP, outcome="expired", reason="version 3 left the window of version 5"
    )
    trainer.record_group_end(GROUP, outcome="failed", reason="reward: no number")
    trainer.record_group_end("000000-0000-0", outcome="failed", reason="it is not traced")
    trainer.close()
    expired, failed = collector.named("end control.prompt-group-outcomes")
    assert (expired.facts["relax.outcome"], expired.facts["relax.reason"]) == (
        "expired",
        "version 3 left the window of version 5",
    )
    assert (expired.error, failed.error) == ("", "reward: no number")


def test_span_of_aborted_work_ends_with_an_error(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    reward = open_role("reward")
    reward.add_record(record({"traceparent": FOREIGN}, topic="rollout.samples"))
    with (
        pytest.raises(ZeroDivisionError),
        reward.trace_groups("score", [GROUP, GROUP, "another"], topic="rollout.samples"),
    ):
        raise ZeroDivisionError
    reward.close()
    (span,) = collector.spans
    assert (span.facts["relax.num_samples"], span.error) == (2, "the operation was aborted")


def test_train_step_span_exceeds_the_default_sdk_limit_on_links(
    open_role: Callable[..., Traces], collector: Collector
) -> None:
    trainer = open_role("trainer")
    headers = [{"traceparent": f"00-{FOREIGN[3:35]}-{number:016x}-01"} for number in range(1, 301)]
    trainer.begin_train_step(0, began_ns=time.time_ns(), headers=headers).end(
        {f"metric.{number}": 1.0 for number in range(150)}
    )
    trainer.close()
    (span,) = collector.spans
    assert len(span.links) == span.facts["messaging.batch.message_count"] == 300
    assert span.facts["relax.metric.149"] == 1.0


def test_no_trace_headers_are_written_without_a_collector(make_run_config: MakeRunConfig) -> None:
    config = make_run_config()
    traces = open_traces(
        config,
        role="prompter",
        worker_id="prompter-0",
        counts=SpanMetrics("prompter", CollectorRegistry()),
    )
    assert traces.begin_group(GROUP, topic="prompt.groups") is NOT_TRACED
    traces.add_record(record({"traceparent": FOREIGN}))
    assert (
        traces.get_headers(GROUP)
        == traces.begin_train_step(0, began_ns=0, headers=()).headers
        == {}
    )


def lost(registry: CollectorRegistry, reason: str) -> float:
    return (
        registry.get_sample_value(
            "relax_spans_dropped_total", {"role": "rollout", "reason": reason}
        )
        or 0.0
    )


class Noticed(SpanMetrics):
    """Tells when spans were lost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("rollout", registry)
        self.event = threading.Event()

    def lost(self, count: int, reason: str) -> None:
        super().lost(count, reason)
        self.event.set()


def test_unreachable_collector_loses_only_spans(
    make_run_config: MakeRunConfig, registry: CollectorRegistry
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        config = make_run_config(
            telemetry={
                "traces": {"endpoint": f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces"}
            }
        )
        counts = Noticed(registry)
        traces = open_traces(config, role="rollout", worker_id="rollout-0", counts=counts)
        traces.add_record(record({"traceparent": FOREIGN}))
        for _ in range(600):
            traces.begin("generate", GROUP, topic="prompt.groups").end()
        assert counts.event.wait(60)
        traces.close()
        assert lost(registry, "collector") >= sending.BATCH_SPANS
        assert lost(registry, "queue") == 0


HELD_SECONDS = 100.0


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have requests wait, as a collector that takes a connection and does not answer."""
    go = threading.Event()

    def export(_: object, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        go.wait(HELD_SECONDS)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(sending.OTLPSpanExporter, "export", export)
    yield go
    go.set()


def test_span_queue_is_bounded_and_counts_dropped_spans(
    make_run_config: MakeRunConfig, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "QUEUED_SPANS", 16)
    monkeypatch.setattr(sending, "BATCH_SPANS", 8)
    monkeypatch.setattr(sending, "CLOSE_SECONDS", 0.1)
    with held_up(monkeypatch) as go:
        config = make_run_config(telemetry={"traces": {"endpoint": "http://127.0.0.1:9/v1/traces"}})
        traces = open_traces(
            config, role="rollout", worker_id="rollout-0", counts=SpanMetrics("rollout", registry)
        )
        traces.add_record(record({"traceparent": FOREIGN}))
        for _ in range(100):
            traces.begin("generate", GROUP, topic="prompt.groups").end()
        assert 100 - 16 - 8 <= lost(registry, "queue") <= 100 - 16
        started = time.monotonic()
        traces.close()
        assert time.monotonic() - started < HELD_SECONDS / 2
        go.set()


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        (
            "127.0.0.1:4318",
            "must be an address such as http://127.0.0.1:4318/v1/traces, got '127.0.0.1:4318'",
        ),
        ("http:///v1/traces", "must be an address"),
        (
            "https://me:secret@collector/v1/traces",
            "give them as a header by OTEL_EXPORTER_OTLP_HEADERS",
        ),
    ],
)
def test_invalid_trace_endpoint_is_rejected(endpoint: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        TracesConfig(endpoint=endpoint)


def test_error_names_missing_package_with_its_extra(
    make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run_config(
        telemetry={"traces": {"endpoint": "http://127.0.0.1:4318/v1/traces", "ratio": 0.05}}
    )
    assert (
        require_tracing(config.telemetry.traces)
        == "5% of the prompt groups, to http://127.0.0.1:4318/v1/traces"
    )
    monkeypatch.setattr(factory, "PACKAGE", "a_package_that_is_not_there.http")
    with pytest.raises(
        ConfigError,
        match=r"^telemetry.traces.endpoint needs OpenTelemetry; pip install 'relax-events\[tracing\]'",
    ):
        require_tracing(config.telemetry.traces)
    assert require_tracing(TracesConfig()) == "none: telemetry.traces.endpoint is empty"
