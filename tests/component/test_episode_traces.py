"""Samples as spans, received by a collector."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from otlp_receiver import collecting

from relax_events.config import RunConfig
from relax_events.errors import EnvironmentProblem
from relax_events.events.parts import ChatMessage
from relax_events.events.types import SampleRolledOut
from relax_events.history.samples.view import SampleView
from relax_events.reports.episode_traces import EpisodeTracer
from relax_events.telemetry.traces.recorded import derive_root
from tests.event_samples import changed, rolled_out, scored

CALL = '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'


def sample() -> SampleRolledOut:
    """Return a sample of two turns with a tool between them."""
    return changed(
        rolled_out("000000-0000-0"),
        tokens=np.arange(7, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(7, np.float32),
        num_prompt_tokens=2,
        messages=[ChatMessage.of_text("user", "a?")],
        turns=[
            ChatMessage.of_text(*one)
            for one in (("assistant", CALL), ("tool", "42"), ("assistant", "It is 42."))
        ],
    )


def send(config: RunConfig, endpoint: str, *, content: bool) -> EpisodeTracer:
    """Send the sample."""
    log: Any = SimpleNamespace(config=config, unreadable=None)
    with EpisodeTracer(log, endpoint, content=content) as tracer:
        tracer.add(SampleView(sample(), "topic[0]@1", 0, scored("000000-0000-0"), None))
    return tracer


def test_a_sample_is_a_trace_of_agent_model_and_tools(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = make_run_config(run={"id": "test"})
    with collecting() as collector:
        tracer = send(config, collector.endpoint, content=True)
        first = list(collector.spans)
        send(config, collector.endpoint, content=False)
    assert (tracer.num_samples, tracer.num_spans) == (1, 4)
    model = config.model.path.name
    in_order = sorted(first, key=lambda span: span.began_ns)
    assert [(span.name, span.kind) for span in in_order] == [
        ("invoke_agent policy", "INTERNAL"),
        (f"chat {model}", "CLIENT"),
        ("execute_tool look", "INTERNAL"),
        (f"chat {model}", "CLIENT"),
    ]
    root, chat, tool, last = in_order
    group = derive_root("test", "000000-0000-0")
    assert root.parent == group.span_id.to_bytes(8)
    assert {span.parent for span in (chat, tool, last)} == {root.key[1]}
    assert {span.key[0] for span in first} == {group.trace_id.to_bytes(16)}
    assert root.facts["gen_ai.operation.name"] == "invoke_agent"
    assert root.facts["gen_ai.usage.input_tokens"] == 8
    assert root.facts["gen_ai.usage.output_tokens"] == 3
    assert root.facts["relax.reward"] == 1.0
    assert chat.facts["gen_ai.response.finish_reasons"] == ["tool_call"]
    assert chat.facts["gen_ai.usage.output_tokens"] == 2
    assert tool.facts["gen_ai.tool.name"] == "look"
    assert tool.facts["gen_ai.tool.call.result"] == "42"
    assert json.loads(last.facts["gen_ai.output.messages"])[0]["parts"] == [
        {"type": "text", "content": "It is 42."}
    ]
    asked = json.loads(last.facts["gen_ai.input.messages"])
    assert [one["role"] for one in asked] == ["user", "assistant", "tool"]
    again = collector.spans[4:]
    assert {span.key for span in again} == {span.key for span in first}
    assert not any("messages" in fact or "call.result" in fact for s in again for fact in s.facts)


def test_a_collector_that_is_not_there_is_named(
    make_run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_events.reports.episode_traces.REQUEST_SECONDS", 0.5)
    with pytest.raises(EnvironmentProblem, match=r"collector at http://127\.0\.0\.1:9/v1/traces"):
        send(make_run_config(run={"id": "test"}), "http://127.0.0.1:9/v1/traces", content=False)
