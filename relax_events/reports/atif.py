"""Samples as trajectories of the Agent Trajectory Interchange Format, version 1.7.

A trajectory is the path of the sample's last turn. A turn of the policy is a step of the agent with
its tokens; the results of its tools are its observation. The format has no place for branches: the
paths that a program left are counted in `extra`. Audio and video, which version 1.7 does not have,
are named in the text.

Source: the specification of the Harbor project, "Agent Trajectory Interchange Format".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.data.conversations import ASSISTANT, PLACEHOLDERS
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef
from relax_events.events.types import SampleRolledOut
from relax_events.gateway.tool_formats import ToolFormat
from relax_events.history.samples.view import SampleView
from relax_events.reports.episode_steps import (
    TOOL,
    EpisodeStep,
    arguments_of,
    read_steps,
    read_tool_format,
)

SCHEMA_VERSION = "ATIF-v1.7"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
SOURCES = {"system": "system", "user": "user", ASSISTANT: "agent", TOOL: "user"}
"""Who said a message; a result of a tool without a call before it comes from the user's side."""
Saver = Callable[[MediaRef], str]


@dataclass(frozen=True, slots=True)
class TrajectoryBuilder:
    """Builds the trajectories of a run.

    Attributes:
        run_id: Of the run.
        agent: What drives the policy.
        model: The name of the policy.
        style: The format of its tool calls.
        tokens: Whether turns have their tokens and log-probabilities.
    """

    run_id: str
    agent: str
    model: str
    style: ToolFormat
    tokens: bool

    @classmethod
    def from_config(cls, config: RunConfig, *, tokens: bool) -> TrajectoryBuilder:
        """Build for a run."""
        environment = config.environment
        agent = environment.function or " ".join(environment.command) or "relax-events"
        return cls(config.run.id, agent, config.model.path.name, read_tool_format(config), tokens)

    def build(self, view: SampleView, whole: SampleRolledOut, save: Saver) -> dict[str, Any]:
        """Return a sample as a trajectory.

        Args:
            view: The sample with its score and outcome.
            whole: The sample with its arrays.
            save: Saves media and returns the path.
        """
        steps = read_steps(whole, self.style)
        key = whole.key
        built = [self._step(number, step, save) for number, step in enumerate(steps, start=1)]
        built[-1]["timestamp"] = datetime.fromtimestamp(
            whole.rolled_out_at / 1e6, tz=UTC
        ).isoformat()
        turns = [step.turn for step in steps if step.turn is not None]
        return {
            "schema_version": SCHEMA_VERSION,
            "session_id": f"{self.run_id}/{whole.sample_id}",
            "trajectory_id": f"{self.run_id}/{whole.sample_id}@{key.policy_version}",
            "agent": {"name": self.agent, "version": __version__, "model_name": self.model},
            "steps": built,
            "final_metrics": {
                "total_prompt_tokens": sum(turn.num_read for turn in turns),
                "total_completion_tokens": sum(len(turn.tokens) for turn in turns),
                "total_steps": len(built),
            },
            "extra": {
                "reward": view.reward,
                "reward_components": view.score.components if view.score else {},
                "outcome": view.outcome,
                "finish_reason": whole.finish_reason.value,
                "min_policy_version": key.min_policy_version,
                "max_policy_version": key.max_policy_version,
                "num_paths": len(whole.path_lengths) or 1,
                "answer": whole.answer,
                "metadata": whole.metadata,
            },
        }

    def _step(self, number: int, step: EpisodeStep, save: Saver) -> dict[str, Any]:
        message = step.message
        found: dict[str, Any] = {"step_id": number, "source": SOURCES.get(message.role, "user")}
        if step.reply is None:
            return found | {"message": _content(message, save)}
        reply = step.reply
        found |= {"message": reply.content, "model_name": self.model}
        if reply.reasoning:
            found["reasoning_content"] = reply.reasoning
        names = [f"call_{number}_{index}" for index in range(len(reply.calls))]
        if reply.calls:
            found["tool_calls"] = [
                {"tool_call_id": name, "function_name": function, "arguments": arguments_of(text)}
                for name, (function, text) in zip(names, reply.calls, strict=True)
            ]
        if step.results:
            found["observation"] = {"results": list(_results(step.results, names, save))}
        if step.turn is not None:
            found |= {"llm_call_count": 1, "metrics": self._metrics(step)}
        return found

    def _metrics(self, step: EpisodeStep) -> dict[str, Any]:
        turn = step.turn
        assert turn is not None
        counts: dict[str, Any] = {
            "prompt_tokens": turn.num_read,
            "completion_tokens": len(turn.tokens),
        }
        if self.tokens:
            counts["completion_token_ids"] = turn.tokens.tolist()
            counts["logprobs"] = [float(one) for one in turn.logprobs]
        return counts


def _results(
    results: Sequence[ChatMessage], names: Sequence[str], save: Saver
) -> Iterator[dict[str, Any]]:
    """Yield the results of tools, in the order of their calls."""
    for index, message in enumerate(results):
        found: dict[str, Any] = {"content": _content(message, save)}
        if index < len(names):
            found["source_call_id"] = names[index]
        yield found


def _content(message: ChatMessage, save: Saver) -> str | list[dict[str, Any]]:
    if all(part.media is None for part in message.parts):
        return message.text
    return [_part(part, save) for part in message.parts]


def _part(part: ContentPart, save: Saver) -> dict[str, Any]:
    if part.media is None:
        return {"type": "text", "text": part.text or ""}
    path = save(part.media)
    if part.media.media_type not in IMAGE_TYPES:
        return {"type": "text", "text": f"{PLACEHOLDERS[part.kind]} {path}"}
    return {"type": "image", "source": {"media_type": part.media.media_type, "path": path}}
