"""The names of a run's topics, without its prefix, and the roles that read and write them; they
stand below the plan (ADR 57).
"""

from __future__ import annotations

QUEUE_TOPICS = {"prompt.groups": "PromptGroupIssued: the rollout workers' queue"}
LOGPROB_TOPICS = {
    "reference": "reference.logprobs",
    "actor": "actor.logprobs",
    "critic": "critic.values",
    "teacher": "teacher.logprobs",
}
"""The topic of SampleEvaluated, by the event's `evaluator`."""
SAMPLE_TOPICS = {
    "rollout.samples": "SamplesRolledOut: generated samples",
    "reward.scores": "SamplesScored: rewards of samples",
    "reference.logprobs": "SamplesEvaluated, by the reference model",
    "actor.logprobs": "SamplesEvaluated, by the actor-forward role",
    "critic.values": "SamplesEvaluated, by the critic",
    "teacher.logprobs": "SamplesEvaluated, by the teacher",
    "advantage.samples": (
        "SamplesReady for the trainer, and PromptGroupEnded where the "
        "advantage role ends a prompt group; it alone writes here"
    ),
    "prompt.end-requests": (
        "PromptGroupEnded: other roles ask the trainer to end a prompt group that failed or expired"
    ),
}
TRAINING_SAMPLES = "advantage.samples"
END_REQUESTS = "prompt.end-requests"
TRAINER_INPUTS = (TRAINING_SAMPLES, END_REQUESTS)
"""The trainer's inputs, whose offsets it commits with its steps."""
ADVANTAGE_ROLE = "advantage"
"""The role that writes training samples. Other roles' end requests have a separate topic, so that
those roles cannot write samples."""
CONTROL_TOPICS = {
    "control.policy-versions": (
        "PolicyVersionPublished: which weights may be used, where their records begin, and what "
        "the log holds before them"
    ),
    "control.train-steps": "TrainStepCommitted: what each step trained on and what came out",
    "control.prompt-group-outcomes": (
        "PromptGroupEnded: how each prompt group ended, decided by the trainer"
    ),
    "control.commands": "RunCommanded: what the controller asks for; RunDescribed: the run file",
    "control.audit": "ChangeRequested: who asked for a change of the run, and the outcome",
    "control.evaluations": "PolicyEvaluated: how good a version is on a dataset",
    "control.schemas": (
        "writer schemas as JSON, by fingerprint; never compacted, so that no writer can take "
        "another one's away"
    ),
}
ROLES = (
    "prompter",
    "rollout",
    "reward",
    "judge",
    "reference",
    "actor-forward",
    "critic",
    "teacher",
    "advantage",
    "trainer",
    "evaluator",
    "controller",
    "metrics",
)
HEARTBEATS = {role: f"control.heartbeats.{role}" for role in ROLES}
METRICS = {role: f"control.metrics.{role}" for role in ROLES}
"""A topic for each role, which only that role may write: no role can impersonate another role's
workers."""
PER_ROLE_TOPICS = frozenset({*HEARTBEATS.values(), *METRICS.values()})
METRICS_TOPICS = {
    entity: f"MetricsReported: metrics of the workers of {role}, kept for a while"
    for role, entity in METRICS.items()
}
BROADCAST = "control.broadcast-membership"
COMPACTED_TOPICS = {
    **{
        entity: f"WorkerHeartbeat, newest by worker of {role}"
        for role, entity in HEARTBEATS.items()
    },
    BROADCAST: (
        "BroadcastMembership: the newest list of engines that the trainer sends new weights to"
    ),
}
SUMMARY_TOPICS = {"control.prompter-state": "PrompterStateSaved: the prompter's state, the newest"}
PER_SAMPLE_ROLES = ("reward", "judge", "reference", "actor-forward", "critic", "teacher")
"""Roles that process each sample separately and write one event for it."""
BROADCAST_ROLES = ("rollout", "actor-forward", "trainer")
"""Roles that send or receive weights directly: they alone may read the token with which an engine
joins."""
CONSUMER_GROUP_ROLES = (*PER_SAMPLE_ROLES, "advantage")
"""Roles whose workers divide their topics' partitions as a consumer group."""
DEAD_LETTER_ROLES = ("rollout", *CONSUMER_GROUP_ROLES, "trainer")
DEAD_LETTERS = ".dead-letters"
"""Ends the name of a role's topic of dead letters."""
DEPENDENT_RUN = "follower"
NO_RECORDS_NEEDED = 2**62
"""The committed offset of a dependent run that has reached its goal: no record has a higher one."""
