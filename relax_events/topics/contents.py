"""The event types of each topic.

The broker's ACLs decide who may write a topic. So an event is accepted only on the topic whose
writers may produce it.
"""

from __future__ import annotations

from relax_events.events.types import (
    BroadcastMembership,
    Event,
    LogprobsComputed,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    PrompterStateSaved,
    PromptGroupEnded,
    PromptGroupIssued,
    RunCommanded,
    RunDescribed,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
    WorkerHeartbeat,
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
    **dict.fromkeys(LOGPROB_TOPICS.values(), (LogprobsComputed,)),
    TRAINING_SAMPLES: (SampleReady, PromptGroupEnded),
    END_REQUESTS: (PromptGroupEnded,),
    "control.policy-versions": (PolicyVersionPublished,),
    "control.train-steps": (TrainStepCommitted,),
    "control.prompt-group-outcomes": (PromptGroupEnded,),
    "control.commands": (RunCommanded, RunDescribed),
    "control.evaluations": (PolicyEvaluated,),
    "control.broadcast-membership": (BroadcastMembership,),
    "control.prompter-state": (PrompterStateSaved,),
    **dict.fromkeys(HEARTBEATS.values(), (WorkerHeartbeat,)),
    **dict.fromkeys(METRICS.values(), (MetricsReported,)),
}


def belongs_on(entity: str, event: Event) -> bool:
    """Return whether an event belongs on a topic, given without the run's prefix.

    A worker's heartbeats and metrics belong on the topic of its role.
    """
    if isinstance(event, LogprobsComputed):
        return LOGPROB_TOPICS.get(event.model_role) == entity
    if isinstance(event, WorkerHeartbeat | MetricsReported):
        topics = HEARTBEATS if isinstance(event, WorkerHeartbeat) else METRICS
        return topics.get(event.role) == entity and event.worker_id.rpartition("-")[0] == event.role
    if entity.startswith("reward.scores."):  # the scores of another reward function for old samples
        entity = "reward.scores"
    return isinstance(event, EVENTS_ON.get(entity, ()))
