"""Traces recorded with OpenTelemetry's SDK, named after its conventions for messaging.

Trace ids of prompt groups and train steps are derived from their names, so that a repetition
belongs to the same trace.

Source: OpenTelemetry semantic conventions for messaging spans; W3C Trace Context for the headers.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from relax_events.telemetry.traces.api import (
    NO_ATTRIBUTES,
    NO_HEADERS,
    NOT_TRACED,
    ReadRecord,
    TracedWork,
    Traces,
    Value,
)
from relax_events.telemetry.traces.export import SpanQueue


def derive_root(run_id: str, name: str) -> SpanContext:
    """Derive the root span of a prompt group's or step's trace."""
    digest = hashlib.blake2b(f"{run_id}/{name}".encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
    return SpanContext(
        trace_id or 1, span_id or 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Return whether a trace is sampled, by the eight bytes that OpenTelemetry's
    `TraceIdRatioBased` uses.
    """
    return (trace_id & (2**64 - 1)) < round(ratio * 2**64)


class DerivedIds(IdGenerator):
    """Generates the ids of `root` while it is set, otherwise random ones. It does not use the
    module `random`, which other code seeds.
    """

    def __init__(self) -> None:
        self.root: SpanContext | None = None

    def generate_trace_id(self) -> int:
        """See `IdGenerator`."""
        return self.root.trace_id if self.root else secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        """See `IdGenerator`."""
        return self.root.span_id if self.root else secrets.randbits(64) or 1


PROPAGATOR = TraceContextTextMapPropagator()
REMEMBERED_GROUPS = 4096
TYPES = {SpanKind.PRODUCER: "send", SpanKind.CONSUMER: "process"}


