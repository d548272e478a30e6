"""The event types of each topic.

The broker's ACLs decide who may write a topic. So an event is accepted only on the topic whose
writers may produce it.
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
    HEARTBEATS,
    LOGPROB_TOPICS,
    METRICS,
    TRAINING_SAMPLES,
)

EVENTS_ON: dict[str, tuple[type[Event], ...]] = {
    "prompt.groups": (PromptGroupIssued,),
    "rollout.samples": (SampleRolledOut,),
    "reward.scores": (SampleScored,),
    **dict.fromkeys(LOGPROB_TOPICS.values(), (SampleEvaluated,)),
    TRAINING_SAMPLES: (SampleReady, PromptGroupEnded),
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
    """Return whether an event belongs on a topic, given without the run's prefix.

    A worker's heartbeats and metrics belong on the topic of its role.
    """
    if isinstance(event, SampleEvaluated):
        return LOGPROB_TOPICS.get(event.evaluator) == entity
    if isinstance(event, WorkerBeat | MetricsReported):
        topics = HEARTBEATS if isinstance(event, WorkerBeat) else METRICS
        return topics.get(event.role) == entity and event.worker_id.rpartition("-")[0] == event.role
    if entity.startswith("reward.scores."):  # the scores of another reward function for old samples
        entity = "reward.scores"
    return isinstance(event, EVENTS_ON.get(entity, ()))
