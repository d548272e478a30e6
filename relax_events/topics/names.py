"""The names of a run's topics, without its prefix, and the roles that read and write them; they
stand below the plan (ADR 57).
"""

from __future__ import annotations

PROMPT_GROUPS = "prompt.groups"
ROLLOUT_SAMPLES = "rollout.samples"
REWARD_SCORES = "reward.scores"
TRAINING_SAMPLES = "advantage.samples"
END_REQUESTS = "prompt.end-requests"
POLICY_VERSIONS = "control.policy-versions"
TRAIN_STEPS = "control.train-steps"
GROUP_OUTCOMES = "control.prompt-group-outcomes"
COMMANDS = "control.commands"
AUDIT = "control.audit"
EVALUATIONS = "control.evaluations"
SCHEMAS = "control.schemas"
PROMPTER_STATE = "control.prompter-state"
REFERENCE_LOGPROBS = "reference.logprobs"
ACTOR_LOGPROBS = "actor.logprobs"
CRITIC_VALUES = "critic.values"
TEACHER_LOGPROBS = "teacher.logprobs"
QUEUE_TOPICS = {PROMPT_GROUPS: "PromptGroupIssued: the rollout workers' queue"}
LOGPROB_TOPICS = {
    "reference": REFERENCE_LOGPROBS,
    "actor": ACTOR_LOGPROBS,
    "critic": CRITIC_VALUES,
    "teacher": TEACHER_LOGPROBS,
}
"""The topic of SampleEvaluated, by its `model_role`."""
EVALUATION_FIELDS = {
    "reference": "ref_logprobs",
    "actor": "actor_logprobs",
    "critic": "values",
    "teacher": "teacher_logprobs",
}
"""The field of SampleReady that holds the values of SampleEvaluated, by its `model_role`."""
TOPIC_BY_ROLE = {
    "actor-forward" if name == "actor" else name: topic for name, topic in LOGPROB_TOPICS.items()
}
"""The topic of SampleEvaluated, by the role that writes it."""
SAMPLE_TOPICS = {
    ROLLOUT_SAMPLES: "SamplesRolledOut: generated samples",
    REWARD_SCORES: "SamplesScored: rewards of samples",
    REFERENCE_LOGPROBS: "SamplesEvaluated, by the reference model",
    ACTOR_LOGPROBS: "SamplesEvaluated, by the actor-forward role",
    CRITIC_VALUES: "SamplesEvaluated, by the critic",
    TEACHER_LOGPROBS: "SamplesEvaluated, by the teacher",
    TRAINING_SAMPLES: (
        "SamplesReady for the trainer, and PromptGroupEnded where the "
        "advantage role ends a prompt group; it alone writes here"
    ),
    END_REQUESTS: (
        "PromptGroupEnded: other roles ask the trainer to end a prompt group that failed or expired"
    ),
}
TRAINER_INPUTS = (TRAINING_SAMPLES, END_REQUESTS)
"""The trainer's inputs, whose offsets it commits with its steps."""
ADVANTAGE_ROLE = "advantage"
"""The role that writes training samples. Other roles' end requests have a separate topic, so that
those roles cannot write samples."""
CONTROL_TOPICS = {
    POLICY_VERSIONS: (
        "PolicyVersionPublished: which weights may be used, where their records begin, and what "
        "the log holds before them"
    ),
    TRAIN_STEPS: "TrainStepCommitted: what each step trained on and what came out",
    GROUP_OUTCOMES: ("PromptGroupEnded: how each prompt group ended, decided by the trainer"),
    COMMANDS: "RunCommanded: what the controller asks for; RunDescribed: the run file",
    AUDIT: "ChangeRequested: who asked for a change of the run, and the outcome",
    EVALUATIONS: "PolicyEvaluated: how good a version is on a dataset",
    SCHEMAS: (
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
SUMMARY_TOPICS = {PROMPTER_STATE: "PrompterStateSaved: the prompter's state, the newest"}
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
