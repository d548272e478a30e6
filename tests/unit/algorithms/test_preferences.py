"""SFT and DPO: numbers worked out by hand, and a step by the backend against plain transformers and
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_events.algorithms.losses import LossTokens
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.algorithms.preferences import dpo_loss
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.types import SampleReady
from relax_events.training.backend.policy_model import PolicyModel, TokenLogprobs
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, plain_model, run_config, tiny_model

SAMPLES = [
    changed(sample, advantages=sample.loss_mask.astype(np.float32))
    for sample in make_samples(8, seed=4)
]
LENGTHS = [2, 1, 1, 3]
# Pair 1: the chosen answer is 1 nat above the reference, the rejected one 1 below. Pair 2: 0 and 3
# above.
LOGPROBS, REFERENCE = (
    [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0, -1.0],
    [-1.5, -2.5, -2.0, -1.0, -2.0, -2.0, -2.0],
)
MARGINS = [0.2, -0.3]


def step_of(
    name: str, logprobs: Tensor, **settings: float | bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a step of the two pairs and its metrics."""
    objective = Objective(
        AlgorithmConfig.model_validate({"name": name} | settings), max_new_tokens=8
    )
    inputs = ObjectiveInputs(
        logprobs=logprobs,
        entropies=torch.zeros(7, dtype=torch.float64),
        rollout_logprobs=logprobs.detach(),
        old_logprobs=None,
        ref_logprobs=torch.tensor(REFERENCE, dtype=torch.float64),
        advantages=torch.ones(7, dtype=torch.float64),
        num_loss_tokens=torch.tensor(LENGTHS),
    )
    tokens, units = objective(inputs), objective.num_units(inputs.num_loss_tokens)
    step_metrics = {
        name: float((tokens.token_weights * values).sum()) / units
        for name, values in tokens.policy_loss.metrics.items()
    }
    return (tokens.token_weights * tokens.losses).sum() / units, step_metrics


def leaf() -> Tensor:
    return torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)


def test_dpo_loss_gradient_and_metrics_match_hand_computation() -> None:
    logprobs = leaf()
    loss, step_metrics = step_of("dpo", logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(
        sum(math.log(1 + math.exp(-margin)) for margin in MARGINS) / 2, rel=1e-12
    )
    pulls = [0.1 / (1 + math.exp(margin)) / 2 for margin in MARGINS]
    expected = [-pulls[0]] * 2 + [pulls[0]] + [-pulls[1]] + [pulls[1]] * 3
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert step_metrics == pytest.approx(
        {
            "preference_accuracy": 0.5,
            "reward_margin": -0.05,
            "chosen_reward": 0.05,
            "rejected_reward": 0.1,
        }
    )


def test_dpo_label_smoothing_mixes_in_the_loss_of_the_swapped_pair() -> None:
    loss, _ = step_of("dpo", leaf(), label_smoothing=0.1, dpo_beta=0.2)
    expected = [
        0.9 * math.log(1 + math.exp(-2 * margin)) + 0.1 * math.log(1 + math.exp(2 * margin))
        for margin in MARGINS
    ]
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-12)


def test_length_normalised_dpo_averages_over_each_answers_tokens() -> None:
    # Per token: pair 1 is 0.5 above the reference and 1 below it, pair 2 is 0 and 1 above it.
    logprobs, margins = leaf(), [0.15, -0.1]
    loss, step_metrics = step_of("dpo", logprobs, length_normalised=True)
    loss.backward()
    assert loss.item() == pytest.approx(
        sum(math.log(1 + math.exp(-margin)) for margin in margins) / 2, rel=1e-12
    )
    pulls = [0.1 / (1 + math.exp(margin)) / 2 for margin in margins]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [-pulls[0] / 2] * 2 + [pulls[0]] + [-pulls[1]] + [pulls[1] / 3] * 3, rel=1e-12
    )
    assert step_metrics == pytest.approx(
        {
            "preference_accuracy": 0.5,
            "reward_margin": 0.025,
            "chosen_reward": 0.025,
            "rejected_reward": 0.0,
        }
    )


