"""A critic that learns from a log: restarts give bit-identical weights, and unread steps are not
purged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from event_samples import changed, ready
from written_run import CODEC, WrittenRun

from relax_events.config import AlgorithmConfig, RunConfig
from relax_events.errors import ConfigError, OutOfMemory, RunFailed, StepNotFinite
from relax_events.events.parts import TopicOffset, VersionSegment
from relax_events.events.types import SampleReady, TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.objects import ObjectStore
from relax_events.ops.run_purger import Purger, RetentionState
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.worker import Worker
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.backend.value_model import ValueModel
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.critic_learning import CriticLearner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("model"), corpus=["12=21"], hidden_size=32, num_layers=1
    )


@pytest.fixture
def run(apply_run: Callable[..., RunConfig], model: Path) -> Iterator[WrittenRun]:
    config = apply_run(
        run={"max_staleness": 1, "num_steps": 20},
        broker={"partitions_per_version": 1},
        model={"path": str(model), "device": "cpu"},
        algorithm={"name": "ppo"},
        trainer={"checkpoint_every": 2, "keep_checkpoints": 2, "max_tokens_per_micro_batch": 8},
    )
    written = WrittenRun(config)
    written.publish(0)
    yield written
    written.close()


def train_steps(run: WrittenRun, first: int, last: int, **changes: Any) -> list[TrainStepCommitted]:
    """Write steps of one prompt group each, with values that differ from sample to sample."""
    steps = []
    for step in range(first, last):
        group_id, generator = f"{step:06d}-0000-0", np.random.default_rng(step)
        locations = []
        for index in range(4):
            numbers = {
                name: np.array([0, 0, *generator.normal(size=2)], np.float32)
                for name in ("advantages", "values")
            }
            run.write_sample(
                "advantage.samples",
                changed(ready(group_id, index, version=step, of=4), **numbers | changes),
            )
            topic_partition = (
                run.plan.topic("advantage.samples"),
                run.plan.partition(group_id, step),
            )
            locations.append((topic_partition[1], run.end_offset(topic_partition) - 1))
        partitions, offsets = (np.array(column) for column in zip(*locations, strict=True))
        steps.append(run.commit(
            step,
            prompt_group_ids=[group_id],
            sample_ids=[f"{group_id}/{index}" for index in range(4)],
            partitions=partitions.astype(np.int32),
            offsets=offsets.astype(np.int64),
            ranks=np.zeros(4, np.int32),
            micro_batches=np.zeros(4, np.int32),
            consumed=[TopicOffset(run.plan.topic("advantage.samples"), locations[-1][0], locations[-1][1] + 1)],
            weights_digest=bytes([step]) * 32,
        ))  # fmt: skip
    return steps


def test_critic_skips_non_finite_updates_and_ends_after_several_in_a_row(
    run: WrittenRun, tmp_path: Path
) -> None:
    far = np.array([0, 0, 3e38, 3e38], np.float32)
    train_steps(run, 0, 1)
    with learning(run, tmp_path) as (critic, _, _):
        first = {name: tensor.clone() for name, tensor in critic.state().tensors.items()}
    train_steps(run, 1, 3, advantages=far)
    with learning(run, tmp_path) as (critic, _, _):
        assert critic.policy_version == 3
        assert all(
            torch.equal(tensor, first[name]) for name, tensor in critic.state().tensors.items()
        )
    train_steps(run, 3, 4, advantages=far)
    with (
        pytest.raises(
            StepNotFinite, match="train step 3: the critic's loss and gradient must be finite"
        ),
        learning(run, tmp_path),
    ):
        pass


@contextmanager
def learning(run: WrittenRun, folder: Path) -> Iterator[tuple[TorchCritic, CriticLearner, Worker]]:
    """Start a critic with its checkpoints in a folder."""
    store = ObjectStore.open(folder.as_uri())
    with Worker(
        "critic", run.config, claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6)
    ) as worker:
        worker.control.follow()
        critic = TorchCritic(run.config)
        with CriticLearner(worker, critic, store) as learner:
            yield critic, learner, worker


def tensors(critic: TorchCritic) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in critic.state().tensors.items()}


def test_restarted_critic_is_bitwise_equal_to_an_uninterrupted_one(
    run: WrittenRun, tmp_path: Path
) -> None:
    train_steps(run, 0, 3)
    with learning(run, tmp_path / "killed") as (critic, learner, _):
        assert critic.policy_version == 3
        before = tensors(critic)
        assert learner.learn_up_to(2) == 3
        learner.step_if_ready()
    train_steps(run, 3, 5)
    with learning(run, tmp_path / "killed") as (critic, learner, worker):
        assert critic.policy_version == 5
        train_steps(run, 5, 6)
        assert learner.learn_up_to(6) == 6
        resumed = tensors(critic)
        assert "relax_critic_explained_variance_ratio" in worker.metrics.render().decode()
    with learning(run, tmp_path / "whole") as (critic, _, _):
        whole = tensors(critic)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert not all(torch.equal(before[name], tensor) for name, tensor in whole.items())


def test_critic_learns_returns_of_its_own_lambda(
    run: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lambda and gamma 1 each loss token's return is the reward, whatever advantages the
    policy was given."""
    train_steps(run, 0, 1, reward=3.0)
    taken: list[SampleReady] = []
    accumulate = TorchCritic.accumulate

    def noted(self: TorchCritic, samples: Sequence[SampleReady]) -> None:
        taken.extend(samples)
        accumulate(self, samples)

    monkeypatch.setattr(TorchCritic, "accumulate", noted)
    run.config = run.config.model_copy(
        update={"algorithm": AlgorithmConfig(name="ppo", critic_gae_lambda=1.0)}
    )
    with learning(run, tmp_path) as (critic, _, _):
        assert (critic.policy_version, len(taken)) == (1, 4)
    for sample in taken:
        returns = (np.asarray(sample.advantages) + np.asarray(sample.values))[
            np.asarray(sample.loss_mask, bool)
        ]
        assert returns.tolist() == pytest.approx([3.0, 3.0], rel=1e-6)


