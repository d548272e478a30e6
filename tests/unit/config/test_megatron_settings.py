"""What backend `megatron` does not train is refused with the run file."""

from __future__ import annotations

from typing import Any

import pytest
from small_settings import small_run

from relax_events.config import RunConfig

pytestmark = pytest.mark.unit
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"lora": {}}}, "trains no adapters"),
    ({"model": {"frozen": ["vision"]}}, r"model\.frozen is \['vision'\]; leave it out"),
    ({"algorithm": {"name": "ppo"}}, "algorithm ppo needs one"),
    ({"trainer": {"sharding": "full"}}, r"trainer\.sharding is 'full'; leave it out"),
    ({"trainer": {"activation_checkpointing": "selective"}}, "set it to 'whole' or 'none'"),
]


def run_with(**sections: dict[str, Any]) -> RunConfig:
    settings: dict[str, dict[str, Any]] = {
        "run": {"id": "test"},
        "model": {"path": "unused"},
        "data": {"source": "jsonl:unused"},
        "trainer": {"backend": "megatron"},
    }
    return small_run({name: settings.get(name, {}) | sections.get(name, {}) for name in
                      settings | sections})  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_megatron_does_not_train_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_with(**sections)


def test_ranks_that_hold_layers_together_are_accepted() -> None:
    config = run_with(trainer={"backend": "megatron", "ranks": 4, "tensor_parallel": 2})
    assert config.trainer.topology().data == 2
