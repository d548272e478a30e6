"""SFT and DPO: numbers by hand, and a step by the backend against plain transformers and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_events.algorithms.losses import LossTokens
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.algorithms.preferences import direct_preference
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.types import SampleReady
from relax_events.training.ranks import SingleRank
from relax_events.training.torch_backend import TorchBackend
from tests.unit.trainer_samples import changed, make_samples, plain_model, run_config, tiny_model

SAMPLES = [changed(sample, advantages=sample.loss_mask.astype(np.float32)) for sample in make_samples(8, seed=4)]
LENGTHS = [2, 1, 1, 3]
# Pair 1: the chosen answer is 1 nat above the reference, the rejected one 1 below. Pair 2: 0 and 3 above.
LOGPROBS, REFERENCE = [-1.0, -2.0, -3.0, -1.0, -1.0, -1.0, -1.0], [-1.5, -2.5, -2.0, -1.0, -2.0, -2.0, -2.0]
MARGINS = [0.2, -0.3]


def step_of(name: str, logprobs: Tensor, **settings: float) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a step of the two pairs and its figures."""
    objective = Objective(AlgorithmConfig.model_validate({"name": name} | settings), max_new_tokens=8)
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
    figures = {name: float((tokens.token_weights * values).sum()) / units for name, values in tokens.surrogate.figures.items()}
    return (tokens.token_weights * tokens.losses).sum() / units, figures


def leaf() -> Tensor:
    return torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)


def test_dpo_is_the_hand_computed_loss_with_its_gradient_and_figures() -> None:
    logprobs = leaf()
    loss, figures = step_of("dpo", logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(sum(math.log(1 + math.exp(-margin)) for margin in MARGINS) / 2, rel=1e-12)
    pulls = [0.1 / (1 + math.exp(margin)) / 2 for margin in MARGINS]
    expected = [-pulls[0]] * 2 + [pulls[0]] + [-pulls[1]] + [pulls[1]] * 3
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert figures == pytest.approx({"preference_accuracy": 0.5, "reward_margin": -0.05, "chosen_reward": 0.05, "rejected_reward": 0.1})


def test_dpo_with_label_smoothing_mixes_in_the_loss_of_the_pair_turned_round() -> None:
    loss, _ = step_of("dpo", leaf(), label_smoothing=0.1, beta=0.2)
    expected = [0.9 * math.log(1 + math.exp(-2 * margin)) + 0.1 * math.log(1 + math.exp(2 * margin)) for margin in MARGINS]
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-12)


def test_sft_is_the_mean_negative_log_likelihood_of_a_token() -> None:
    logprobs = leaf()
    loss, figures = step_of("sft", logprobs)
    loss.backward()
    assert (loss.item(), figures) == (pytest.approx(10 / 7), {})
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 7] * 7)


@pytest.mark.parametrize("ref", [None, torch.zeros(3)], ids=["no reference", "three samples"])
def test_dpo_refuses_what_is_no_pair(ref: Tensor | None) -> None:
    values = torch.zeros(3)
    tokens = LossTokens(logprobs=values, old_logprobs=values, advantages=values, num_loss_tokens=torch.ones(3, dtype=torch.long), ref_logprobs=ref)
    with pytest.raises(ConfigError, match="dpo needs pairs with the reference's log-probabilities, got 3 samples"):
        direct_preference(tokens, beta=0.1)


def backend(name: str) -> TorchBackend:
    data = {"chosen_key": "chosen", "rejected_key": "rejected"} if name == "dpo" else {}
    config = run_config(algorithm={"name": name}, trainer={"max_grad_norm": 1e9}, data=data)
    return TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)


def plain_steps(loss_of: Callable[[torch.nn.Module], Tensor], *, num_steps: int) -> tuple[list[float], torch.nn.Module]:
    """Train a copy of the tiny model with torch's AdamW; return the losses and the model."""
    model = type(plain_model(tiny_model()))(plain_model(tiny_model()).config).double()
    model.load_state_dict(plain_model(tiny_model()).state_dict())
    model.eval()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


def padded(samples: Sequence[SampleReady]) -> tuple[Tensor, Tensor, Tensor]:
    """Give right-padded tokens, the attention mask, and labels as transformers wants them: -100 where there is no loss."""
    rows = [torch.from_numpy(np.array(sample.tokens)).long() for sample in samples]
    labels = [torch.where(torch.from_numpy(np.array(sample.loss_mask)).bool(), row, -100) for row, sample in zip(rows, samples, strict=True)]
    attention = [torch.ones_like(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(attention, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def transformers_loss(model: torch.nn.Module) -> Tensor:
    tokens, attention, labels = padded(SAMPLES)
    loss: Tensor = model(input_ids=tokens, attention_mask=attention, labels=labels).loss
    return loss


def textbook_dpo(model: torch.nn.Module) -> Tensor:
    """Compute the paper's equation 7 pair by pair, each answer by a forward pass of its own."""
    losses = []
    for chosen, rejected in zip(SAMPLES[::2], SAMPLES[1::2], strict=True):
        worth = []
        for sample in (chosen, rejected):
            ids, mask = torch.from_numpy(np.array(sample.tokens)).long(), torch.from_numpy(np.array(sample.loss_mask))[1:].double()
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            worth.append((mask * (logprobs - torch.from_numpy(np.array(sample.ref_logprobs))[1:].double())).sum())
        losses.append(-torch.log(torch.sigmoid(0.1 * (worth[0] - worth[1]))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("name", "loss_of"), [("sft", transformers_loss), ("dpo", textbook_dpo)])
def test_steps_equal_a_plain_implementation(name: str, loss_of: Callable[[torch.nn.Module], Tensor]) -> None:
    mine = backend(name)
    expected, model = plain_steps(loss_of, num_steps=3)
    for loss in expected:
        for part in (SAMPLES[:2], SAMPLES[2:6], SAMPLES[6:]):
            mine.accumulate(part)
        assert mine.step().loss == pytest.approx(loss, rel=1e-6)
    for key, value in mine.weights().items():
        # RMSNorm works in float32 in any model, and AdamW blows up gradients that are nearly zero.
        torch.testing.assert_close(value, model.get_parameter(key).detach(), rtol=0, atol=3e-5)


def test_step_reports_what_says_something_without_an_engine() -> None:
    mine = backend("dpo")
    mine.accumulate(SAMPLES)
    figures = mine.step()
    assert (figures.mean_ratio, figures.mismatch_max_abs, figures.clip_fraction) == (1, 0, 0)
    assert {"preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward"} == figures.own.keys()
    assert figures.own["reward_margin"] == pytest.approx(figures.own["chosen_reward"] - figures.own["rejected_reward"])


def test_backend_refuses_half_a_pair_and_keeps_the_rest_of_the_step() -> None:
    mine = backend("dpo")
    mine.accumulate(SAMPLES[:4])
    with pytest.raises(PoisonSample, match="prompt group g2 has samples"):
        mine.accumulate(SAMPLES[4:5])
    assert mine.step().num_samples == 4
