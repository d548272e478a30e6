"""Plans of whole runs, compared with arithmetic by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.planning.device_specs import DeviceSpec, parse_devices
from relax_events.planning.inventory import CheckpointFacts
from relax_events.planning.memory import MemoryParts
from relax_events.planning.run_plan import (
    EpisodePlan,
    PlannedDevice,
    PlannedWorker,
    RunPlan,
    plan_run,
)

pytestmark = pytest.mark.unit
MIDDLE = CheckpointFacts("bfloat16", 4_022_468_096, 151_936, 2560, 36, 32, 8, 128, 9728, 40_960)
LARGE = CheckpointFacts(
    "bfloat16", 30_532_122_624, 151_936, 2048, 48, 32, 4, 128, 8 * 768, 40_960, False
)
H100 = parse_devices("H100-80GB")[2]


def plan(
    facts: CheckpointFacts = MIDDLE,
    *,
    num_devices: int = 8,
    device: DeviceSpec = H100,
    sample_tokens: int = 2048,
    sections: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> RunPlan:
    tree: dict[str, dict[str, Any]] = {
        "run": {"id": "mine", "prompts_per_step": 8, "samples_per_prompt": 8},
        "model": {"path": "model", "dtype": "bfloat16"},
        "data": {"source": "jsonl:rows"},
        "engine": {"max_context_tokens": 4096, "sampling": {"max_new_tokens": 2048}},
        "algorithm": {"old_logprobs": "actor"},
        "trainer": {"max_tokens_per_micro_batch": 4096} | trainer,
        "broker": {"partitions_per_version": 4},
    }
    for name, section in (sections or {}).items():
        tree[name] = tree.get(name, {}) | section
    config = RunConfig.model_validate(tree)
    return plan_run(
        config,
        {"model": facts},
        device=device,
        num_devices=num_devices,
        sample_tokens=sample_tokens,
    )


def test_every_worker_has_its_parts() -> None:
    found = plan(sharding="full", ranks=4, activation_checkpointing="whole")
    assert found.fits
    workers = {worker.worker_id: worker for one in found.devices for worker in one.workers}
    assert set(workers) == {"trainer-0", "trainer-1", "trainer-2", "trainer-3"} | {
        "rollout-0",
        "actor-forward-0",
    }
    assert workers["rollout-0"].memory.parts["weights"] == 2 * 4_022_468_096
    assert workers["trainer-3"].memory.parts["optimizer"] == 2 * 4_022_468_096


def test_teacher_worker_holds_all_teachers_that_no_server_has() -> None:
    config = RunConfig.model_validate(
        {
            "run": {"id": "mine", "prompts_per_step": 8, "samples_per_prompt": 8},
            "model": {"path": "model", "dtype": "bfloat16"},
            "data": {"source": "jsonl:rows"},
            "engine": {"max_context_tokens": 4096, "sampling": {"max_new_tokens": 2048}},
            "algorithm": {"name": "opd"},
            "teacher": {"model_path": "large"},
            "teachers": {
                "math": {"model_path": "middle", "sources": ["math"]},
                "code": {"model_path": "huge", "sources": ["code"], "urls": ["http://code:1"]},
            },
            "trainer": {"max_tokens_per_micro_batch": 4096, "ranks": 4, "sharding": "full"},
            "broker": {"partitions_per_version": 4},
        }
    )
    facts = {"model": MIDDLE, "teacher": LARGE, "teachers.math": MIDDLE}
    found = plan_run(config, facts, device=H100, num_devices=8, sample_tokens=2048)
    workers = {worker.worker_id: worker for one in found.devices for worker in one.workers}
    weights = workers["teacher-0"].memory.parts["weights"]
    assert weights == 2 * (30_532_122_624 + 4_022_468_096)


@pytest.mark.parametrize(
    ("device", "model", "on_device", "on_host"),
    [("H100-80GB", {}, 2, 0), ("CPU", {}, 2, 2), ("H100-80GB", {"lora": {"rank": 4}}, 4, 0)],
)
def test_two_roles_in_one_process_hold_one_model_if_they_score_in_the_same_way(
    device: str, model: dict[str, Any], on_device: int, on_host: int
) -> None:
    kind = DeviceSpec("CPU", 2 * 10**12) if device == "CPU" else H100
    config = RunConfig.model_validate(
        {
            "run": {"id": "mine"},
            "model": {"path": "model", "dtype": "bfloat16"} | model,
            "data": {"source": "jsonl:rows"},
            "engine": {"max_context_tokens": 4096},
            "algorithm": {"old_logprobs": "actor", "kl_coefficient": 0.1},
            "trainer": {"max_tokens_per_micro_batch": 4096},
            "workers": {"hybrid": True},
        }
    )
    found = plan_run(config, {"model": MIDDLE}, device=kind, num_devices=4, sample_tokens=2048)
    workers = {worker.worker_id: worker for one in found.devices for worker in one.workers}
    assert set(workers) == {"trainer-0", "rollout-0", "reference-0"}
    parts = workers["reference-0"].memory.parts
    assert parts["weights"] == on_device * 4_022_468_096
    assert parts.get("weights out of turn", 0) == on_host * 4_022_468_096


def test_cache_of_an_engine_takes_what_is_left_in_whole_samples() -> None:
    found = plan(sharding="full", ranks=4, activation_checkpointing="whole")
    (engine,) = [one for device in found.devices for one in device.workers if one.most_samples]
    one_sample = 4096 * 147_456
    room = H100.num_bytes - 2 * 4_022_468_096 - 2_000_000_000
    assert engine.num_samples == room // one_sample
    assert engine.memory.parts["cache"] == engine.num_samples * one_sample


@pytest.mark.parametrize(
    ("staleness", "environment", "most"),
    [(1, {}, 128), (2, {}, 192), (5, {}, 256), (1, {"command": ["agent"]}, 256)],
)
def test_engine_has_no_more_rows_than_samples_can_be_in_flight(
    staleness: int, environment: dict[str, Any], most: int
) -> None:
    sections = {"run": {"max_staleness": staleness}, "environment": environment}
    found = plan(sharding="full", ranks=4, sections=sections)
    (engine,) = [one for device in found.devices for one in device.workers if one.most_samples]
    assert engine.most_samples == most


def test_smallest_change_that_fits_is_named() -> None:
    found = plan()
    assert not found.fits
    assert found.change == "set trainer.activation_checkpointing = 'whole'"
    for replay in ("none", "rollout"):
        large = plan(LARGE, sections={"model": {"routing_replay": replay}})
        assert not large.fits
        assert large.change.startswith(
            "set trainer.activation_checkpointing = 'whole', trainer.sharding = 'full', "
            "trainer.ranks ="
        )


def test_more_devices_are_named_where_these_never_suffice() -> None:
    assert plan(LARGE, num_devices=1).change.endswith("on 16 devices")


def test_mixture_is_divided_by_megatron_where_it_does_not_fit() -> None:
    found = plan(LARGE, backend="megatron", num_devices=16)
    assert not found.fits
    assert found.change == (
        "set trainer.activation_checkpointing = 'whole', trainer.ranks = 8, "
        "trainer.tensor_parallel = 1, broker.partitions_per_version = 8, "
        "trainer.expert_parallel = 8"
    )
    again = plan(
        LARGE, backend="megatron", num_devices=16, ranks=8, tensor_parallel=2, expert_parallel=8,
        activation_checkpointing="whole",
    )  # fmt: skip
    assert again.fits


def test_long_samples_of_a_mixture_fit_with_routing_replay_where_layers_are_computed_again() -> (
    None
):
    settings: dict[str, Any] = {
        "sharding": "full", "ranks": 8, "max_tokens_per_micro_batch": 20_480,
    }  # fmt: skip
    sections = {
        "model": {"routing_replay": "rollout"},
        "engine": {"max_context_tokens": 20_480},
        "broker": {"partitions_per_version": 8},
    }
    activations = {}
    for mode in ("none", "whole"):
        found = plan(
            LARGE, num_devices=16, sample_tokens=20_000, sections=sections,
            activation_checkpointing=mode, **settings,
        )  # fmt: skip
        trainer = found.devices[0]
        activations[mode] = trainer.workers[0].memory.parts["activations"]
        assert trainer.fits == (mode == "whole")
    assert activations["whole"] < 8e9 < 110e9 < activations["none"]


def test_stages_are_named_where_tensors_do_not_suffice() -> None:
    # one head of keys: no tensor can be split, and 6 bytes of 12.5e9 parameters stand on each rank
    narrow = CheckpointFacts("bfloat16", 125 * 10**8, 151_936, 4096, 64, 32, 1, 128, 12_288, 40_960)
    found = plan(narrow, backend="megatron")
    assert not found.fits
    assert "trainer.tensor_parallel = 1, trainer.pipeline_parallel = 4" in found.change
    again = plan(
        narrow, backend="megatron", ranks=4, pipeline_parallel=4, activation_checkpointing="whole"
    )
    assert again.fits


def test_too_long_samples_count_as_a_micro_batch_of_their_own() -> None:
    assert plan(max_tokens_per_micro_batch=256).tokens == 4096


PROGRAM = {"command": ["true"], "max_turns": 40}


@pytest.mark.parametrize(
    ("budget", "num_passes"),
    # 40 paths of 4,096 tokens: two in a pass of 10,000; each alone where none fits
    [(10_000, 20), (4096, 40), (256, 40)],
)
def test_episode_is_planned_in_passes(budget: int, num_passes: int) -> None:
    found = plan(max_tokens_per_micro_batch=budget, sections={"environment": PROGRAM})
    assert found.tokens == max(budget, 4096)
    assert found.episode == EpisodePlan(40, 4096, num_passes, host_bytes=40 * 4096 * 29)


@pytest.mark.parametrize(
    "environment",
    [{}, {"function": "zoom", "max_turns": 40}, PROGRAM | {"trained_paths": "last"}],
    ids=["none", "function", "last path"],
)
def test_samples_of_one_path_are_no_episodes_with_passes(environment: dict[str, Any]) -> None:
    assert plan(sections={"environment": environment}).episode is None


@pytest.mark.parametrize(("sample_tokens", "num_forwards"), [(4096, 3), (40_960, 4)])
def test_passes_cost_one_forward_more(sample_tokens: int, num_forwards: int) -> None:
    found = plan(ranks=2, sample_tokens=sample_tokens, sections={"environment": PROGRAM})
    assert found.seconds is not None
    # the forward passes of two ranks, and of the one worker that scores
    assert 2 * found.seconds.training == pytest.approx(num_forwards * found.seconds.scoring)
    alone = plan(ranks=2, sample_tokens=sample_tokens).seconds
    assert alone is not None
    assert 2 * alone.training == pytest.approx(3 * alone.scoring)


def test_seconds_follow_from_speed_and_bandwidth() -> None:
    seconds = plan(activation_checkpointing="whole", ranks=4, sharding="full").seconds
    assert seconds is not None
    # 4.02e9 parameters by hand: the head 151,936 x 2560, and 36 layers of 2560 x ((2 x 32 + 2 x 8)
    # x 128 + 3 x 9728)
    active = 151_936 * 2560 + 36 * 2560 * (80 * 128 + 3 * 9728)
    forward = 64 * 2048 * (2 * active + 2 * 36 * 32 * 128 * 2048)
    assert seconds.scoring == pytest.approx(forward / (989e12 * 0.4))
    assert seconds.training == pytest.approx(4 * forward / (989e12 * 0.4) / 4)
    decode = (2 * 4_022_468_096 + 64 * 2048 * 147_456) / (3.35e12 * 0.6)
    assert seconds.rollout == pytest.approx(2048 * decode)


def test_processor_holds_all_workers() -> None:
    found = plan(device=DeviceSpec("CPU", 500 * 10**9), num_devices=1)
    assert found.fits
    assert found.seconds is None
    assert len(found.devices) == 1
    assert {worker.worker_id for worker in found.devices[0].workers} == {
        "trainer-0",
        "rollout-0",
        "actor-forward-0",
    }


@pytest.mark.parametrize(
    ("sections", "num_bytes", "is_background"),
    [
        ({}, 2 * MIDDLE.num_parameters, True),
        ({"model": {"lora": {"rank": 16}}}, 2 * MIDDLE.num_adapter_parameters(16), True),
        ({"run": {"max_staleness": 0}}, 2 * MIDDLE.num_parameters, False),
        ({"weights": {"async_publish": False}}, 2 * MIDDLE.num_parameters, False),
    ],
    ids=["whole", "adapters", "on-policy", "waiting"],
)
def test_first_rank_of_the_trainer_and_engines_hold_a_copy_of_a_version(
    sections: dict[str, Any], num_bytes: int, is_background: bool
) -> None:
    published = num_bytes if is_background else 0
    on_cpu = plan(device=DeviceSpec("CPU", 500 * 10**9), num_devices=1, sections=sections)
    copies = {
        worker.worker_id: worker.memory.parts.get("copy of a version", 0)
        for worker in on_cpu.devices[0].workers
    }
    assert copies == {"trainer-0": published, "rollout-0": num_bytes, "actor-forward-0": 0}
    assert on_cpu.version_bytes == 0, "it is counted"
    on_gpus = plan(sections=sections)
    assert on_gpus.version_bytes == published
    assert "copy of a version" not in str(on_gpus.devices)


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.ranks is 4, and the trainer has 2 device"):
        plan(num_devices=2, ranks=4)
    with pytest.raises(ConfigError, match=r"backends torch and megatron.*'mine.py:Mine'"):
        plan(backend="mine.py:Mine")


@pytest.mark.parametrize(
    ("text", "counts", "gigabytes", "speed"),
    [
        ("8xH100-80GB", (1, 8), 85.5, 989e12),
        ("2x8xH100-80GB", (2, 8), 85.5, 989e12),
        ("h20-96gb", (1, 1), 102.6, 148e12),
        ("3xMyCard-24GB", (1, 3), 24.0, 0),
    ],
)
def test_devices_are_parsed(
    text: str, counts: tuple[int, int], gigabytes: float, speed: float
) -> None:
    *found, spec = parse_devices(text)
    assert (tuple(found), spec.flops) == (counts, speed)
    assert spec.num_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.parametrize("text", ["", "8", "H100", "0xH100-80GB", "2x0xH100-80GB", "8 H100-80GB"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form 8xH100-80GB"):
        parse_devices(text)


@pytest.mark.parametrize("is_time_shared", [False, True])
def test_device_that_is_held_in_turn_needs_the_larger_turn(is_time_shared: bool) -> None:
    """By hand: the trainer's 100 bytes and 10 of a process, two engines of 30 and 10, a scorer."""
    sizes = {"trainer-0": 100, "rollout-0": 30, "rollout-1": 30, "reference-0": 5}
    workers = tuple(
        PlannedWorker(name, MemoryParts({"weights": size, "process": 10}))
        for name, size in sizes.items()
    )
    device = PlannedDevice(0, 1000, workers, is_time_shared)
    assert device.needed == (100 + 5 + 4 * 10 if is_time_shared else 165 + 4 * 10)


