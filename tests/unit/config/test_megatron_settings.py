"""What backend `megatron` does not train is refused with the run file."""

from __future__ import annotations

from typing import Any

import pytest
from small_settings import small_run

from relax_events.config import RunConfig

pytestmark = pytest.mark.unit
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"frozen": ["language"]}}, r"model\.frozen names 'language'; leave that out"),
    (
        {
            "algorithm": {"name": "ppo"},
            "trainer": {"backend": "megatron", "ranks": 4, "tensor_parallel": 4},
            "critic": {"ranks": 1},
        },
        r"critic.ranks \(1\) must be a multiple of trainer.tensor_parallel \(4\)",
    ),
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


def test_critic_has_the_ranks_of_the_trainer_where_they_hold_parts_of_the_model() -> None:
    ppo: dict[str, Any] = {"algorithm": {"name": "ppo"}}
    split = {"backend": "megatron", "ranks": 4, "tensor_parallel": 2}
    assert run_with(**ppo, trainer=split).processes()["critic"] == 4
    assert run_with(**ppo, trainer=split, critic={"ranks": 2}).processes()["critic"] == 2
    assert run_with(**ppo, trainer={"backend": "megatron", "ranks": 2}).critic_ranks == 1
    sharded = {"backend": "torch", "ranks": 2, "sharding": "full"}
    assert run_with(**ppo, trainer=sharded).critic_ranks == 2
    with pytest.raises(ValueError, match=r"critic.ranks = 2.*set trainer.sharding = 'full'"):
        run_with(**ppo, trainer={"backend": "torch", "ranks": 2}, critic={"ranks": 2})


def test_ranks_that_hold_layers_together_are_accepted() -> None:
    config = run_with(trainer={"backend": "megatron", "ranks": 4, "tensor_parallel": 2})
    assert config.trainer.topology().data == 2
