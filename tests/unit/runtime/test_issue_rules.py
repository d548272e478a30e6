"""The trainer rejects records that no worker of the run wrote, and accepts the valid ones that come
after them.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_samples import changed, issued, ready
from run_events import run_config

from relax_events.config import AlgorithmConfig
from relax_events.errors import ForeignRecord, PoisonSample
from relax_events.events.types import PromptGroupIssued
from relax_events.kafka.records import Record
from relax_events.runtime.issue_rules import IssueRules
from relax_events.runtime.validation import check_trainable

CONFIG = run_config(prompts_per_step=4, samples_per_prompt=2, max_staleness=1)
TERMS = IssueRules.from_config(CONFIG)
OWN_PARTITION = TERMS.plan.partition("000001-0002-0", 1)


def require_met(
    key: str | None = None, partition: int | None = None, trainer_version: int = 1, **changes: Any
) -> None:
    """Check a sample of prompt group 000001-0002-0 that is valid except for these changes."""
    sample = changed(ready("000001-0002-0", 1, version=1), **changes)
    key = sample.prompt_group_id if key is None else key
    partition = TERMS.plan.partition(sample.prompt_group_id, 1) if partition is None else partition
    TERMS.check_sample(
        Record("relax.r.advantage.samples", partition, 0, key, b"", {}, 0),
        sample,
        trainer_version=trainer_version,
    )


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (
            issued("000103-0099-0"),
            "group_index must be below 16 x run.prompts_per_step = 64, got 99",
        ),
        (
            issued("000001-0002-0", of=3),
            "samples_per_prompt must be run.samples_per_prompt = 2, got 3",
        ),
        (
            replace(issued("000103-0003-0"), required_policy_version=101),
            "required_policy_version must be at least 102 for train step 103, got 101",
        ),
        (replace(issued("000103-0003-5"), required_policy_version=102), ""),
        (issued("000001-0003-0"), ""),
        (issued("000001-1000000-0", of=3), ""),
    ],
)
def test_prompt_in_a_batch_slot_that_the_run_lacks_is_rejected(
    prompt: PromptGroupIssued, problem: str
) -> None:
    """A worker may be behind the prompter, so that any train step may be one of the run; an
    external prompt has its own number of samples."""
    with (
        pytest.raises(ForeignRecord, match=f"'{prompt.prompt_group_id}': {re.escape(problem)}; no ")
        if problem
        else nullcontext()
    ):
        TERMS.check_prompt(prompt)
    assert TERMS.is_foreign(prompt) == bool(problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("000001-0064-0", "group_index must be below 16 x run.prompts_per_step = 64, got 64"),
        ("000003-0002-0", "prompt groups are issued up to train step 2 at version 1, got 3"),
        ("000002-0003-7", ""),
        ("000000-0000-0", ""),
        ("000900-1000004-0", ""),
    ],
)
def test_end_request_for_a_batch_slot_that_is_not_issued_is_rejected(
    name: str, problem: str
) -> None:
    partition = TERMS.plan.partition(name, 1)
    record = Record("relax.r.prompt.end-requests", partition, 0, name, b"", {}, 0)
    with pytest.raises(ForeignRecord, match=re.escape(problem)) if problem else nullcontext():
        TERMS.check_end(record, name, trainer_version=1)


def test_valid_sample_passes_the_issue_checks() -> None:
    require_met()
    require_met(trainer_version=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt_group_id": "absent"}, "'absent' is not a prompt group id"),
        (
            {"train_step": 3},
            "its id names (1, 2, 0) where train_step, group_index and attempt are (3, 2, 0)",
        ),
        (
            {"attempt": 7},
            "its id names (1, 2, 0) where train_step, group_index and attempt are (1, 2, 7)",
        ),
        ({"samples_per_prompt": 1}, "samples_per_prompt must be run.samples_per_prompt = 2, got 1"),
        ({"key": "000001-0003-0"}, "its key must be its prompt group, got '000001-0003-0'"),
        (
            {"partition": 99},
            f"samples of version 1 of its prompt group belong on partition {OWN_PARTITION}, got 99",
        ),
        (
            {"prompt_group_id": "000001-0064-0", "group_index": 64},
            "group_index must be below 16 x run.prompts_per_step = 64, got 64",
        ),
        (
            {"prompt_group_id": "000001-1000000-0", "group_index": 1_000_000},
            "group_index must be below 16 x run.prompts_per_step = 64, got 1000000",
        ),
        (
            {"prompt_group_id": "000003-0002-0", "train_step": 3},
            "prompt groups are issued up to train step 2 at version 1, got 3",
        ),
    ],
)
def test_sample_inconsistent_with_the_run_or_its_prompt_group_is_rejected(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ForeignRecord, match=re.escape(text)) as caught:
        require_met(**changes)
    assert len(str(caught.value)) < 400


def test_end_request_on_a_partition_of_another_shard_is_rejected() -> None:
    plan = TERMS.plan
    own = [plan.partition("000001-0002-0", version) for version in range(plan.num_slots)]
    for partition in range(plan.num_sample_partitions):
        record = Record("relax.r.prompt.end-requests", partition, 0, "000001-0002-0", b"", {}, 0)
        with (
            nullcontext()
            if partition in own
            else pytest.raises(ForeignRecord, match="belong on partitions of shard")
        ):
            TERMS.check_end(record, "000001-0002-0", trainer_version=1)
    assert (
        len(own)
        == plan.num_sample_partitions // plan.partitions_per_version
        < plan.num_sample_partitions
    )


def test_advantage_above_the_limit_is_poison() -> None:
    bounds: dict[str, Any] = {
        "algorithm": AlgorithmConfig(),
        "vocab_size": 100,
        "max_abs_advantage": CONFIG.trainer.max_abs_advantage,
    }
    for values in ([0, 0, 1e4, -1e4], [0, 0, 0, 0]):
        check_trainable(ready(advantages=np.array(values, np.float32)), **bounds)
    with pytest.raises(
        PoisonSample,
        match=r"advantages must be at most trainer.max_abs_advantage = 10000 in magnitude, got 1e\+06; raise it if",
    ):
        check_trainable(ready(advantages=np.array([0, 0, 0, -1e6], np.float32)), **bounds)
