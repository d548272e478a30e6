"""Sends samples as OpenTelemetry traces with the conventions for generative AI: an agent's run, its
calls of the model, and the tools that it executed.

    prompt group's trace (ADR 18) --> invoke_agent --> chat, execute_tool, chat, ...

The ids follow from the names, so that a repeated export sends the same spans. The log knows when a
sample was rolled out, not when each turn was: spans have that time, a microsecond apart, in the
order of the conversation.

Source: OpenTelemetry semantic conventions for generative AI, spans of agents and of inference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, set_span_in_context

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.errors import EnvironmentProblem, ObjectError
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.events.types import SampleRolledOut
from relax_events.history.run_log import RunLog
from relax_events.history.samples.view import SampleView
from relax_events.objects import ObjectStore, check_out
from relax_events.reports.episode_steps import EpisodeStep, read_steps, read_tool_format
from relax_events.telemetry.traces.recorded import derive_root

PROVIDER = "relax-events"
REQUEST_SECONDS = 10.0
BATCH_SPANS = 512
NANOSECONDS = 1000
"""Of a microsecond."""
Facts = dict[str, Any]


class DerivedIds(IdGenerator):
    """Derives the ids of a sample's spans from its name and their order."""

    def __init__(self) -> None:
        self._name, self._number = "", 0

    def begin(self, name: str) -> None:
        """Begin with a sample."""
        self._name, self._number = name, 0

    def generate_span_id(self) -> int:
        """Return the id of the next span."""
        self._number += 1
        name = f"{self._name}#{self._number}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) or 1

    def generate_trace_id(self) -> int:
        """Return the id of a trace without a parent, which no sample begins."""
        name = self._name.encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest()) or 1