def test_engine_that_is_not_alone_has_a_share_of_its_devices() -> None:
    found = plan(num_devices=2, ranks=1, activation_checkpointing="whole")
    rollout = next(
        worker
        for device in found.devices
        for worker in device.workers
        if worker.worker_id == "rollout-0"
    )
    share = (rollout.memory.parts["weights"] + rollout.memory.parts["cache"]) / H100.num_bytes
    assert 0.1 < share < 0.95  # with the actor-forward worker on the same device
    assert found.compute_engine_shares() == {"rollout-0": share}
    assert plan(num_devices=3, ranks=1).compute_engine_shares() == {}


def test_engine_over_several_devices_divides_its_model_and_cache() -> None:
    parts = {}
    for size in (1, 4):
        engine = {"name": "sglang", "sglang": {"arguments": ["--tp-size", str(size)]}}
        found = plan(num_devices=8, ranks=1, sections={"engine": engine})
        parts[size] = [
            worker.memory.parts
            for device in found.devices
            for worker in device.workers
            if worker.worker_id == "rollout-0"
        ]
        assert len(parts[size]) == size
    whole = 2 * MIDDLE.num_parameters
    assert [one["weights"] for one in parts[1] + parts[4]] == [whole] + [whole // 4] * 4
    assert parts[4][0]["process"] == parts[1][0]["process"]
