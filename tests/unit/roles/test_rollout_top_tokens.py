"""The most probable tokens that a rollout worker reads from its engine's results, or that are
missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_requests import generated

from relax_events.errors import ConfigError
from relax_events.roles.inflight_group import select_top_tokens

WANTED = {"distill_coefficient": 1.0, "distill_tokens": "student_topk", "distill_top_k": 3}


def test_top_tokens_are_recorded_only_where_the_loss_compares_them(make_run_config: Any) -> None:
    top = np.array([[5, 9, 1], [6, 2, 3]], np.int32)
    asking = make_run_config(algorithm=WANTED, teacher={"model_path": "teacher"})
    assert select_top_tokens(generated(top_tokens=top), asking) is top
    assert select_top_tokens(generated(top_tokens=top), make_run_config()) is None


@pytest.mark.parametrize(
    ("top", "got"), [(None, "none"), (np.zeros((2, 2), np.int32), r"shape \(2, 2\)")]
)
def test_engine_without_top_tokens_is_rejected_with_a_remedy(
    top: np.ndarray | None, got: str, make_run_config: Any
) -> None:
    asking = make_run_config(algorithm=WANTED, teacher={"model_path": "teacher"})
    with pytest.raises(
        ConfigError,
        match=rf"'student_topk' needs 3 most probable tokens .* gave {got}; take another engine, or distill_tokens = 'teac",
    ):
        select_top_tokens(generated(top_tokens=top), asking)
