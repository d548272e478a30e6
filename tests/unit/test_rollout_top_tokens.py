"""The most probable tokens that a rollout worker takes from its engine, or misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import ConfigError
from relax_events.events.parts import FinishReason, VersionSegment
from workers.rolled_out import recorded_top_tokens

WANTED = {"distill_coefficient": 1.0, "distill_tokens": "student_topk", "distill_top_k": 3}


def generated(top_tokens: np.ndarray | None) -> GeneratedSample:
    return GeneratedSample(
        sample_id="000000-0000-0/0",
        prompt_group_id="000000-0000-0",
        tokens=np.array([5, 6], np.int32),
        logprobs=np.zeros(2, np.float32),
        segments=(VersionSegment(0, 2),),
        finish_reason=FinishReason.STOP,
        top_tokens=top_tokens,
    )


def test_top_tokens_are_recorded_only_where_the_loss_compares_them(make_run_config: Any) -> None:
    top = np.array([[5, 9, 1], [6, 2, 3]], np.int32)
    asking = make_run_config(algorithm=WANTED, teacher={"model_path": "teacher"})
    assert recorded_top_tokens(generated(top), asking) is top
    assert recorded_top_tokens(generated(top), make_run_config()) is None


@pytest.mark.parametrize(("top", "got"), [(None, "none"), (np.zeros((2, 2), np.int32), r"shape \(2, 2\)")])
def test_engine_that_gives_no_top_tokens_is_refused_with_what_to_do(top: np.ndarray | None, got: str, make_run_config: Any) -> None:
    asking = make_run_config(algorithm=WANTED, teacher={"model_path": "teacher"})
    with pytest.raises(
        ConfigError, match=rf"'student_topk' needs 3 most probable tokens .* gave {got}; take another engine, or distill_tokens = 'teac"
    ):
        recorded_top_tokens(generated(top), asking)