def test_dpo_nll_coefficient_adds_the_mean_nll_of_the_chosen_answers() -> None:
    plain, mixed = leaf(), leaf()
    loss, _ = step_of("dpo", plain)
    with_term, _ = step_of("dpo", mixed, nll_coefficient=0.3)
    loss.backward()
    with_term.backward()
    # The chosen answers: 1.5 nats a token over two, and 1 over one.
    assert with_term.item() == pytest.approx(loss.item() + 0.3 * (1.5 + 1.0) / 2, rel=1e-12)
    assert plain.grad is not None
    assert mixed.grad is not None
    added = (mixed.grad - plain.grad).tolist()
    assert added == pytest.approx([-0.3 / 4, -0.3 / 4, 0.0, -0.3 / 2, 0.0, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize(
    ("length_normalised", "margins"), [(True, [1.5, -1.0]), (False, [2.0, -3.0])]
)
def test_ipo_loss_and_gradient_match_hand_computation(
    length_normalised: bool, margins: list[float]
) -> None:
    logprobs = leaf()
    loss, step_metrics = step_of(
        "ipo", logprobs, dpo_beta=0.25, length_normalised=length_normalised
    )
    loss.backward()
    assert loss.item() == pytest.approx(sum((margin - 2) ** 2 for margin in margins) / 2, rel=1e-12)
    first, second = (margins[0] - 2, margins[1] - 2)  # d/dh of the mean over two pairs
    lengths = LENGTHS if length_normalised else [1] * 4
    expected = (
        [first / lengths[0]] * 2
        + [-first / lengths[1]]
        + [second / lengths[2]]
        + [-second / lengths[3]] * 3
    )
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert step_metrics["reward_margin"] == pytest.approx(0.25 * sum(margins) / 2)
    assert step_metrics["preference_accuracy"] == 0.5


def test_ipo_gradient_is_zero_at_its_target_margin() -> None:
    # (h - 1 / (2 beta)) of a pair is 0 where h, 1.5 a token in the first, is what beta asks for.
    logprobs = leaf()
    loss, _ = step_of("ipo", logprobs, dpo_beta=1 / 3)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[:3].tolist() == pytest.approx([0.0] * 3, abs=1e-15)
    assert logprobs.grad[3:].abs().min() > 0


def test_sft_loss_is_the_mean_negative_log_likelihood_per_token() -> None:
    logprobs = leaf()
    loss, step_metrics = step_of("sft", logprobs)
    loss.backward()
    assert (loss.item(), step_metrics) == (pytest.approx(10 / 7), {})
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 7] * 7)


@pytest.mark.parametrize("ref", [None, torch.zeros(3)], ids=["no reference", "three samples"])
def test_dpo_rejects_unpaired_samples_and_missing_reference_logprobs(ref: Tensor | None) -> None:
    values = torch.zeros(3)
    tokens = LossTokens(
        logprobs=values,
        old_logprobs=values,
        advantages=values,
        num_loss_tokens=torch.ones(3, dtype=torch.long),
        ref_logprobs=ref,
    )
    with pytest.raises(
        ConfigError,
        match="preferences need pairs with the reference's log-probabilities, got 3 samples",
    ):
        dpo_loss(tokens, dpo_beta=0.1)


def backend(name: str, max_tokens: int = 4096, **settings: float | bool) -> TorchBackend:
    data = {} if name == "sft" else {"chosen_key": "chosen", "rejected_key": "rejected"}
    config = run_config(
        algorithm={"name": name} | settings,
        trainer={"max_grad_norm": 1e9, "max_tokens_per_micro_batch": max_tokens},
        data=data,
    )
    return TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)


def plain_steps(
    loss_of: Callable[[torch.nn.Module], Tensor], *, num_steps: int
) -> tuple[list[float], torch.nn.Module]:
    """Train a copy of the tiny model with torch's AdamW; return the losses and the model."""
    model = type(plain_model(tiny_model()))(plain_model(tiny_model()).config).double()
    model.load_state_dict(plain_model(tiny_model()).state_dict())
    model.eval()
    optimizer, losses = (
        torch.optim.AdamW(
            model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        ),
        [],
    )
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


def padded(samples: Sequence[SampleReady]) -> tuple[Tensor, Tensor, Tensor]:
    """Return right-padded tokens, the attention mask, and labels as transformers expects them: -100
    where there is no loss."""
    rows = [torch.from_numpy(np.array(sample.tokens)).long() for sample in samples]
    labels = [
        torch.where(torch.from_numpy(np.array(sample.loss_mask)).bool(), row, -100)
        for row, sample in zip(rows, samples, strict=True)
    ]
    attention = [torch.ones_like(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True),
        pad(attention, batch_first=True),
        pad(labels, batch_first=True, padding_value=-100),
    )


def transformers_loss(model: torch.nn.Module) -> Tensor:
    tokens, attention, labels = padded(SAMPLES)
    loss: Tensor = model(input_ids=tokens, attention_mask=attention, labels=labels).loss
    return loss


def answers(model: torch.nn.Module) -> list[list[tuple[Tensor, Tensor]]]:
    """Return log-probabilities by the model and by the reference of the loss tokens, pair by pair,
    each answer by a forward pass of its own."""
    pairs = []
    for pair in zip(SAMPLES[::2], SAMPLES[1::2], strict=True):
        of_pair = []
        for sample in pair:
            ids, mask = (
                torch.from_numpy(np.array(sample.tokens)).long(),
                torch.from_numpy(np.array(sample.loss_mask))[1:].bool(),
            )
            logprobs = (
                model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            )
            of_pair.append(
                (logprobs[mask], torch.from_numpy(np.array(sample.ref_logprobs))[1:].double()[mask])
            )
        pairs.append(of_pair)
    return pairs


