"""The torch backend against a plain, padded GRPO step written from the formulas."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from relax_events.errors import ConfigError, PoisonSample, RunFailed, StepNotFinite, WeightsError
from relax_events.events.parts import FinishReason
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.unit.trainer_samples import (
    make_samples,
    plain_logprobs,
    plain_model,
    run_config,
    tiny_model,
    token_sets,
)

ALGORITHM = {"kl_coefficient": 0.1, "old_logprobs": "actor", "clip_low": 0.1, "clip_high": 0.2}
TRAINER = {"weight_decay": 0.1, "warmup_steps": 3, "max_grad_norm": 0.5}
SAMPLES = [
    changed(sample, temperature=0.7 + 0.05 * (index % 4))
    for index, sample in enumerate(make_samples(10, seed=2))
]


def backend(dtype=torch.float64, algorithm=None, trainer=None, model_dtype="float32"):
    config = run_config(
        algorithm=ALGORITHM if algorithm is None else algorithm,
        trainer=TRAINER if trainer is None else trainer,
        dtype=model_dtype,
    )
    return TorchBackend(config, ranks=SingleRank(), dtype=dtype)


def snapshot(state):
    return TrainerState(
        policy_version=state.policy_version,
        tensors={name: tensor.clone() for name, tensor in state.tensors.items()},
    )


class PaddedGrpo:
    """GRPO as a textbook writes it: right-padded rows, an attention mask, whole logits, torch's own
    AdamW and clipping."""

    def __init__(self, *, aggregation, estimator):
        self.model = type(plain_model(tiny_model()))(plain_model(tiny_model()).config).double()
        self.model.load_state_dict(plain_model(tiny_model()).state_dict())
        self.model.eval()
        decayed = [value for value in self.model.parameters() if value.ndim >= 2]
        others = [value for value in self.model.parameters() if value.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        self.aggregation, self.estimator, self.num_steps = aggregation, estimator, 0

    def padded(self, samples, field):
        rows = [torch.from_numpy(np.array(getattr(sample, field))).double() for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def step(self, samples):
        tokens, mask = (
            self.padded(samples, "tokens").long(),
            self.padded(samples, "loss_mask")[:, 1:],
        )
        old, ref, advantages = (
            self.padded(samples, field)[:, 1:]
            for field in ("actor_logprobs", "ref_logprobs", "advantages")
        )
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        attention = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        logits = self.model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
        logits = (
            logits
            / torch.tensor(
                [np.float32(sample.temperature) for sample in samples], dtype=torch.float64
            )[:, None, None]
        )
        logprobs = torch.log(torch.softmax(logits, -1)).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs - old)
        policy = -torch.min(ratio * advantages, torch.clip(ratio, 0.9, 1.2) * advantages)
        d = logprobs - ref
        kl = {"k1": d, "k2": 0.5 * d**2, "k3": torch.exp(-d) - 1 + d}[self.estimator]
        loss = self.mean(policy + 0.1 * kl, mask)
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 0.5)
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, self.num_steps / 3)
        self.optimizer.step()
        clipped = ((ratio < 0.9) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0))
        x = logprobs - self.padded(samples, "rollout_logprobs")[:, 1:]
        token_mean = {
            "mean_ratio": ratio,
            "clip_fraction": clipped,
            "mismatch_kl": torch.exp(x) - 1 - x,
            "entropy": self.entropy(logits),
        }
        metrics = {
            name: float((values.detach() * mask).sum() / mask.sum())
            for name, values in token_mean.items()
        }
        metrics |= {
            "loss": loss.item(),
            "kl_estimate": self.mean(kl, mask).item(),
            "policy_loss": self.mean(policy, mask).item(),
        }
        return metrics | {
            "grad_norm": norm.item(),
            "mismatch_max_abs": (x * mask).abs().max().item(),
            "num_loss_tokens": int(mask.sum()),
        }

    def entropy(self, logits):
        return torch.distributions.Categorical(logits=logits).entropy()

    def mean(self, values, mask):
        if self.aggregation == "token_mean":
            return (values * mask).sum() / mask.sum()
        return ((values * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_steps_equal_a_padded_implementation(aggregation, estimator):
    mine = backend(algorithm=ALGORITHM | {"aggregation": aggregation, "kl_estimator": estimator})
    other = PaddedGrpo(aggregation=aggregation, estimator=estimator)
    for version in range(4):
        for part in (SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:]):
            mine.accumulate(part)
        metrics, expected = mine.step().to_metrics(), other.step(SAMPLES)
        assert {name: metrics[name] for name in expected} == pytest.approx(
            expected, rel=1e-5, abs=1e-7
        )
        assert metrics["learning_rate"] == pytest.approx(1e-2 * min(1, (version + 1) / 3))
    for name, value in collect_weights(mine).items():
        # A fraction 1e-3 of the sum of learning rates: RMSNorm works in float32 in any model, and
        # AdamW blows up gradients that are nearly zero.
        torch.testing.assert_close(
            value, other.model.get_parameter(name).detach(), rtol=0, atol=3e-5
        )
    assert mine.policy_version == 4


def test_whole_step_algorithm_matches_explicit_whitening_and_masking():
    # The same by other means: whiten with numpy over all samples, and leave the farthest tokens out
    # by a loss mask that the mean still counts.
    mine = backend(
        algorithm={
            "name": "reinforce_plus_plus_baseline",
            "m2_threshold": 0.1,
            "aggregation": "constant_length",
        }
    )
    for part in (SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:]):
        mine.accumulate(part)
    metrics = mine.step().to_metrics()
    masks = [np.array(sample.loss_mask, bool) for sample in SAMPLES]
    tokens = np.concatenate(
        [sample.advantages[mask] for sample, mask in zip(SAMPLES, masks, strict=True)]
    ).astype(np.float64)
    plain = [
        plain_logprobs(sample.tokens, float(np.float32(sample.temperature))) for sample in SAMPLES
    ]
    squares = [
        np.where(mask, (lp - sample.rollout_logprobs) ** 2, 0)
        for sample, mask, lp in zip(SAMPLES, masks, plain, strict=True)
    ]
    ordered = np.sort(
        np.concatenate([square[mask] for square, mask in zip(squares, masks, strict=True)])
    )
    bound = ordered[np.cumsum(ordered) / np.arange(1, len(ordered) + 1) <= 0.1][-1] + 1e-6
    white = [(sample.advantages - tokens.mean()) / tokens.std() for sample in SAMPLES]
    changes = [
        {
            "advantages": np.where(mask, values, 0).astype(np.float32),
            "loss_mask": (mask & (square <= bound)).astype(np.uint8),
        }
        for mask, values, square in zip(masks, white, squares, strict=True)
    ]
    other = backend(algorithm={"aggregation": "constant_length"})
    assert all(change["loss_mask"].any() for change in changes)
    other.accumulate(
        [changed(sample, **change) for sample, change in zip(SAMPLES, changes, strict=True)]
    )
    expected = other.step()
    assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert metrics["masked_fraction"] == pytest.approx(1 - expected.num_loss_tokens / len(ordered))
    assert 0 < metrics["masked_fraction"] < 0.5


@pytest.mark.parametrize("given", [{}, {"std_correction": 1}, {"std_correction": 0}])
def test_advantages_are_divided_by_the_reward_deviation_of_the_whole_step(given):
    rewards = [float(index % 3) for index in range(len(SAMPLES))]
    rewarded = [
        changed(sample, reward=reward) for sample, reward in zip(SAMPLES, rewards, strict=True)
    ]
    empty = changed(
        rewarded[0], loss_mask=np.zeros_like(rewarded[0].loss_mask), reward=1e6
    )  # has no part in the deviation
    mine = backend(algorithm={"name": "dr_grpo", "whiten_advantages": "rewards"} | given)
    deviation = np.std(rewards, ddof=given.get("std_correction", 1))
    for part in (rewarded[:3], [empty], rewarded[3:]):
        mine.accumulate(part)
    other = backend(algorithm={"name": "dr_grpo"})
    other.accumulate(
        [
            changed(sample, advantages=(sample.advantages / deviation).astype(np.float32))
            for sample in SAMPLES
        ]
    )
    metrics, expected = mine.step(), other.step()
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.parametrize("over", ["tokens", "samples", "mean"])
@pytest.mark.parametrize("given", [{}, {"std_correction": 0}, {"std_correction": 1}])
def test_advantages_are_whitened_over_the_whole_step_with_either_std_correction(over, given):
    mine, other = backend(algorithm={"whiten_advantages": over} | given), backend(algorithm={})
    for part in (SAMPLES[:3], SAMPLES[3:]):
        mine.accumulate(part)
    masks = [np.array(sample.loss_mask, bool) for sample in SAMPLES]
    each = [
        sample.advantages[mask].astype(np.float64)
        for sample, mask in zip(SAMPLES, masks, strict=True)
    ]
    units = (
        np.concatenate(each)
        if over == "tokens"
        else np.array([values.mean() for values in each if len(values)])
    )
    deviation = 1.0 if over == "mean" else units.std(ddof=given.get("std_correction", 0))
    white = [
        np.where(mask, (sample.advantages - units.mean()) / deviation, 0)
        for sample, mask in zip(SAMPLES, masks, strict=True)
    ]
    other.accumulate(
        [
            changed(sample, advantages=values.astype(np.float32))
            for sample, values in zip(SAMPLES, white, strict=True)
        ]
    )
    metrics, expected = mine.step(), other.step()
    assert (metrics.loss, metrics.grad_norm) == pytest.approx(
        (expected.loss, expected.grad_norm), rel=1e-5
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("truncated", ["mask", "drop"])
@pytest.mark.parametrize("distilled", [{}, {"distill_tokens": "teacher_topk"}])
def test_truncated_samples_are_excluded_from_the_step(truncated, aggregation, distilled):
    if distilled:
        distilled = distilled | {"distill_coefficient": 0.1, "distill_top_k": 4}
    settings = {"aggregation": aggregation} | distilled
    cut_off = [changed(sample, finish_reason=FinishReason.LENGTH) for sample in SAMPLES[:4]]
    mine = backend(algorithm={"truncated_samples": truncated} | settings)
    other, trained = (backend(algorithm=settings) for _ in range(2))
    mine.accumulate([*cut_off, *SAMPLES[4:]])
    other.accumulate(SAMPLES[4:])
    trained.accumulate([*cut_off, *SAMPLES[4:]])
    metrics, expected = mine.step(), other.step()
    assert (metrics.loss, metrics.grad_norm) == pytest.approx(
        (expected.loss, expected.grad_norm), rel=1e-9
    )
    assert trained.step().grad_norm != pytest.approx(expected.grad_norm, rel=1e-3)


def test_failed_step_discards_its_accumulated_samples():
    algorithm = {"name": "reinforce_plus_plus_baseline"}
    mine, clean = backend(algorithm=algorithm), backend(algorithm=algorithm)
    mine.accumulate(SAMPLES[:2])
    mine._parameters.gradients.fill_(math.nan)
    with pytest.raises(RunFailed):
        mine.step()
    mine.accumulate(SAMPLES[:3])
    mine.load_state(snapshot(mine.state()))
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES)
    assert mine.step() == clean.step()


def test_metrics_measure_the_mismatch_with_the_rollout_policy():
    mine = backend(algorithm={"old_logprobs": "actor", "correction": "tis", "correction_high": 1.1})
    mine.accumulate(SAMPLES)
    metrics = mine.step()
    masks = [np.array(sample.loss_mask, bool) for sample in SAMPLES]
    plain = [
        plain_logprobs(sample.tokens, float(np.float32(sample.temperature))) for sample in SAMPLES
    ]
    rollout, actor = (
        np.concatenate([getattr(s, f)[m] for s, m in zip(SAMPLES, masks, strict=True)])
        for f in ("rollout_logprobs", "actor_logprobs")
    )
    x = np.concatenate([lp[mask] for lp, mask in zip(plain, masks, strict=True)]) - rollout
    w = np.exp(x)
    assert metrics.mismatch_mean_abs == pytest.approx(np.abs(x).mean(), rel=1e-5)
    assert metrics.effective_sample_ratio == pytest.approx(
        w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-5
    )
    assert 0.5 < metrics.effective_sample_ratio < 1
    correction = np.exp(actor.astype(np.float64) - rollout)
    assert metrics.correction_mean == pytest.approx(np.minimum(correction, 1.1).mean(), rel=1e-6)
    assert metrics.correction_clip_fraction == pytest.approx((correction > 1.1).mean())
    assert metrics.masked_fraction == 0


def test_metrics_count_rejected_samples_by_reason():
    masks = [np.array(sample.loss_mask, bool) for sample in SAMPLES]
    logs = [
        (sample.actor_logprobs - sample.rollout_logprobs)[mask].astype(np.float64)
        for sample, mask in zip(SAMPLES, masks, strict=True)
    ]
    largest, means = (
        [x.max(initial=-np.inf) for x in logs],
        [(x * x / 2).mean() if len(x) else 0.0 for x in logs],
    )
    bound = sorted(largest)[-3]  # two samples have a token above it
    kept = [mean for mean, x in zip(means, largest, strict=True) if x <= bound]
    threshold = sorted(kept)[len(kept) // 2]
    veto = {
        "veto_high": float(np.exp(bound + 1e-6)),
        "rejection": "k2",
        "rejection_high": float(threshold * (1 + 1e-4)),
    }
    mine = backend(algorithm={"old_logprobs": "actor", "correction": "tis"} | veto)
    for part in (SAMPLES[:3], SAMPLES[3:]):
        mine.accumulate(part)
    metrics = mine.step()
    by_divergence = sum(mean > threshold * (1 + 1e-4) for mean in kept)
    assert (metrics.num_rejected_by_veto, metrics.num_rejected_by_divergence) == (2, by_divergence)
    assert by_divergence > 0
    assert metrics.num_samples == len(SAMPLES)
    out = sum(
        len(x)
        for x, mean, top in zip(logs, means, largest, strict=True)
        if top > bound or mean > threshold * (1 + 1e-4)
    )
    assert metrics.masked_fraction == pytest.approx(out / metrics.num_loss_tokens)


@pytest.mark.parametrize("max_logits", [2**26, 1])
def test_entropy_bonus_has_the_gradient_of_the_entropy(max_logits, monkeypatch):
    monkeypatch.setattr(
        "relax_events.training.backend.chunked_head.MAX_LOGITS_ELEMENTS", max_logits
    )
    mine = backend(algorithm={"entropy_coefficient": 0.5}, trainer={"max_grad_norm": 1e9})
    model = PaddedGrpo(aggregation="token_mean", estimator="k1")
    flat = [changed(sample, advantages=np.zeros_like(sample.advantages)) for sample in SAMPLES]
    mine.accumulate(flat)
    metrics = mine.step()
    total, num_tokens = 0, 0
    for sample in SAMPLES:
        ids = torch.from_numpy(np.array(sample.tokens)).long()[None]
        logits = model.model(input_ids=ids).logits[0, :-1] / float(np.float32(sample.temperature))
        mask = torch.from_numpy(np.array(sample.loss_mask[1:])).bool()
        total, num_tokens = total + model.entropy(logits)[mask].sum(), num_tokens + int(mask.sum())
    loss = -0.5 * total / num_tokens
    gradients = torch.autograd.grad(loss, list(model.model.parameters()))
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-6)
    assert metrics.grad_norm == pytest.approx(
        torch.cat([value.flatten() for value in gradients]).norm().item(), rel=1e-5
    )


def whole_teacher(samples):
    """Make up a teacher's whole distribution at each loss token, as sets that hold the vocabulary,
    most probable first."""
    generator, taught = np.random.default_rng(7), []
    for sample in samples:
        ids, logprobs = token_sets(generator, int(sample.loss_mask.sum()), 256)
        taught.append(changed(sample, topk_ids=ids, topk_teacher_logprobs=logprobs))
    return taught


@pytest.mark.parametrize("max_logits", [2**26, 1])
@pytest.mark.parametrize("num_ids", [256, 5])
def test_distillation_has_the_gradient_of_the_kl_to_the_teacher(num_ids, max_logits, monkeypatch):
    # Over the whole vocabulary that is torch's own KL of tempered distributions; over the most
    # probable ids, of those and all others in one bin. The model knows 270 ids and the teacher 256
    # of them.
    monkeypatch.setattr(
        "relax_events.training.backend.chunked_head.MAX_LOGITS_ELEMENTS", max_logits
    )
    settings = {
        "distill_coefficient": 0.5,
        "distill_divergence": "forward_kl",
        "distill_tokens": "teacher_topk",
        "distill_top_k": num_ids,
    }
    mine = backend(
        algorithm={"name": "opd", "distill_placement": "loss"} | settings,
        trainer={"max_grad_norm": 1e9},
    )
    model, samples = (
        PaddedGrpo(aggregation="token_mean", estimator="k1").model,
        whole_teacher(SAMPLES),
    )
    samples = [changed(sample, advantages=np.zeros_like(sample.advantages)) for sample in samples]
    for part in (samples[:3], samples[3:4], samples[4:]):
        mine.accumulate(part)
    metrics = mine.step()
    total, num_tokens = 0, 0
    for sample in samples:
        ids = torch.from_numpy(np.array(sample.tokens)).long()[None]
        logits = model(input_ids=ids).logits[0, :-1] / float(np.float32(sample.temperature))
        probs = logits.softmax(-1)[torch.from_numpy(np.array(sample.loss_mask[1:])).bool()]
        ours = probs.gather(-1, torch.from_numpy(sample.topk_ids[:, :num_ids].astype(np.int64)))
        theirs = torch.from_numpy(
            sample.topk_teacher_logprobs[:, :num_ids].astype(np.float64)
        ).exp()
        ours, theirs = (
            torch.cat([values, (1 - values.sum(-1, keepdim=True)).clamp(min=1e-6)], -1)
            for values in (ours, theirs)
        )
        total, num_tokens = total + (theirs * (theirs / ours).log()).sum(), num_tokens + len(ours)
    loss = 0.5 * total / num_tokens
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert metrics.distill_loss == pytest.approx(total.item() / num_tokens, rel=1e-5)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(
        torch.cat([value.flatten() for value in gradients]).norm().item(), rel=1e-4
    )
    masks = [np.array(sample.loss_mask, bool) for sample in samples]
    distances = [
        (sample.rollout_logprobs - sample.teacher_logprobs)[mask]
        for sample, mask in zip(samples, masks, strict=True)
    ]
    assert metrics.teacher_kl == pytest.approx(np.concatenate(distances).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"teacher_logprobs": None},
            "sample s5 has no teacher_logprobs, and the algorithm needs them",
        ),
        ({"topk_ids": None}, "sample s5 has no topk_ids, and the algorithm needs them"),
        (
            {"topk_teacher_logprobs": None},
            "sample s5 has no topk_teacher_logprobs, and the algorithm needs them",
        ),
        (
            {"topk_ids": SAMPLES[5].topk_ids + 1000},
            r"sample s5: topk_ids must be 0 to \d+, got \d+ to \d+; do policy and teacher share a vocabulary",
        ),
        (
            {"topk_teacher_logprobs": np.full_like(SAMPLES[5].topk_teacher_logprobs, np.nan)},
            "sample s5: topk_teacher_logprobs must be finite, got nan",
        ),
        (
            {"topk_ids": SAMPLES[5].topk_ids[:, :3]},
            r"sample s5: topk_ids must be \d+ loss tokens by at least 4 ids, got \(\d+, 3\)",
        ),
    ],
)
def test_sample_with_invalid_teacher_values_is_poison(changes, text):
    mine = backend(
        algorithm={"distill_coefficient": 0.5, "distill_tokens": "teacher_topk", "distill_top_k": 4}
    )
    with pytest.raises(PoisonSample, match=text):
        mine.accumulate([SAMPLES[4], changed(SAMPLES[5], **changes)])


def test_metrics_count_trained_samples_and_tokens():
    mine = backend()
    mine.accumulate(SAMPLES)
    metrics = mine.step()
    assert metrics.num_samples == len(SAMPLES)
    assert metrics.num_tokens == sum(len(sample.tokens) for sample in SAMPLES)
    assert metrics.clip_fraction == pytest.approx(
        metrics.clip_low_fraction + metrics.clip_high_fraction
    )


def test_float32_step_is_near_float64():
    mine, exact = backend(torch.float32), backend()
    for trainer in (mine, exact):
        trainer.accumulate(SAMPLES)
    assert mine.step().to_metrics() == pytest.approx(exact.step().to_metrics(), rel=1e-4, abs=1e-5)


def test_steps_are_equal_bit_for_bit_when_repeated():
    runs = [backend(None), backend(None)]
    for trainer in runs:
        for _ in range(3):
            trainer.accumulate(SAMPLES[:5])
            trainer.accumulate(SAMPLES[5:])
            trainer.step()
    first, second = (collect_weights(trainer) for trainer in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_on_the_host_takes_the_same_steps(dtype):
    plain = backend(None, model_dtype=dtype)
    away = backend(None, model_dtype=dtype, trainer=TRAINER | {"offload_optimizer": True})
    restored = backend(None, model_dtype=dtype, trainer=TRAINER | {"offload_optimizer": True})
    for step in range(3):
        if step == 2:
            restored.load_state(snapshot(away.state()))
            away = restored
        for trainer in (plain, away):
            trainer.accumulate(SAMPLES[:5])
            trainer.accumulate(SAMPLES[5:])
        assert plain.step() == away.step()
    first, second = plain.state().tensors, away.state().tensors
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    weights = collect_weights(plain)
    assert all(torch.equal(weights[name], one) for name, one in collect_weights(away).items())


def test_bfloat16_keeps_small_updates_in_its_master_weights():
    mine = backend(None, model_dtype="bfloat16", trainer={"learning_rate": 1e-6})
    before = snapshot(mine.state()).tensors
    mine.accumulate(SAMPLES)
    mine.step()
    after, weights = mine.state().tensors, collect_weights(mine)
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights[name].dtype == torch.bfloat16
    moved = (after[f"model.{name}"] - before[f"model.{name}"]).abs()
    assert 0 < float(moved.max()) <= 1.05e-6
    assert torch.equal(weights[name], after[f"model.{name}"].bfloat16())


def test_bfloat16_gradients_are_near_float32():
    mine, exact = backend(None, model_dtype="bfloat16"), backend(torch.float32)
    for trainer in (mine, exact):
        trainer.accumulate(SAMPLES)
    assert mine.step().grad_norm == pytest.approx(exact.step().grad_norm, rel=0.1)


def test_reference_logprobs_are_not_needed_without_kl():
    mine = backend(algorithm={})
    mine.accumulate([changed(sample, ref_logprobs=None, actor_logprobs=None) for sample in SAMPLES])
    assert mine.step().kl_estimate == 0.0


def test_poison_sample_leaves_the_rest_of_the_step_unharmed():
    mine, clean = backend(), backend()
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES[:4])
    with pytest.raises(PoisonSample, match="sample s5 has no actor_logprobs"):
        mine.accumulate([SAMPLES[4], changed(SAMPLES[5], actor_logprobs=None)])
    assert mine.step() == clean.step()


def test_samples_without_loss_tokens_change_nothing():
    mine, clean = backend(), backend()
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES[:4])
    mine.accumulate([changed(SAMPLES[5], loss_mask=np.zeros_like(SAMPLES[5].loss_mask))])
    assert mine.step() == clean.step()


def test_step_fails_without_loss_tokens_and_keeps_the_weights():
    mine = backend()
    before = collect_weights(mine)
    with pytest.raises(RunFailed, match="train step 0 holds no loss token on any rank"):
        mine.step()
    assert mine.policy_version == 0
    assert all(torch.equal(value, before[name]) for name, value in collect_weights(mine).items())


def test_step_names_step_and_samples_when_the_loss_is_not_finite():
    mine = backend(torch.float32)
    before = collect_weights(mine)
    mine.accumulate(SAMPLES[:3])
    far = np.where(SAMPLES[3].loss_mask, np.float32(3e38), np.float32(0))
    mine.accumulate([changed(SAMPLES[3], advantages=far)])
    mine.accumulate(SAMPLES[4:])
    with pytest.raises(
        RunFailed,
        match=r"train step 0: loss and gradients must be finite; rank 0: .* micro-batch of samples s3\. The weights are those before",
    ):
        mine.step()
    assert mine.policy_version == 0
    assert all(torch.equal(value, before[name]) for name, value in collect_weights(mine).items())


def test_step_names_the_samples_when_only_the_gradient_is_not_finite():
    mine = backend(torch.float32)
    mine.accumulate(SAMPLES[:3])

    def break_gradient(gradient):
        return gradient * math.inf

    handle = mine._model.module.lm_head.weight.register_hook(break_gradient)
    mine.accumulate(SAMPLES[3:5])
    handle.remove()
    mine.accumulate(SAMPLES[5:])
    with pytest.raises(RunFailed, match=r"micro-batch of samples s3, s4\."):
        mine.step()


def test_failed_step_does_not_affect_the_next_step():
    mine, clean = backend(), backend()
    far = np.where(SAMPLES[3].loss_mask, np.float32(3e38), np.float32(0))
    mine.accumulate([changed(SAMPLES[3], advantages=far)] * 2)
    mine._parameters.gradients.fill_(math.nan)
    mine.accumulate(SAMPLES[:1])
    with pytest.raises(RunFailed):
        mine.step()
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES)
    assert mine.step() == clean.step()


def test_skipped_step_keeps_weights_and_optimizer_and_increments_the_version():
    mine, clean = backend(), backend()
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES[:2])
        trainer.step()
    before = snapshot(mine.state()).tensors
    mine.accumulate(
        [
            changed(
                SAMPLES[3],
                advantages=np.where(SAMPLES[3].loss_mask, np.float32(3e38), np.float32(0)),
            )
        ]
        * 2
    )
    mine._parameters.gradients.fill_(math.nan)
    with pytest.raises(StepNotFinite):
        mine.step()
    mine.skip_step()
    after = mine.state().tensors
    assert mine.policy_version == 2
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    clean.policy_version = 2  # the learning rate goes by the version
    for trainer in (mine, clean):
        trainer.accumulate(SAMPLES[2:])
    assert mine.step() == clean.step()
    assert all(
        torch.equal(tensor, collect_weights(clean)[name])
        for name, tensor in collect_weights(mine).items()
    )


def test_policy_after_held_steps_is_the_one_that_began_at_their_end():
    held, clean, poison = backend(), backend(), changed(SAMPLES[3], tokens=SAMPLES[3].tokens + 9999)
    before = snapshot(held.state()).tensors
    for _ in range(2):
        held.check([])
        held.check(SAMPLES)
        with pytest.raises(PoisonSample, match="s3"):
            held.check([SAMPLES[0], poison])
        held.skip_step()
    assert held.policy_version == 2
    after = held.state().tensors
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    clean.policy_version = 2  # the learning rate goes by the version
    for trainer in (held, clean):
        trainer.accumulate(SAMPLES)
    assert held.step() == clean.step()
    first, second = held.state().tensors, clean.state().tensors
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_weights_are_a_snapshot_in_hugging_face_names():
    mine = backend()
    weights = collect_weights(mine)
    before = {name: value.clone() for name, value in weights.items()}
    assert weights.keys() == dict(plain_model(tiny_model()).named_parameters()).keys()
    mine.accumulate(SAMPLES)
    mine.step()
    assert all(torch.equal(value, before[name]) for name, value in weights.items())
    assert any(
        not torch.equal(value, before[name]) for name, value in collect_weights(mine).items()
    )


def test_load_state_continues_training_bit_for_bit():
    straight, saved, restored = backend(None), backend(None), backend(None)
    for trainer in (straight, saved):
        trainer.accumulate(SAMPLES[:5])
        trainer.step()
    state = snapshot(saved.state())
    restored.accumulate(SAMPLES[:2])
    restored.load_state(state)
    for trainer in (straight, restored):
        trainer.accumulate(SAMPLES[5:])
    assert straight.step() == restored.step()
    assert restored.policy_version == 2
    first, second = straight.state().tensors, restored.state().tensors
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_state_before_the_first_step_can_be_loaded():
    mine = backend(None)
    other = backend(None)
    other.accumulate(SAMPLES)
    other.step()
    other.load_state(snapshot(mine.state()))
    for trainer in (mine, other):
        trainer.accumulate(SAMPLES)
    assert mine.step() == other.step()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tensors: tensors.pop("exp_avg.lm_head.weight"),
            "exp_avg.lm_head.weight is only in the model",
        ),
        (
            lambda tensors: tensors.update({"model.more": torch.zeros(1)}),
            "model.more is only in the state",
        ),
        (
            lambda tensors: tensors.update({"model.model.norm.weight": torch.zeros(5)}),
            r"model.model.norm.weight is \(5,\) in the state and \(32,\)",
        ),
    ],
)
def test_load_state_changes_nothing_when_the_state_does_not_fit(change, text):
    mine = backend(None)
    before = snapshot(mine.state())
    tensors = {name: torch.zeros_like(tensor) for name, tensor in before.tensors.items()}
    change(tensors)
    with pytest.raises(WeightsError, match=text):
        mine.load_state(TrainerState(policy_version=7, tensors=tensors))
    assert mine.policy_version == 0
    assert all(
        torch.equal(tensor, before.tensors[name]) for name, tensor in mine.state().tensors.items()
    )


def test_backend_names_a_missing_model():
    config = run_config()
    missing = config.model_copy(
        update={"model": config.model.model_copy(update={"path": Path("/nowhere")})}
    )
    with pytest.raises(ConfigError, match=r"model.path = /nowhere"):
        TorchBackend(missing, ranks=SingleRank())


def test_metrics_contain_every_field():
    mine = backend()
    mine.accumulate(SAMPLES)
    metrics = mine.step()
    fields = dataclasses.asdict(metrics)
    assert fields.pop("algorithm_metrics") == {}
    (worst,) = fields.pop("worst_tokens")
    assert worst.difference == metrics.mismatch_max_abs
    assert metrics.to_metrics() == {name: float(value) for name, value in fields.items()}
    own = dataclasses.replace(metrics, algorithm_metrics={"margin": 0.5}).to_metrics(
        of_engine=False
    )
    assert set(own) == {
        "loss",
        "load_balancing_loss",
        "entropy",
        "grad_norm",
        "learning_rate",
        "num_loss_tokens",
        "num_tokens",
        "num_samples",
        "margin",
    }