def test_purge_keeps_records_that_the_critic_has_not_read(run: WrittenRun, tmp_path: Path) -> None:
    store, retention = ObjectStore.open(tmp_path.as_uri()), RetentionState()
    for step in train_steps(run, 0, 5):
        retention.apply(step)
    purger = Purger(run.config, run.connection, store, CODEC)
    assert {
        name: set(bounds.values()) for name, bounds in purger._critic_bounds(retention).items()
    } == {"critic's steps": {0}}
    with learning(run, tmp_path) as (_, learner, _):
        if learner.critic._pending is not None:
            learner.critic._pending.wait(10.0)  # the checkpoint of version 4
    # Its newest checkpoint is that of version 4, so the four records of each of the steps 0 to 3
    # are read: those of step 4 stay.
    topic = run.plan.topic("advantage.samples")
    read = {(topic, run.plan.partition(f"{step:06d}-0000-0", step)): 0 for step in range(3)}
    for step in range(4):
        read[topic, run.plan.partition(f"{step:06d}-0000-0", step)] += 4
    assert purger._critic_bounds(retention) == {"critic's steps": read}
    purger.close()


def test_critic_error_for_purged_records_names_the_remedy(
    run: WrittenRun, tmp_path: Path, admin: Admin
) -> None:
    train_steps(run, 0, 2)
    topic = run.plan.topic("advantage.samples")
    admin.delete_records([TopicOffset(topic, run.plan.partition("000000-0000-0", 0), 3)])
    with (
        pytest.raises(
            ConfigError,
            match=r"can't be trained again: .*was purged.*the critic has to learn from them",
        ),
        learning(run, tmp_path),
    ):
        pass


def test_critic_rejects_a_train_step_whose_samples_have_no_values(
    run: WrittenRun, tmp_path: Path
) -> None:
    train_steps(run, 0, 1, values=None)
    with (
        pytest.raises(
            RunFailed,
            match=r"the critic can't learn from train step 0: sample 000000-0000-0/0 has no values",
        ),
        learning(run, tmp_path),
    ):
        pass


class Device:
    """Has memory for passes of so many cells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.max_cells, self.cells = 10_000, list[int]()
        run = ValueModel.token_values

        def run_on_device(model: ValueModel, batch: PackedBatch) -> torch.Tensor:
            self.cells.append(batch.num_tokens)
            if batch.num_tokens > self.max_cells:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(model, batch)

        monkeypatch.setattr(ValueModel, "token_values", run_on_device)


def read_logs(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines that were logged."""
    return [orjson.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]