def textbook_dpo(model: torch.nn.Module) -> Tensor:
    """Compute the paper's equation 7."""
    margins = [
        (policy - ref).sum() - (other - other_ref).sum()
        for (policy, ref), (other, other_ref) in answers(model)
    ]
    return torch.stack([-torch.log(torch.sigmoid(0.1 * margin)) for margin in margins]).mean()


def textbook_dpo_by_token(model: torch.nn.Module) -> Tensor:
    """Compute Tulu 3's length-normalised loss, and half the chosen answer's cross-entropy."""
    losses = []
    for (policy, ref), (other, other_ref) in answers(model):
        margin = (policy.sum() - ref.sum()) / len(policy) - (other.sum() - other_ref.sum()) / len(
            other
        )
        losses.append(torch.nn.functional.softplus(-2 * margin) - 0.5 * policy.mean())
    return torch.stack(losses).mean()


def textbook_ipo(model: torch.nn.Module) -> Tensor:
    """Compute the paper's equation 17 by its factors, with means over the tokens: (log of a ratio
    of products - 1 / (2 tau))^2."""
    losses = []
    for (policy, ref), (other, other_ref) in answers(model):
        ratio = ((policy.mean() - other.mean()).exp() / (ref.mean() - other_ref.mean()).exp()).log()
        losses.append((ratio - 1 / (2 * 0.5)) ** 2)
    return torch.stack(losses).mean()


STEPS: list[tuple[str, dict[str, float | bool], Callable[[torch.nn.Module], Tensor]]] = [
    ("sft", {}, transformers_loss),
    ("dpo", {}, textbook_dpo),
    (
        "dpo",
        {"dpo_beta": 2.0, "length_normalised": True, "nll_coefficient": 0.5},
        textbook_dpo_by_token,
    ),
    ("ipo", {"dpo_beta": 0.5}, textbook_ipo),
]


@pytest.mark.parametrize("max_tokens", [4096, 20], ids=["one pass", "passes apart from a pair"])
@pytest.mark.parametrize(
    ("name", "settings", "loss_of"), STEPS, ids=["sft", "dpo", "dpo by token", "ipo"]
)
def test_backend_steps_match_a_plain_pytorch_implementation(
    name: str,
    settings: dict[str, float | bool],
    loss_of: Callable[[torch.nn.Module], Tensor],
    max_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells, run = [], PolicyModel.token_logprobs

    def record(model: PolicyModel, batch: PackedBatch, **keywords: Any) -> TokenLogprobs:
        cells.append(len(np.unique(batch.cells)))
        return run(model, batch, **keywords)

    monkeypatch.setattr(PolicyModel, "token_logprobs", record)
    mine = backend(name, max_tokens=max_tokens, **settings)
    expected, model = plain_steps(loss_of, num_steps=3)
    for loss in expected:
        for part in (SAMPLES[:2], SAMPLES[2:6], SAMPLES[6:]):
            mine.accumulate(part)
        assert mine.step().loss == pytest.approx(loss, rel=1e-6)
    for key, value in collect_weights(mine).items():
        # RMSNorm works in float32 in any model, and AdamW blows up gradients that are nearly zero.
        torch.testing.assert_close(value, model.get_parameter(key).detach(), rtol=0, atol=3e-5)
    assert (max(cells) <= 20) == (max_tokens == 20)


def test_dpo_step_reports_preference_metrics_and_neutral_rollout_metrics() -> None:
    mine = backend("dpo")
    mine.accumulate(SAMPLES)
    step_metrics = mine.step()
    assert (step_metrics.mean_ratio, step_metrics.mismatch_max_abs, step_metrics.clip_fraction) == (
        1,
        0,
        0,
    )
    assert {
        "preference_accuracy",
        "reward_margin",
        "chosen_reward",
        "rejected_reward",
    } == step_metrics.algorithm_metrics.keys()
    assert step_metrics.algorithm_metrics["reward_margin"] == pytest.approx(
        step_metrics.algorithm_metrics["chosen_reward"]
        - step_metrics.algorithm_metrics["rejected_reward"]
    )


def test_backend_rejects_half_a_pair_and_keeps_the_steps_other_samples() -> None:
    mine = backend("dpo")
    mine.accumulate(SAMPLES[:4])
    with pytest.raises(PoisonSample, match="prompt group g2 has adjacent samples"):
        mine.accumulate(SAMPLES[4:5])
    assert mine.step().num_samples == 4
