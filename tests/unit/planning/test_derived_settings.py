"""Values derived for keys that a run file leaves out; expected numbers are computed by hand from
the models' published sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.config.loading import _known_keys
from relax_events.config.unset_keys import OF_MACHINE, OF_RUN, get_value, missing_keys, with_values
from relax_events.planning.derived import Derived, derive
from relax_events.planning.inventory import CheckpointFacts, Machine

GIB = 2**30
SMALL = CheckpointFacts("bfloat16", 596_049_920, 151_936, 1024, 28, 16, 8, 128, 3072, 40_960)
MIDDLE = CheckpointFacts("bfloat16", 4_022_468_096, 151_936, 2560, 36, 32, 8, 128, 9728, 40_960)
LARGE = CheckpointFacts("bfloat16", 30_532_122_624, 151_936, 2048, 48, 32, 4, 128, 8 * 768, 40_960)
"""Qwen3-0.6B, Qwen3-4B and Qwen3-30B-A3B."""
ALONE = {"trainer": 1}
MICRO_BATCH = "trainer.max_tokens_per_micro_batch"


def run_of(**sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"id": "mine"},
        "model": {"path": "model"},
        "data": {"source": "jsonl:rows"},
    }
    return RunConfig.model_validate(
        tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()}
    )


def machine(
    *,
    processors: int = 16,
    memory: int = 128 * GIB,
    gpus: tuple[int, ...] = (),
    roles: dict[str, int] | None = None,
) -> Machine:
    return Machine(processors, memory, gpus, ALONE if roles is None else roles)


def values(
    config: RunConfig, facts: CheckpointFacts, here: Machine | None = None
) -> dict[str, Any]:
    return {
        derived.key: derived.value
        for derived in derive(config, {"model": facts}, here or machine())
    }


def test_every_missing_key_gets_a_derived_value() -> None:
    config = run_of()
    found = values(config, SMALL)
    assert set(found) == set(missing_keys(config))
    assert missing_keys(with_values(config, found)) == []
    assert {*OF_RUN, *OF_MACHINE} <= set(_known_keys(RunConfig))
    assert set(OF_RUN) == {
        "engine.max_context_tokens",
        "engine.sampling.max_new_tokens",
        "judge.dtype",
        "model.dtype",
        "run.retain_versions",
        "run.weight_update_mode",
        "teacher.dtype",
        "trainer.learning_rate",
        "workers.drain_seconds",
    }
    assert set(OF_MACHINE) == {
        *(f"{name}.threads" for name in ("engine", "judge.engine", "critic", "teacher", "trainer")),
        "trainer.max_tokens_per_micro_batch",
    }


def test_judge_and_teacher_keys_are_derived_when_the_run_has_them() -> None:
    config = run_of(
        judge={"model_path": "judge"},
        reward={"function": "genrm"},
        teacher={"model_path": "teacher"},
    )
    found = {
        derived.key: derived.value
        for derived in derive(config, {"model": SMALL, "judge": LARGE, "teacher": SMALL}, machine())
    }
    assert {"judge.dtype", "judge.engine.threads", "teacher.dtype", "teacher.threads"} <= set(found)
    assert missing_keys(with_values(config, found)) == []


def test_values_set_in_the_run_file_are_not_derived() -> None:
    given = {
        "trainer": {"learning_rate": 0.5, "threads": 0},
        "engine": {"sampling": {"max_new_tokens": 7}},
    }
    found = values(run_of(**given), SMALL)
    assert {"trainer.learning_rate", "trainer.threads", "engine.sampling.max_new_tokens"} & set(
        found
    ) == set()


@pytest.mark.parametrize(("tiny", "rate"), [(None, 1e-6), ({"hidden_size": 32}, 1e-3)])
def test_learning_rate_depends_on_whether_the_run_creates_the_model(
    tiny: dict[str, Any] | None, rate: float
) -> None:
    assert values(run_of(model={"tiny": tiny}), SMALL)["trainer.learning_rate"] == rate


def test_model_dtype_is_derived_from_the_checkpoint() -> None:
    assert values(run_of(), SMALL)["model.dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "positions", "context", "new"),
    [
        ({}, 40_960, 8192, 6144),
        ({}, 2048, 2048, 1536),
        ({"data": {"max_prompt_tokens": 1024}}, 40_960, 8192, 7168),
        (
            {"engine": {"max_context_tokens": 3072}, "data": {"max_prompt_tokens": 2048}},
            40_960,
            None,
            1024,
        ),
        (
            {"engine": {"sampling": {"max_new_tokens": 512}}, "data": {"max_prompt_tokens": 1024}},
            40_960,
            1536,
            None,
        ),
        (
            {
                "engine": {"sampling": {"max_new_tokens": 16_384}},
                "data": {"max_prompt_tokens": 1024},
            },
            40_960,
            17_408,
            None,
        ),
        ({"engine": {"sampling": {"max_new_tokens": 3000}}}, 4096, 4096, None),
        ({"model": {"tiny": {"hidden_size": 32}}}, 4096, 512, 32),
        (
            {"model": {"tiny": {"hidden_size": 32}}, "engine": {"max_context_tokens": 16}},
            4096,
            None,
            16,
        ),
    ],
)
def test_token_limits_are_derived_from_model_and_prompt_settings(
    given: Any, positions: int, context: int | None, new: int | None
) -> None:
    facts = CheckpointFacts("bfloat16", 596_049_920, 151_936, 1024, 28, 16, 8, 128, 3072, positions)
    found = values(run_of(**given), facts)
    assert (
        found.get("engine.max_context_tokens"),
        found.get("engine.sampling.max_new_tokens"),
    ) == (context, new)


def test_evaluation_max_new_tokens_defaults_to_that_of_training() -> None:
    datasets = [
        {"name": "a", "source": "jsonl:rows", "sampling": {"top_k": 1}},
        {"name": "b", "source": "jsonl:rows", "sampling": {"max_new_tokens": 5}},
        {"name": "c", "source": "jsonl:rows"},
    ]
    config = with_values(
        run_of(evaluation={"datasets": datasets}), {"engine.sampling.max_new_tokens": 77}
    )
    assert [
        dataset.sampling and dataset.sampling.max_new_tokens
        for dataset in config.evaluation.datasets
    ] == [77, 5, None]


@pytest.mark.parametrize(
    ("new", "seconds"), [(8, 20.0), (400, 20.0), (6144, 307.2), (100_000, 900.0)]
)
def test_drain_seconds_are_derived_from_max_new_tokens(new: int, seconds: float) -> None:
    config = run_of(engine={"sampling": {"max_new_tokens": new}})
    assert values(config, SMALL)["workers.drain_seconds"] == seconds


@pytest.mark.parametrize(
    ("staleness", "algorithm", "mode"),
    [
        (0, {}, "drain"),
        (1, {}, "recompute"),
        (4, {"old_logprobs": "trainer"}, "recompute"),
        (1, {"old_logprobs": "actor"}, "drain"),
        (1, {"old_logprobs": "actor", "correction": "tis", "correction_high": 2.0}, "recompute"),
    ],
)
def test_engines_recompute_running_samples_unless_one_version_must_score_them(
    staleness: int, algorithm: dict[str, Any], mode: str
) -> None:
    config = run_of(run={"max_staleness": staleness}, algorithm=algorithm)
    assert values(config, SMALL)["run.weight_update_mode"] == mode


@pytest.mark.parametrize(
    ("roles", "threads"),
    [
        (ALONE, 16),
        ({"trainer": 1, "rollout": 1, "reference": 1, "reward": 4}, 5),
        ({"trainer": 64}, 1),
    ],
)
def test_cpu_threads_are_divided_among_the_computing_roles(
    roles: dict[str, int], threads: int
) -> None:
    found = values(run_of(), SMALL, machine(roles=roles))
    assert {found[key] for key in ("engine.threads", "trainer.threads", "critic.threads")} == {
        threads
    }


def test_adapters_get_a_higher_rate_and_leave_memory_of_gradients_and_moments() -> None:
    whole, adapted = run_of(), run_of(model={"lora": {"rank": 16}})
    assert values(whole, MIDDLE)["trainer.learning_rate"] == 1e-6
    assert values(adapted, MIDDLE)["trainer.learning_rate"] == 1e-5
    # by hand: rank 16 times 36 layers of q and o (2560 + 4096), k and v (2560 + 1024), and three
    # matrices of the feed-forward (2560 + 9728)
    num_adapters = 16 * 36 * (2 * 6656 + 2 * 3584 + 3 * 12_288)
    assert MIDDLE.num_adapter_parameters(16) == num_adapters == 33_030_144
    assert (
        MIDDLE.training_bytes("bfloat16", adapter_rank=16) == 2 * 4_022_468_096 + 18 * num_adapters
    )
    here = machine(gpus=(80 * GIB,))
    assert values(adapted, MIDDLE, here)[MICRO_BATCH] > 4 * values(whole, MIDDLE, here)[MICRO_BATCH]


@pytest.mark.parametrize(
    ("facts", "cell_bytes", "training_bytes", "cache_bytes"),
    [
        # (4 x 3072 + 8 x 1024 + 4 x (16 + 2 x 8) x 128) x 28 layers x 2 bytes; the measurement says
        # 2.0 MB
        (SMALL, 2_064_384, 10_728_898_560, 114_688),
        # (4 x 9728 + 8 x 2560 + 4 x (32 + 2 x 8) x 128) x 36 x 2: 6.1 MB
        (MIDDLE, 6_045_696, 72_404_425_728, 147_456),
        # (4 x 6144 + 8 x 2048 + 4 x (32 + 2 x 4) x 128) x 48 x 2
        (LARGE, 5_898_240, 549_578_207_232, 98_304),
    ],
)
def test_memory_sizes_of_real_models_are_computed(
    facts: CheckpointFacts, cell_bytes: int, training_bytes: int, cache_bytes: int
) -> None:
    assert facts.cell_bytes("bfloat16") == cell_bytes
    assert facts.training_bytes("bfloat16") == training_bytes
    assert facts.cache_bytes("bfloat16") == cache_bytes


def test_micro_batch_of_a_small_model_has_the_maximum_size() -> None:
    assert values(run_of(), SMALL, machine(gpus=(80 * GIB,)))[MICRO_BATCH] == 16_384


def test_micro_batch_uses_the_memory_left_by_a_large_model() -> None:
    # 78 GiB - 72,404,425,728 - 2e9 - 2 x 151,936 x 2560 of the head's gradient = 8,569,524,224; 0.9
    # of it, less 441 x 151,936 x 26 of logits and 4 x 151,936 x 2560 of the gradient's sum, holds
    # 730 tokens of 6,045,696 bytes
    (found,) = [
        one
        for one in derive(run_of(), {"model": MIDDLE}, machine(gpus=(78 * GIB,)))
        if one.key == MICRO_BATCH
    ]
    assert found.value == 512
    assert found.is_warning
    assert "engine.max_context_tokens = 8192 may not fit" in found.reason


def test_other_models_on_the_gpu_reduce_the_micro_batch() -> None:
    # 80 GiB; engine: 256 samples x 1536 tokens x 114,688 bytes, bounded by a third, 28,633,115,306;
    # weights of three roles 3 x 1,192,099,840: 85,899,345,920 - 32,209,414,826 - 10,728,898,560 -
    # 2e9 - 311,164,928 = 40,649,867,606; 0.9 of it, less 2,364,428,032 of the head, holds 16,576
    given = {"engine": {"max_context_tokens": 1536}}
    roles = {"trainer": 1, "rollout": 1, "reference": 1, "actor-forward": 1}
    assert (
        values(run_of(**given), SMALL, machine(gpus=(80 * GIB,), roles=roles))[MICRO_BATCH]
        == 16_384
    )
    # 40 GiB: 42,949,672,960 - 14,316,557,653 - 3,576,299,520 - 13,040,063,488 = 12,016,752,299; 0.9
    # of it, less 2,364,428,032 of the head, holds 4093 tokens
    assert (
        values(run_of(**given), SMALL, machine(gpus=(40 * GIB,), roles=roles))[MICRO_BATCH] == 3840
    )


def test_engines_that_hold_the_gpu_in_turn_leave_the_micro_batch_alone() -> None:
    turns = run_of(
        run={"mode": "sync", "max_staleness": 0},
        engine={"max_context_tokens": 4096},
        devices={"time_share": True},
    )
    here = machine(gpus=(80 * GIB,), roles=ALONE | {"rollout": 2})
    alone = values(turns, MIDDLE, machine(gpus=(80 * GIB,)))
    assert values(turns, MIDDLE, here)[MICRO_BATCH] == alone[MICRO_BATCH]
    together = turns.model_copy(
        update={"devices": turns.devices.model_copy(update={"time_share": False})}
    )
    assert values(together, MIDDLE, here)[MICRO_BATCH] < alone[MICRO_BATCH]


def test_models_on_other_gpus_leave_the_micro_batch_alone() -> None:
    given = {"engine": {"max_context_tokens": 1536}}
    roles = {"trainer": 1, "rollout": 1, "reference": 1, "actor-forward": 1}
    alone = values(run_of(**given), SMALL, machine(gpus=(24 * GIB,)))[MICRO_BATCH]
    shared = values(run_of(**given), SMALL, machine(gpus=(24 * GIB,), roles=roles))[MICRO_BATCH]
    apart = values(run_of(**given), SMALL, machine(gpus=(24 * GIB,) * 2, roles=roles))[MICRO_BATCH]
    assert shared < alone == apart


def test_sharded_trainer_leaves_room_for_tokens() -> None:
    # 4 B parameters of 16 bytes over eight ranks are 8.0 GB instead of 72.4
    sharded = {
        "trainer": {"sharding": "full", "ranks": 8, "activation_checkpointing": "whole"},
        "broker": {"partitions_per_version": 8},
    }
    here = machine(gpus=(80 * GIB,) * 8, roles={"trainer": 8})
    assert values(run_of(**sharded), MIDDLE, here)[MICRO_BATCH] == 16_384


def test_model_that_does_not_fit_the_gpu_gives_a_warning() -> None:
    (found,) = [
        one
        for one in derive(run_of(), {"model": LARGE}, machine(gpus=(80 * GIB,)))
        if one.key == MICRO_BATCH
    ]
    assert (found.value, found.is_warning) == (256, True)
    assert "85.9 GB" in found.reason
    assert "too little; take more memory or a smaller model" in found.reason


def test_ranks_share_the_memory_of_a_machine_without_gpus() -> None:
    # float32: 16 bytes a parameter; 32 GiB - 9,536,798,720 - 0.5e9 - 622,329,856 =
    # 23,700,609,792; 0.9 of it, less 2,498,435,584 of the head, holds 4561 tokens of 4,128,768 bytes
    config = run_of(model={"dtype": "float32"})
    assert values(config, SMALL, machine(roles={"trainer": 2}))[MICRO_BATCH] == 4352


def test_keys_that_need_unknown_facts_are_not_derived() -> None:
    found = {derived.key for derived in derive(run_of(), {}, machine())}
    assert found == {
        "run.retain_versions",
        "run.weight_update_mode",
        "trainer.learning_rate",
        "workers.drain_seconds",
        "engine.threads",
        "trainer.threads",
        "critic.threads",
    }


def test_dumped_run_file_leaves_keys_to_be_derived_unset(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = run_of()
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert get_value(config, "trainer.learning_rate") is None
    assert missing_keys(make_run_config()) == []


def test_tiny_model_keeps_its_usual_micro_batch_in_three_gigabytes() -> None:
    facts = CheckpointFacts("float32", 100_000, 300, 64, 2, 4, 2, 16, 128, 4096)
    (found,) = [
        one
        for one in derive(run_of(), {"model": facts}, machine(memory=3 * GIB))
        if one.key == MICRO_BATCH
    ]
    assert (found.value, found.is_warning) == (8192, False)


def retention_of(
    room: int, *, run: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Derived:
    """Return the retention of 1,000 samples of 20,000 tokens a step."""
    keys = {"prompts_per_step": 125, "samples_per_prompt": 8, "num_steps": 20_000} | (run or {})
    config = run_of(run=keys, **{"engine": {"max_context_tokens": 20_000}} | sections)
    here = replace(machine(), log_room_bytes=room)
    return next(
        one for one in derive(config, {"model": SMALL}, here) if one.key == "run.retain_versions"
    )


def test_log_that_the_disk_can_not_hold_is_bounded() -> None:
    # a step adds 1,000 x 20,000 x 48 B = 0.96 GB at most, and 20,000 of them half as much each:
    # 9.6 TB; half of 1 TB holds 520 steps, 50 of which may be newer than the newest checkpoint
    derived = retention_of(10**12)
    assert (derived.value, derived.is_warning) == (520 - 50, True)
    assert "take about 9,600.0 GB, at most 960.0 MB a step" in derived.reason
    assert "1,000.0 GB free" in derived.reason


@pytest.mark.parametrize(
    ("room", "run", "value"),
    [
        (20 * 10**12, {}, 0),  # twice what is expected
        (10**12, {"num_steps": 1000}, 0),
        (0, {}, 0),  # of another broker
        (40 * 10**9, {"max_staleness": 3}, 5),  # the window and the version that is published next
    ],
)
def test_log_is_kept_whole_where_it_fits_and_as_far_as_training_needs_it_where_it_does_not(
    room: int, run: dict[str, Any], value: int
) -> None:
    assert retention_of(room, run=run).value == value


def test_secured_run_is_purged_by_its_operator_since_its_roles_may_not() -> None:
    secured = {"credentials": "security"}
    derived = retention_of(10**12, broker=secured)
    assert (derived.value, derived.is_warning) == (0, True)
    assert "relax topics purge" in derived.reason


def test_retention_waits_for_the_longest_sample() -> None:
    here = replace(machine(), log_room_bytes=10**12)
    assert "run.retain_versions" not in {one.key for one in derive(run_of(), {}, here)}