def long_step(run: WrittenRun, step: int) -> None:
    """Write a step in which the third sample has a path of seven tokens."""
    group_id, locations = f"{step:06d}-0000-0", []
    names = [group_id, group_id, f"{step:06d}-0001-0", f"{step:06d}-0001-0"]
    for number, name in enumerate(names):
        sample = changed(
            ready(name, number % 2, version=step, of=2),
            values=np.array([0, 0, 0.5, number], np.float32),
        )
        if number == 2:
            sample = changed(
                sample,
                **{
                    field: np.concatenate(
                        [getattr(sample, field), getattr(sample, field)[-1:].repeat(3)]
                    )
                    for field in ("tokens", "loss_mask", "rollout_logprobs", "advantages", "values")
                },
                version_segments=[VersionSegment(step, 5)],
            )
        run.write_sample("advantage.samples", sample)
        topic_partition = (run.plan.topic("advantage.samples"), run.plan.partition(name, step))
        locations.append((topic_partition[1], run.end_offset(topic_partition) - 1))
    partitions, offsets = (np.array(column) for column in zip(*locations, strict=True))
    run.commit(
        step,
        prompt_group_ids=sorted(set(names)),
        sample_ids=[f"{name}/{number % 2}" for number, name in enumerate(names)],
        partitions=partitions.astype(np.int32),
        offsets=offsets.astype(np.int64),
        ranks=np.zeros(4, np.int32),
        micro_batches=np.zeros(4, np.int32),
        weights_digest=bytes([step]) * 32,
    )


def test_a_step_that_does_not_fit_is_learned_in_smaller_passes(
    run: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, learned = Device(monkeypatch), []
    train_steps(run, 0, 2)
    for max_cells in (10_000, 7):
        device.max_cells = max_cells
        with learning(run, tmp_path / f"{max_cells}") as (critic, _, _):
            assert critic.policy_version == 2
            learned.append(tensors(critic))
    assert device.cells.count(8) == 4 + 2, "each step begins with the budget of the run file"
    assert device.cells.count(4) == 2 * (4 + 4)
    for name, tensor in learned[0].items():
        torch.testing.assert_close(learned[1][name], tensor, rtol=0, atol=1e-6)


def test_a_prompt_group_with_a_path_that_fits_nowhere_is_left_out_by_name(
    run: WrittenRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    device = Device(monkeypatch)
    device.max_cells = 6
    long_step(run, 0)
    with learning(run, tmp_path) as (critic, _, _):
        assert critic.policy_version == 1
        state = tensors(critic)
    logs = read_logs(capfd)
    (left_out,) = [line for line in logs if line["event"] == "critic_step.group_left_out"]
    assert left_out["prompt_group_id"] == "000000-0001-0"
    assert "out of memory: a path of sample 000000-0001-0/0, 7 tokens," in left_out["error"]
    (line,) = [line for line in logs if line["event"] == "critic_step.learned"]
    assert line["critic_prompt_groups_too_large"] == 1
    assert any(tensor.abs().max() > 0 for name, tensor in state.items() if "exp_avg." in name)


@pytest.mark.parametrize("max_cells", [7, 6])
def test_a_step_that_ran_out_of_memory_in_its_optimizer_step_is_learned_by_the_next_process(
    run: WrittenRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    max_cells: int,
) -> None:
    device = Device(monkeypatch)
    trainer = run.config.trainer.model_copy(update={"num_mini_batches": 2})
    run.config = run.config.model_copy(update={"trainer": trainer})
    train_steps(run, 0, 1)
    with learning(run, tmp_path) as (critic, _, _):
        assert critic.policy_version == 1
    long_step(run, 1)
    device.max_cells = max_cells
    num_deaths = 0
    for _ in range(4):
        device.cells.clear()
        try:
            with learning(run, tmp_path) as (critic, _, _):
                assert critic.policy_version == 2
                break
        except OutOfMemory:
            num_deaths += 1
    assert num_deaths == {7: 2, 6: 3}[max_cells], "step 0 is learned again, too"
    left_out = [one for one in read_logs(capfd) if one["event"] == "critic_step.group_left_out"]
    assert [line["prompt_group_id"] for line in left_out] == ["000001-0001-0"] * (max_cells == 6)
    assert max(device.cells) <= max_cells
