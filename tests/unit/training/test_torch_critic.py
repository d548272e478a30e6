"""The torch critic against a plain, padded value model written from the formulas."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from small_settings import small_run
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from relax_events.errors import OutOfMemory, PoisonSample, RunFailed, WeightsError
from relax_events.events.parts import FinishReason
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.backend.value_model import ValueModel
from relax_events.training.backend.value_training import compute_explained_variance
from relax_events.training.batch.paths import longest_path
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, run_config, tiny_model


def with_values(samples, seed=0):
    generator = np.random.default_rng(seed)
    values = [
        np.where(sample.loss_mask, generator.normal(0, 0.1, len(sample.tokens)), 0).astype(
            np.float32
        )
        for sample in samples
    ]
    return [changed(sample, values=one) for sample, one in zip(samples, values, strict=True)]


SAMPLES = with_values(make_samples(7, seed=1))
PARTS = [[SAMPLES], [SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:]], [[sample] for sample in SAMPLES]]


def critic(dtype=torch.float64, algorithm=None, trainer=None, **section):
    trainer = {"max_grad_norm": 0.5, "weight_decay": 0.01} | (trainer or {})
    tree = run_config(trainer=trainer).model_dump()
    named = {"algorithm": algorithm} if algorithm else {}
    return TorchCritic(
        small_run(tree | named | {"critic": {"learning_rate": 1e-2} | section}), dtype=dtype
    )


def train(mine, parts, steps=1):
    for _ in range(steps):
        for part in parts:
            mine.accumulate(part)
        metrics = mine.step()
    return metrics


def snapshot(mine):
    state = mine.state()
    return TrainerState(
        policy_version=state.policy_version,
        tensors={name: tensor.clone() for name, tensor in state.tensors.items()},
    )


class PaddedCritic:
    """One padded batch, one scalar head, the loss as the paper has it."""

    def __init__(self, value_clip, aggregation="token_mean"):
        self.aggregation = aggregation
        self.model = (
            AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64)
            .eval()
            .base_model
        )
        self.head = torch.nn.Linear(32, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        named = [
            *self.model.named_parameters(),
            ("weight", self.head.weight),
            ("bias", self.head.bias),
        ]
        decayed = [value for name, value in named if value.ndim >= 2 and name != "weight"]
        others = [value for name, value in named if value.ndim < 2 or name == "weight"]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        self.parameters, self.value_clip = [value for _, value in named], value_clip

    def values(self, sample):
        hidden = self.model(
            input_ids=torch.from_numpy(np.array(sample.tokens)).long()[None]
        ).last_hidden_state[0]
        return self.head(hidden)[:-1, 0][torch.from_numpy(np.array(sample.loss_mask[1:])).bool()]

    def step(self, samples):
        masks = [np.array(sample.loss_mask, bool) for sample in samples]
        old, advantages = (
            torch.from_numpy(
                np.concatenate([getattr(s, field)[m] for s, m in zip(samples, masks, strict=True)])
            ).double()
            for field in ("values", "advantages")
        )
        returns, values = old + advantages, torch.cat([self.values(sample) for sample in samples])
        clipped = old + torch.clamp(values - old, -self.value_clip, self.value_clip)
        squares = (values - returns) ** 2
        losses = 0.5 * (
            torch.maximum(squares, (clipped - returns) ** 2) if self.value_clip else squares
        )
        rows = losses.split([int(mask.sum()) for mask in masks])
        loss = {
            "token_mean": losses.mean(),
            "sample_mean": torch.stack([row.mean() for row in rows if len(row)]).mean(),
            "constant_length": torch.stack([row.sum() / 5 for row in rows if len(row)]).mean(),
        }[self.aggregation]
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()
        return {
            "value_loss": loss.item(),
            "value_grad_norm": norm.item(),
            "explained_variance": 1 - (returns - old).var().item() / returns.var().item(),
            "value_mean": old.mean().item(),
            "return_mean": returns.mean().item(),
        }


def test_passes_within_the_budget_take_the_step_of_one(monkeypatch):
    cells, run = [], ValueModel.token_values

    def record(model, batch):
        cells.append(len(batch.cells))
        return run(model, batch)

    monkeypatch.setattr(ValueModel, "token_values", record)
    results = []
    for max_tokens in (10_000, 24):
        mine = critic(
            algorithm={"name": "ppo", "aggregation": "sample_mean"},
            trainer={"max_tokens_per_micro_batch": max_tokens},
        )
        results.append((train(mine, [SAMPLES], steps=2), snapshot(mine)))
    assert max(cells[2:]) <= 24 < cells[0]
    (whole, state), (cut, other) = results
    assert asdict(cut) == pytest.approx(asdict(whole), rel=1e-6)
    for name, tensor in other.tensors.items():
        torch.testing.assert_close(tensor, state.tensors[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("value_clip", "aggregation"),
    [
        (0.0, "token_mean"),
        (0.05, "token_mean"),
        (0.0, "sample_mean"),
        (0.05, "sample_mean"),
        (0.05, "constant_length"),
    ],
)
def test_steps_equal_a_padded_implementation(value_clip, aggregation):
    algorithm = {"name": "ppo", "aggregation": aggregation, "length_normaliser": 5}
    mine = critic(value_clip=value_clip, algorithm=algorithm)
    other = PaddedCritic(value_clip, aggregation)
    for _ in range(4):
        metrics, expected = train(mine, PARTS[1]), other.step(SAMPLES)
        assert {name: getattr(metrics, name) for name in expected} == pytest.approx(
            expected, rel=1e-5, abs=1e-9
        )
        assert metrics.value_learning_rate == 1e-2
    assert mine.policy_version == 4
    for sample, values in zip(SAMPLES, mine.score(SAMPLES), strict=True):
        mask = np.array(sample.loss_mask, bool)
        np.testing.assert_allclose(values[mask], other.values(sample).detach().numpy(), atol=1e-4)
        assert not values[~mask].any()


def test_values_that_do_not_fit_together_are_computed_in_halves(monkeypatch):
    cells, run, max_cells = [], ValueModel.token_values, [10_000]

    def run_on_device(model, batch):
        cells.append(batch.input_ids.size)
        if cells[-1] > max_cells[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(model, batch)

    monkeypatch.setattr(ValueModel, "token_values", run_on_device)
    mine = critic(trainer={"max_tokens_per_micro_batch": 10_000})
    train(mine, PARTS[1])
    cells.clear()
    expected = mine.score(SAMPLES)
    max_cells[0] = longest = max(-(-length // 8) * 8 for length in map(longest_path, SAMPLES))
    assert max(cells) > longest
    for values, whole in zip(mine.score(SAMPLES), expected, strict=True):
        np.testing.assert_allclose(values, whole, rtol=0, atol=1e-5)
    fresh = critic()
    max_cells[0] = longest - 8
    with pytest.raises(OutOfMemory, match="a path of sample") as error:
        fresh.score(SAMPLES)
    (named,) = [one for one in SAMPLES if one.sample_id == error.value.sample_id]
    assert longest_path(named) > longest - 8
    assert error.value.num_cells == longest_path(named), "without padding: longer paths don't fit"


def test_values_are_zero_before_the_first_step():
    assert not any(values.any() for values in critic().score(SAMPLES))


def test_critic_does_not_train_on_masked_truncated_samples():
    samples = with_values(make_samples(6))
    cut_off = [changed(sample, finish_reason=FinishReason.LENGTH) for sample in samples[:2]]
    masking, plain = (
        critic(algorithm={"name": "ppo", "truncated_samples": "mask"}),
        critic(algorithm={"name": "ppo"}),
    )
    metrics, expected = train(masking, [[*cut_off, *samples[2:]]]), train(plain, [samples[2:]])
    assert (metrics.value_loss, metrics.value_grad_norm) == pytest.approx(
        (expected.value_loss, expected.value_grad_norm), rel=1e-9
    )
    assert train(critic(algorithm={"name": "ppo"}), [samples]).value_loss != pytest.approx(
        expected.value_loss, rel=1e-3
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "constant_length"])
def test_critic_step_does_not_depend_on_micro_batch_boundaries(aggregation):
    trained = [critic(algorithm={"name": "ppo", "aggregation": aggregation}) for _ in PARTS]
    metrics = [train(mine, parts, steps=2) for mine, parts in zip(trained, PARTS, strict=True)]
    for mine, other in zip(trained[1:], metrics[1:], strict=True):
        assert other.value_loss == pytest.approx(metrics[0].value_loss, rel=1e-11)
        assert other.value_grad_norm == pytest.approx(metrics[0].value_grad_norm, rel=1e-9)
        for name, tensor in mine.state().tensors.items():
            torch.testing.assert_close(tensor, trained[0].state().tensors[name], rtol=0, atol=1e-9)


def test_restored_critic_continues_training_bit_for_bit():
    whole, first = critic(None), critic(None)
    train(whole, PARTS[1], steps=4)
    train(first, PARTS[1], steps=2)
    second = critic(None)
    second.load_state(snapshot(first))
    assert second.policy_version == 2
    train(second, PARTS[1], steps=2)
    for name, tensor in second.state().tensors.items():
        assert torch.equal(tensor, whole.state().tensors[name])


def test_batch_composition_changes_values_only_by_rounding():
    mine = critic(None)
    train(mine, PARTS[0], steps=3)
    together = mine.score(SAMPLES)
    for index, sample in enumerate(SAMPLES):
        np.testing.assert_allclose(mine.score([sample])[0], together[index], rtol=0, atol=1e-5)


def test_sample_without_values_leaves_the_rest_of_the_step_unharmed():
    mine, clean = critic(), critic()
    for one in (mine, clean):
        one.accumulate(SAMPLES[:4])
    with pytest.raises(PoisonSample, match="sample s5 has no values, and the algorithm needs them"):
        mine.accumulate([SAMPLES[4], changed(SAMPLES[5], values=None)])
    assert mine.step() == clean.step()


def test_failed_critic_step_keeps_the_weights():
    mine = critic()
    before = snapshot(mine)
    with pytest.raises(RunFailed, match="train step 0 holds no loss token"):
        mine.step()
    mine._parameters.gradients.fill_(float("nan"))
    mine.accumulate(SAMPLES)
    with pytest.raises(
        RunFailed,
        match=r"train step 0: the critic's loss and gradient must be finite.*lower critic\.learning_rate",
    ):
        mine.step()
    assert all(
        torch.equal(tensor, before.tensors[name]) for name, tensor in mine.state().tensors.items()
    )
    assert train(mine, PARTS[0]) == train(critic(), PARTS[0])


def test_skipped_step_keeps_the_weights_and_increments_the_version():
    mine = critic()
    before = snapshot(mine)
    mine.accumulate(SAMPLES)
    mine.skip_step()
    assert mine.policy_version == 1
    assert all(
        torch.equal(tensor, before.tensors[name]) for name, tensor in mine.state().tensors.items()
    )
    assert not mine._parameters.gradients.any()


def test_state_of_another_model_is_refused():
    state = critic().state()
    tensors = {name: tensor for name, tensor in state.tensors.items() if name != "model.bias"}
    with pytest.raises(WeightsError, match=r"model\.bias is only in the model"):
        critic().load_state(TrainerState(policy_version=1, tensors=tensors))


def test_critic_is_initialized_from_its_configured_model(tmp_path: Path):
    from relax_events.packages.examples.tiny_models import make_tiny

    other = critic(model_path=make_tiny(tmp_path, corpus=["12=21"], hidden_size=64, seed=5))
    assert other._model.module.weight.shape == (64,)
    assert critic()._model.module.weight.shape == (32,)


def test_critic_learns_returns_that_depend_on_previous_tokens():
    # What comes is 1 behind an even token and 0 behind an odd one.
    mine = critic(torch.float32, value_clip=0.0)
    samples = make_samples(32, seed=7)
    returns = [
        np.where(sample.loss_mask, np.roll(np.asarray(sample.tokens) % 2 == 0, 1), 0).astype(
            np.float32
        )
        for sample in samples
    ]
    for _ in range(60):
        known = mine.score(samples)
        mine.accumulate(
            [
                changed(sample, values=old, advantages=wanted - old)
                for sample, old, wanted in zip(samples, known, returns, strict=True)
            ]
        )
        metrics = mine.step()
    assert metrics.explained_variance > 0.9
    assert metrics.value_loss < 0.02


def test_explained_variance_matches_known_values():
    returns = np.array([1.0, 2.0, 3.0, 4.0])
    assert compute_explained_variance(returns + 5, returns=returns) == pytest.approx(1.0)
    assert compute_explained_variance(np.zeros(4), returns=returns) == pytest.approx(0.0)
    assert compute_explained_variance(-returns, returns=returns) == pytest.approx(-3.0)
    assert compute_explained_variance(returns, returns=np.ones(4)) == 0.0