class SpanTracedWork(TracedWork):
    """Traced work that records a span."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = set_span_in_context(span, Context())

    @property
    def headers(self) -> Mapping[str, str]:
        """See `Work`."""
        return _build_headers(self.context)

    def end(self, facts: Mapping[str, Value] = NO_ATTRIBUTES, *, error: str = "") -> None:
        """See `Work`."""
        self.span.set_attributes(_prefix_attributes(facts))
        if error:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end()


@dataclass(slots=True)
class _Read:
    """The first record of a topic that was read for a prompt group."""

    attributes: Mapping[str, Value]
    written_ns: int


@dataclass(slots=True)
class _Group:
    """A prompt group: the context of its records, and its first record by topic."""

    context: Context
    headers: Mapping[str, str]
    read: dict[str, _Read] = field(default_factory=dict)

    def facts(self, prompt_group_id: str, topic: str) -> dict[str, Value]:
        read = self.read.get(topic)
        return {"relax.prompt_group_id": prompt_group_id, **(read.attributes if read else {})}


class RecordedTraces(Traces):
    """See `Traces`."""

    def __init__(
        self, queue: SpanQueue, *, run_id: str, role: str, worker_id: str, ratio: float
    ) -> None:
        self._queue, self._run_id, self._ratio = queue, run_id, ratio
        self._ids = DerivedIds()
        instance = f"{run_id}.{worker_id}"
        service = {
            "service.namespace": "relax-events",
            "service.name": f"relax-{role}",
            "service.instance.id": instance,
        }
        limits = SpanLimits(
            max_span_attributes=SpanLimits.UNSET, max_links=SpanLimits.UNSET
        )  # a step links all its prompt groups
        resource = Resource({**service, "relax.run_id": run_id})
        provider = TracerProvider(
            ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids, span_limits=limits
        )
        provider.add_span_processor(queue)
        self._tracer = provider.get_tracer("relax_events")
        self._common: dict[str, Value] = {
            "messaging.system": "kafka",
            "messaging.client.id": instance,
        }
        self._prefix = f"relax.{run_id}."
        self._groups: dict[str, _Group] = {}

    def add_record(self, record: ReadRecord) -> None:
        """See `Traces`. A context that is not sampled is ignored."""
        if "traceparent" not in record.headers:
            return
        group = self._groups.get(record.key) or self._extract_context(record)
        topic = record.topic.removeprefix(self._prefix)
        if group is not None and topic not in group.read:
            where: dict[str, Value] = {
                "messaging.destination.partition.id": str(record.partition),
                "messaging.kafka.offset": record.offset,
            }
            group.read[topic] = _Read(where, record.timestamp_ms * 1_000_000)

    def _extract_context(self, record: ReadRecord) -> _Group | None:
        context = PROPAGATOR.extract(record.headers, context=Context())
        span = get_current_span(context).get_span_context()
        return (
            self._remember(record.key, context)
            if span.is_valid and span.trace_flags.sampled
            else None
        )

    def _remember(self, prompt_group_id: str, context: Context) -> _Group:
        group = self._groups[prompt_group_id] = _Group(context, _build_headers(context))
        if len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]
        return group

    def get_headers(self, prompt_group_id: str) -> Mapping[str, str]:
        """See `Traces`."""
        group = self._groups.get(prompt_group_id)
        return group.headers if group else NO_HEADERS

    def begin_group(
        self, prompt_group_id: str, *, topic: str, instead_of: str = "", **facts: Value
    ) -> TracedWork:
        """See `Traces`."""
        root = derive_root(self._run_id, prompt_group_id)
        if not is_sampled(root.trace_id, self._ratio):
            return NOT_TRACED
        links = (
            [Link(derive_root(self._run_id, instead_of), {"relax.relation": "instead_of"})]
            if instead_of
            else []
        )
        attributes = {"relax.prompt_group_id": prompt_group_id, **_prefix_attributes(facts)}
        work = self._root(
            "issue", topic, root, SpanKind.PRODUCER, attributes=attributes, links=links
        )
        self._remember(prompt_group_id, work.context)
        return work

    def record_wait(self, prompt_group_id: str, topic: str) -> None:
        """See `Traces`."""
        group = self._groups.get(prompt_group_id)
        if group is not None and topic in group.read:
            began = min(
                group.read[topic].written_ns, time.time_ns()
            )  # another machine's clock may be ahead
            facts = group.facts(prompt_group_id, topic)
            self._work(
                "wait", topic, group.context, SpanKind.INTERNAL, attributes=facts, began_ns=began
            ).end()

    def begin(
        self,
        operation: str,
        prompt_group_id: str,
        *,
        topic: str,
        train_step: int | None = None,
        **facts: Value,
    ) -> TracedWork:
        """See `Traces`."""
        group = self._groups.get(prompt_group_id)
        if group is None:
            return NOT_TRACED
        attributes = {**group.facts(prompt_group_id, topic), **_prefix_attributes(facts)}
        links = []
        if train_step is not None:
            attributes["relax.train_step"] = train_step
            links.append(
                Link(
                    derive_root(self._run_id, _step_name(train_step)), {"relax.relation": "part_of"}
                )
            )
        return self._work(
            operation, topic, group.context, SpanKind.CONSUMER, attributes=attributes, links=links
        )

    @contextmanager
    def trace_groups(
        self, operation: str, prompt_group_ids: Iterable[str], *, topic: str
    ) -> Iterator[None]:
        """See `Traces`."""
        counts: dict[str, int] = {}
        for prompt_group_id in prompt_group_ids:
            counts[prompt_group_id] = counts.get(prompt_group_id, 0) + 1
        works = [
            self.begin(operation, name, topic=topic, num_samples=count)
            for name, count in counts.items()
        ]
        error = "the operation was aborted"
        try:
            yield
            error = ""
        finally:
            for work in works:
                work.end(error=error)

    def record_group_end(self, prompt_group_id: str, *, outcome: str, reason: str) -> None:
        """See `Traces`. Only a failure is an error: expired and filtered groups are normal."""
        group = self._groups.get(prompt_group_id)
        if group is not None:
            facts = group.facts(prompt_group_id, "advantage.samples")
            work = self._work(
                "end",
                "control.prompt-group-outcomes",
                group.context,
                SpanKind.INTERNAL,
                attributes=facts,
            )
            work.end(
                {"outcome": outcome, "reason": reason}, error=reason if outcome == "failed" else ""
            )

    def begin_train_step(
        self, train_step: int, *, began_ns: int, headers: Iterable[Mapping[str, str]]
    ) -> TracedWork:
        """See `Traces`."""
        spans = [
            get_current_span(PROPAGATOR.extract(one, context=Context())).get_span_context()
            for one in headers
            if one
        ]
        root = derive_root(self._run_id, _step_name(train_step))
        attributes: dict[str, Value] = {
            "relax.train_step": train_step,
            "messaging.batch.message_count": len(spans),
        }
        links = [Link(span) for span in spans]
        return self._root(
            "step",
            "advantage.samples",
            root,
            SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            began_ns=began_ns,
        )

    def begin_publication(
        self, step: TracedWork, policy_version: int, *, began_ns: int
    ) -> TracedWork:
        """See `Traces`."""
        if not isinstance(step, SpanTracedWork):
            return NOT_TRACED
        attributes: dict[str, Value] = {"relax.policy_version": policy_version}
        return self._work(
            "publish",
            "control.policy-versions",
            step.context,
            SpanKind.PRODUCER,
            attributes=attributes,
            began_ns=began_ns,
        )

    def close(self) -> None:
        """See `Traces`."""
        self._queue.close()

    def _root(
        self,
        operation: str,
        topic: str,
        root: SpanContext,
        kind: SpanKind,
        *,
        attributes: Mapping[str, Value],
        links: list[Link],
        began_ns: int | None = None,
    ) -> SpanTracedWork:
        self._ids.root = root
        try:
            return self._work(
                operation,
                topic,
                Context(),
                kind,
                attributes=attributes,
                links=links,
                began_ns=began_ns,
            )
        finally:
            self._ids.root = None

    def _work(
        self,
        operation: str,
        topic: str,
        context: Context,
        kind: SpanKind,
        *,
        attributes: Mapping[str, Value],
        links: Iterable[Link] = (),
        began_ns: int | None = None,
    ) -> SpanTracedWork:
        span_attributes = {
            **self._common,
            "messaging.destination.name": self._prefix + topic,
            "messaging.operation.name": operation,
            **attributes,
        }
        if kind in TYPES:
            span_attributes["messaging.operation.type"] = TYPES[kind]
        span = self._tracer.start_span(
            f"{operation} {topic}", context, kind, span_attributes, list(links), began_ns
        )
        return SpanTracedWork(span)


def _build_headers(context: Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    PROPAGATOR.inject(headers, context=context)
    return headers


def _prefix_attributes(facts: Mapping[str, Value]) -> dict[str, Value]:
    return {f"relax.{name}": value for name, value in facts.items()}


def _step_name(train_step: int) -> str:
    return f"step/{train_step}"
