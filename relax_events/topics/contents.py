"""Which events a topic holds. Who may write a topic is the broker's to say; so an event counts only
where those write who may say it.
"""

from __future__ import annotations

from relax_events.events.types import (
    EnginesEnlisted,
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    PromptsSummed,
    RunCommanded,
    RunDescribed,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
    WorkerBeat,
)
from relax_events.topics.plan import (
    END_REQUESTS,
    EVALUATOR_TOPICS,
    HEARTBEATS,
    METRICS,
    TRAINED_FROM,
)

EVENTS_ON: dict[str, tuple[type[Event], ...]] = {
    "prompt.groups": (PromptGroupIssued,),
    "rollout.samples": (SampleRolledOut,),
    "reward.scores": (SampleScored,),
    **dict.fromkeys(EVALUATOR_TOPICS.values(), (SampleEvaluated,)),
    TRAINED_FROM: (SampleReady, PromptGroupEnded),
    END_REQUESTS: (PromptGroupEnded,),
    "control.policy-versions": (PolicyVersionPublished,),
    "control.train-steps": (TrainStepCommitted,),
    "control.group-outcomes": (PromptGroupEnded,),
    "control.commands": (RunCommanded, RunDescribed),
    "control.evaluations": (PolicyEvaluated,),
    "control.engines": (EnginesEnlisted,),
    "control.summaries": (PromptsSummed,),
    **dict.fromkeys(HEARTBEATS.values(), (WorkerBeat,)),
    **dict.fromkeys(METRICS.values(), (MetricsReported,)),
}


def belongs_on(entity: str, event: Event) -> bool:
    """Tell whether an event may stand on a topic, given without its run: others there are not what
    their writer may say.

    Heartbeats and metrics of a worker stand on the topic of its role.
    """
    if isinstance(event, SampleEvaluated):
        return EVALUATOR_TOPICS.get(event.evaluator) == entity
    if isinstance(event, WorkerBeat | MetricsReported):
        topics = HEARTBEATS if isinstance(event, WorkerBeat) else METRICS
        return topics.get(event.role) == entity and event.worker_id.rpartition("-")[0] == event.role
    if entity.startswith("reward.scores."):  # what another reward function gave to old samples
        entity = "reward.scores"
    return isinstance(event, EVENTS_ON.get(entity, ()))
