"""What of a run file may change between two sessions of a run: one rule for each key, and what a
change of it does to a run that is under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relax_events.config.run_config import RunConfig


class Rule(StrEnum):
    """Rule for a changed key when a run resumes."""

    FREE = "free"
    """The change is taken, and shown."""
    ACCEPTED = "if accepted"
    """Changes the training from here on: the user must accept it."""
    NEVER = "never"
    """The run can't resume with it; a fork can."""


FREE, ACCEPTED, NEVER = Rule.FREE, Rule.ACCEPTED, Rule.NEVER
_SPEED = "speed and resources alone"
_PROMPTS = "prompts that are issued from here on are others"
_UNDER_WAY = "prompt groups that are under way were made with the old value"
RULES: Mapping[str, tuple[Rule, str]] = {
    "run": (NEVER, "it names the run"),
    "run.seed": (NEVER, "it orders the rows, and every id and random number follows from it"),
    "run.num_steps": (
        FREE,
        (
            "a later goal; a lower one asks, since prompt groups of later steps may stay open, "
            "and schedules reckon with it"
        ),
    ),
    "run.prompts_per_step": (NEVER, f"{_UNDER_WAY}, and some of them would never end"),
    "run.samples_per_prompt": (NEVER, f"{_UNDER_WAY}, and would never be complete"),
    "run.mode": (ACCEPTED, "samples are generated at other times of the training"),
    "run.max_staleness": (NEVER, "the partitions follow from it"),
    "run.weight_update_mode": (ACCEPTED, "samples under way meet a new version in another way"),
    "run.sample_order": (
        NEVER,
        "prompt groups that were trained out of their order would be awaited again",
    ),
    "run.max_failed_prompt_groups": (FREE, "when to give up"),
    "run.retain_versions": (FREE, "what is kept from here on"),
    "run.follower_versions": (FREE, "what is kept from here on"),
    "run.directory": (FREE, "a folder that was moved is the same folder"),
    "model": (ACCEPTED, "the model computes in another way from here on"),
    "model.path": (
        ACCEPTED,
        (
            "weights are those of the run; tokenizer and architecture are read there, and must "
            "be the same"
        ),
    ),
    "model.device": (FREE, _SPEED),
    "devices": (FREE, _SPEED),
    "devices.time_share": (FREE, "memory against time"),
    "model.media": (ACCEPTED, "media are shown to the model in another way"),
    "model.routing_replay": (
        NEVER,
        "samples under way carry the experts of their tokens, or don't",
    ),
    "model.frozen": (NEVER, "the optimizer's state is that of other parameters"),
    "model.lora": (NEVER, "the optimizer's state is that of other parameters"),
    "model.tiny": (NEVER, "the model has been made"),
    "data": (NEVER, "rows are numbered by the source: a row would stand for another prompt"),
    "data.max_invalid_rows": (FREE, "when to refuse a file"),
    "data.max_unpacked_bytes": (FREE, "when to refuse a file"),
    "data.max_unpacked_ratio": (FREE, "when to refuse a file"),
    "data.media_hosts": (FREE, "from where media may come"),
    "data.media_root": (FREE, "a folder that was moved is the same folder"),
    "data.system_prompt": (ACCEPTED, _PROMPTS),
    "data.chat_template": (ACCEPTED, _PROMPTS),
    "data.chat_template_file": (ACCEPTED, _PROMPTS),
    "data.chat_template_options": (ACCEPTED, _PROMPTS),
    "data.min_prompt_tokens": (ACCEPTED, _PROMPTS),
    "data.max_prompt_tokens": (ACCEPTED, _PROMPTS),
    "data.max_sample_tokens": (ACCEPTED, _PROMPTS),
    "data.pass_rate_range": (ACCEPTED, _PROMPTS),
    "data.prompt_filter": (ACCEPTED, _PROMPTS),
    "data.filter_window_rows": (ACCEPTED, _PROMPTS),
    "broker": (FREE, "how the broker is reached"),
    "broker.partitions_per_version": (NEVER, "the partitions follow from it"),
    "broker.queue_partitions": (NEVER, "the queue of prompts has that many partitions"),
    "broker.prompt_queue": (
        NEVER,
        "prompt groups that are leased in one way are not known in the other",
    ),
    "objects": (FREE, "what is stored from here on"),
    "objects.uri": (
        ACCEPTED,
        (
            "weights, checkpoints and media must be copied to the new store; name the old one in "
            "objects.uri_aliases"
        ),
    ),
    "engine": (ACCEPTED, "samples are generated in another way from here on"),
    "engine.max_prompt_groups": (FREE, _SPEED),
    "engine.max_running_samples": (FREE, _SPEED),
    "engine.threads": (FREE, _SPEED),
    "engine.sglang": (FREE, "how the servers are run"),
    "environment": (ACCEPTED, "the environment answers in another way from here on"),
    "environment.processes": (FREE, _SPEED),
    "environment.timeout_seconds": (FREE, "when an answer counts as failed"),
    "environment.setup_seconds": (FREE, "when an episode counts as failed"),
    "environment.finish_seconds": (FREE, "how long the end of an episode is waited for"),
    "environment.memory_bytes": (FREE, "when an answer counts as failed"),
    "environment.harness.host": (FREE, "where harnesses take their sessions"),
    "environment.harness.token_file": (FREE, "who may take sessions"),
    "environment.concurrency": (FREE, _SPEED),
    "environment.start_seconds": (FREE, "when an episode counts as failed"),
    "environment.episode_seconds": (FREE, "when an episode counts as failed"),
    "environment.attempts": (FREE, "how often a failed episode is begun again"),
    "reward": (ACCEPTED, "samples are scored in another way from here on"),
    "reward.timeout_seconds": (FREE, "when a score counts as failed"),
    "reward.processes": (FREE, _SPEED),
    "reward.concurrency": (FREE, _SPEED),
    "reward.memory_bytes": (FREE, "when a score counts as failed"),
    "judge": (ACCEPTED, "samples are scored in another way from here on"),
    "judge.device": (FREE, _SPEED),
    "judge.engine.max_prompt_groups": (FREE, _SPEED),
    "judge.engine.max_running_samples": (FREE, _SPEED),
    "judge.engine.threads": (FREE, _SPEED),
    "judge.engine.sglang": (FREE, "how the servers are run"),
    "evaluation": (FREE, "affects evaluation, not training"),
    "algorithm": (ACCEPTED, "the loss is another one from here on"),
    "algorithm.name": (NEVER, "samples under way were made ready for another algorithm"),
    "algorithm.reference_every": (NEVER, "the versions that it names may be deleted"),
    "algorithm.old_logprobs": (
        NEVER,
        f"{_UNDER_WAY}, and lack the log-probabilities or bring idle ones",
    ),
    "critic": (ACCEPTED, "the critic learns in another way from here on"),
    "critic.model_path": (NEVER, "the critic has been made from it"),
    "critic.ranks": (FREE, "results agree within rounding"),
    "critic.threads": (FREE, _SPEED),
    "teacher": (ACCEPTED, "the policy learns from another teacher from here on"),
    "teacher.device": (FREE, _SPEED),
    "teacher.threads": (FREE, _SPEED),
    "teacher.urls": (FREE, "where the teacher runs"),
    "teacher.request_seconds": (FREE, "when a server counts as lost"),
    "teacher.max_request_tokens": (FREE, _SPEED),
    "teachers": (ACCEPTED, "the policy learns from other teachers from here on"),
    "trainer": (ACCEPTED, "the optimizer takes other steps from here on"),
    "trainer.backend": (NEVER, "the checkpoint is that of another backend"),
    "trainer.optimizer": (NEVER, "the checkpoint has the state of another optimizer"),
    "trainer.max_tokens_per_micro_batch": (FREE, "results agree within rounding"),
    "trainer.share_prompts": (FREE, "results agree within rounding"),
    "trainer.ranks": (FREE, "results agree within rounding"),
    "trainer.balance_ranks": (FREE, "results agree within rounding"),
    "trainer.sharding": (FREE, "results agree within rounding; checkpoints fit both"),
    "trainer.offload_optimizer": (FREE, "results agree within rounding"),
    "trainer.activation_checkpointing": (FREE, "memory against computation"),
    "trainer.tensor_parallel": (FREE, "results agree within rounding"),
    "trainer.pipeline_parallel": (FREE, "results agree within rounding"),
    "trainer.pipeline_chunks": (FREE, "results agree within rounding"),
    "trainer.context_parallel": (FREE, "results agree within rounding"),
    "trainer.expert_parallel": (FREE, "results agree within rounding"),
    "trainer.expert_tensor_parallel": (FREE, "results agree within rounding"),
    "trainer.checkpoint_every": (FREE, "how much is trained again after a crash"),
    "trainer.checkpoint_seconds": (FREE, "how much is trained again after a crash"),
    "trainer.keep_checkpoints": (FREE, "what is kept"),
    "trainer.threads": (FREE, "results agree within rounding"),
    "trainer.max_abs_advantage": (FREE, "when a sample counts as failed"),
    "trainer.max_steps_not_finite": (FREE, "when to give up"),
    "trainer.collective_timeout_seconds": (FREE, "when a rank counts as lost"),
    "sft_warmup": (NEVER, "the model has been made"),
    "weights": (FREE, "how versions travel"),
    "parent": (NEVER, "it is where the run began"),
    "parent.objects_uri": (FREE, "a store that was moved is the same store"),
    "parent.until_version": (FREE, "another goal of a replay"),
    "parent.follow": (FREE, "another goal of a replay"),
    "workers": (FREE, _SPEED),
    "health": (FREE, "when to act"),
    "scaling": (FREE, "how many workers there are"),
    "http": (FREE, "encryption of the servers"),
    "telemetry": (FREE, "notifications and logs"),
}
"""By key or section; of two that fit a key the longer one holds."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from the run's last session; None is a key that is not
    there.
    """

    key: str
    old: Any
    new: Any
    rule: Rule
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def changes_between(
    old: RunConfig, new: RunConfig, *, old_tree: Mapping[str, Any], new_tree: Mapping[str, Any]
) -> list[Change]:
    """Return what differs, key by key, each with its rule; roles that come or go with a change
    count as a change of their own.

    Args:
        old: The run as it was.
        new: The run as it is wanted.
        old_tree: The run description on the log.
        new_tree: The new run description.
    """
    before, after = dict(_leaves(old_tree)), dict(_leaves(new_tree))
    found = [
        _change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    was, will_be = (
        " ".join(sorted(config.roles().keys() - {"evaluator", "judge"})) for config in (old, new)
    )
    if was != will_be:
        found.append(
            Change(
                "roles",
                was,
                will_be,
                NEVER,
                f"{_UNDER_WAY}, and were not worked on by the roles that come in",
            )
        )
    return found


def rule_of(key: str) -> tuple[Rule, str]:
    """Return a key's rule and its reason."""
    parts = key.split(".")
    return next(
        RULES[name]
        for length in range(len(parts), 0, -1)
        if (name := ".".join(parts[:length])) in RULES
    )


def _change(key: str, old: Any, new: Any) -> Change:
    rule, reason = rule_of(key)
    if key == "run.num_steps" and new < old:
        rule = ACCEPTED
    return Change(key, old, new, rule, reason)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "(none)" if value is None else str(value)