class EpisodeTracer(AbstractContextManager["EpisodeTracer"]):
    """Sends the samples of a run to a collector."""

    def __init__(self, log: RunLog, endpoint: str, *, content: bool = False) -> None:
        """Connect with the first batch.

        Args:
            log: The run's log, which also counts unreadable records.
            endpoint: The collector's address for traces, OTLP over HTTP.
            content: Add what was said, and what tools were given and returned.
        """
        config = log.config
        self._log, self._endpoint, self._content = log, endpoint, content
        self._store = ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases)
        self._style = read_tool_format(config)
        self._model, self._agent = config.model.path.name, _agent_name(config)
        self._exporter = OTLPSpanExporter(endpoint, timeout=REQUEST_SECONDS)
        self._ids, self._spans = DerivedIds(), _Ended()
        facts = {
            "service.name": "relax-events",
            "service.version": __version__,
            "relax.run_id": config.run.id,
        }
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource(facts), id_generator=self._ids
        )
        provider.add_span_processor(self._spans)
        self._tracer = provider.get_tracer("relax_events.reports")
        self.num_samples = self.num_spans = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._send()
        self._exporter.shutdown()

    def add(self, view: SampleView) -> None:
        """Send a sample; one whose stored arrays can't be read is skipped, counted and named.

        Raises:
            EnvironmentProblem: The collector does not take the spans.
        """
        try:
            whole = check_out(view.sample, self._store)
        except ObjectError as error:
            self._log.unreadable.add(view.position, error)
            return
        self._trace(view, whole)
        self.num_samples += 1
        if len(self._spans.ended) >= BATCH_SPANS:
            self._send()

    def _trace(self, view: SampleView, whole: SampleRolledOut) -> None:
        run_id, steps = self._log.config.run.id, read_steps(whole, self._style)
        self._ids.begin(f"{run_id}/{whole.sample_id}@{whole.policy_version}")
        group = NonRecordingSpan(derive_root(run_id, whole.prompt_group_id))
        num_spans = 1 + sum(1 + len(step.reply.calls) for step in steps if step.reply is not None)
        began = whole.rolled_out_at - num_spans
        root = self._tracer.start_span(
            f"invoke_agent {self._agent}",
            context=set_span_in_context(group),
            kind=SpanKind.INTERNAL,
            attributes=self._agent_facts(view, whole, steps),
            start_time=began * NANOSECONDS,
        )
        inside, began = set_span_in_context(root), began + 1
        for number, step in enumerate(steps):
            if step.reply is not None:
                began = self._trace_turn(whole, steps, number, inside, began)
        root.end(whole.rolled_out_at * NANOSECONDS)

    def _trace_turn(
        self,
        whole: SampleRolledOut,
        steps: Sequence[EpisodeStep],
        number: int,
        inside: Context,
        began: int,
    ) -> int:
        """Record a call of the model and the tools that it called; return the time after them."""
        step = steps[number]
        assert step.reply is not None
        is_last = step.turn is not None and number == len(steps) - 1
        facts = self._chat_facts(step, _finish(step, whole.finish_reason if is_last else None))
        if self._content:
            facts["gen_ai.input.messages"] = json.dumps(
                [one for before in steps[:number] for one in _messages(before)]
            )
            facts["gen_ai.output.messages"] = json.dumps(_messages(step)[:1])
        began = self._record(f"chat {self._model}", SpanKind.CLIENT, facts, inside, began)
        for index, (name, arguments) in enumerate(step.reply.calls):
            facts = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.type": "function",
                "gen_ai.tool.call.id": f"call_{number}_{index}",
            }
            if self._content:
                facts["gen_ai.tool.call.arguments"] = arguments
                if index < len(step.results):
                    facts["gen_ai.tool.call.result"] = step.results[index].text
            began = self._record(f"execute_tool {name}", SpanKind.INTERNAL, facts, inside, began)
        return began

    def _record(self, name: str, kind: SpanKind, facts: Facts, inside: Context, began: int) -> int:
        span: Span = self._tracer.start_span(
            name, context=inside, kind=kind, attributes=facts, start_time=began * NANOSECONDS
        )
        span.end((began + 1) * NANOSECONDS)
        return began + 1

    def _agent_facts(
        self, view: SampleView, whole: SampleRolledOut, steps: Sequence[EpisodeStep]
    ) -> Facts:
        turns = [step.turn for step in steps if step.turn is not None]
        facts: Facts = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": self._agent,
            "gen_ai.conversation.id": whole.sample_id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": sum(turn.num_read for turn in turns),
            "gen_ai.usage.output_tokens": sum(len(turn.tokens) for turn in turns),
            "relax.sample_id": whole.sample_id,
            "relax.policy_version": whole.policy_version,
            "relax.outcome": view.outcome,
            "relax.num_paths": len(whole.path_lengths) or 1,
        }
        return facts if view.reward is None else facts | {"relax.reward": view.reward}

    def _chat_facts(self, step: EpisodeStep, reason: str) -> Facts:
        facts: Facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason],
        }
        if step.turn is not None:
            facts["gen_ai.usage.input_tokens"] = step.turn.num_read
            facts["gen_ai.usage.output_tokens"] = len(step.turn.tokens)
        return facts

    def _send(self) -> None:
        spans, self._spans.ended = self._spans.ended, []
        if not spans:
            return
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise EnvironmentProblem(
                f"the collector at {self._endpoint} did not take {len(spans)} spans; check its "
                "address, which usually ends in /v1/traces, and its log"
            )
        self.num_spans += len(spans)


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.ended.append(span)


def _agent_name(config: RunConfig) -> str:
    environment = config.environment
    return environment.function or " ".join(environment.command) or "policy"


def _finish(step: EpisodeStep, reason: FinishReason | None) -> str:
    """Return why a turn ended, in the conventions' words."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_call" if step.reply is not None and step.reply.calls else "stop"


def _messages(step: EpisodeStep) -> list[Mapping[str, Any]]:
    """Return a step in the form of the conventions: a message, and one for each tool's result."""
    results = [
        {"role": "tool", "parts": [{"type": "tool_call_response", "response": result.text}]}
        for result in step.results
    ]
    return [{"role": step.message.role, "parts": _parts(step)}, *results]


def _parts(step: EpisodeStep) -> list[Mapping[str, Any]]:
    if step.reply is None:
        return _texts(step.message)
    found: list[Mapping[str, Any]] = []
    if step.reply.reasoning:
        found.append({"type": "reasoning", "content": step.reply.reasoning})
    if step.reply.content:
        found.append({"type": "text", "content": step.reply.content})
    found += [
        {"type": "tool_call", "name": name, "arguments": json.loads(arguments)}
        for name, arguments in step.reply.calls
    ]
    return found


def _texts(message: ChatMessage) -> list[Mapping[str, Any]]:
    return [
        {"type": "text", "content": part.text or ""}
        if part.media is None
        else {"type": "uri", "modality": part.kind.value, "uri": part.media.uri}
        for part in message.parts
    ]
