"""Divergences from a teacher against torch's own, sums by hand, and expectations over a whole
vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from relax_events.algorithms.distillation import MIN_TAIL, TokenSet, divergence, sampled_divergence

GENERATOR = torch.Generator().manual_seed(8)
STUDENT, TEACHER, BEHAVIOUR = (
    torch.randn(4, 9, generator=GENERATOR, dtype=torch.float64).log_softmax(-1) for _ in range(3)
)
KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.3), ("jsd", 0.0), ("jsd", 1.0)]
TAILS = ["tail", "renormalise", "truncate"]


def whole(student: Tensor, teacher: Tensor, kind: str, mixture: float) -> Tensor:
    """Compute the divergence over a whole vocabulary with torch's own KL."""
    ours, theirs = Categorical(logits=student), Categorical(logits=teacher)
    if kind == "reverse_kl" or (kind == "jsd" and mixture == 1):
        return kl_divergence(ours, theirs)
    if kind == "forward_kl" or mixture == 0:
        return kl_divergence(theirs, ours)
    middle = Categorical(probs=mixture * theirs.probs + (1 - mixture) * ours.probs)
    return mixture * kl_divergence(theirs, middle) + (1 - mixture) * kl_divergence(ours, middle)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("kind", "mixture"), KINDS)
def test_divergence_over_the_whole_vocabulary_equals_that_of_torch(
    kind: Any, mixture: float, tail: Any
) -> None:
    student = STUDENT.clone().requires_grad_()
    expected = whole(student, TEACHER, kind, mixture)
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    logits = STUDENT.clone().requires_grad_()
    values = divergence(
        TokenSet(logits.log_softmax(-1), TEACHER), kind=kind, mixture=mixture, tail=tail
    )
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), logits)[0], gradient, rtol=1e-9, atol=1e-12
    )


def by_hand(p: np.ndarray, q: np.ndarray, kind: str) -> float:
    m = (p + q) / 2
    return float(
        {
            "reverse_kl": (p * np.log(p / q)).sum(),
            "forward_kl": (q * np.log(q / p)).sum(),
            "jsd": 0.5 * (p * np.log(p / m)).sum() + 0.5 * (q * np.log(q / m)).sum(),
        }[kind]
    )


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_tokens_outside_the_set_form_a_bin_or_are_renormalised_or_truncated(kind: Any) -> None:
    p, q = np.array([0.5, 0.2]), np.array([0.3, 0.3])
    tokens = TokenSet(torch.from_numpy(p).log()[None], torch.from_numpy(q).log()[None])
    found = {tail: float(divergence(tokens, kind=kind, mixture=0.5, tail=tail)) for tail in TAILS}  # type: ignore[arg-type]
    with_bin = by_hand(np.array([0.5, 0.2, 0.3]), np.array([0.3, 0.3, 0.4]), kind)
    left_out = (
        by_hand(p, q, kind) + {"reverse_kl": 0.6 - 0.7, "forward_kl": 0.7 - 0.6, "jsd": 0.0}[kind]
    )
    assert found == pytest.approx(
        {"tail": with_bin, "renormalise": by_hand(p / 0.7, q / 0.6, kind), "truncate": left_out},
        rel=1e-12,
    )
    assert min(found.values()) > 0


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("kind", "mixture"), KINDS)
def test_divergence_over_a_set_has_the_gradient_of_finite_differences(
    kind: Any, mixture: float, tail: Any
) -> None:
    ids = torch.tensor([[0, 3, 5], [1, 2, 8], [7, 6, 4], [2, 0, 1]])
    teacher = TEACHER.gather(-1, ids)

    def of_logits(logits: Tensor) -> Tensor:
        return divergence(
            TokenSet(logits.log_softmax(-1).gather(-1, ids), teacher),
            kind=kind,
            mixture=mixture,
            tail=tail,
        )

    assert torch.autograd.gradcheck(of_logits, STUDENT.clone().requires_grad_())
    same = TokenSet(teacher.clone().requires_grad_(), teacher)
    at_rest = divergence(same, kind=kind, mixture=mixture, tail=tail)
    torch.testing.assert_close(at_rest, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        torch.autograd.grad(at_rest.sum(), same.logprobs)[0],
        torch.zeros_like(teacher),
        rtol=0,
        atol=1e-15,
    )


def test_tail_below_rounding_is_clamped_and_has_no_gradient() -> None:
    logprobs = torch.tensor([[0.0, -30.0]], requires_grad=True)
    value = divergence(
        TokenSet(logprobs, torch.tensor([[0.5, 0.3]]).log()),
        kind="forward_kl",
        mixture=0.5,
        tail="tail",
    )
    expected = 0.5 * np.log(0.5) + 0.3 * (np.log(0.3) + 30) + 0.2 * np.log(0.2 / MIN_TAIL)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert gradient.flatten().tolist() == pytest.approx(
        [0.5, -0.3], rel=1e-5
    )  # 1 - 0.5 and e^-30 - 0.3: nothing of the tail's


@pytest.mark.parametrize(("kind", "mixture"), KINDS)
def test_sampled_token_divergence_and_gradient_are_unbiased_for_any_sampler(
    kind: Any, mixture: float
) -> None:
    """The mean over the tokens of any sampler equals the full divergence, and the mean gradient its
    gradient."""
    student = STUDENT.clone().requires_grad_()
    (expected_gradient,) = torch.autograd.grad(
        whole(student, TEACHER, kind, mixture).sum(), student
    )
    logits = STUDENT.clone().requires_grad_()
    estimates = sampled_divergence(
        logits.log_softmax(-1).flatten(),
        teacher_logprobs=TEACHER.flatten(),
        behaviour_logprobs=BEHAVIOUR.flatten(),
        kind=kind,
        mixture=mixture,
    )
    means = (BEHAVIOUR.exp() * estimates.reshape(BEHAVIOUR.shape)).sum(-1)
    torch.testing.assert_close(means, whole(STUDENT, TEACHER, kind, mixture), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(means.sum(), logits)[0], expected_gradient, rtol=1e-9, atol=1e-12
    )
    assert (estimates >= 0).all()


def test_reverse_kl_gradient_is_the_policy_gradient_of_the_teacher_log_ratio() -> None:
    logprobs, teacher, sampled = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([-1.0, -2.0], [-1.5, -0.5], [-1.2, -1.9])
    )
    logprobs.requires_grad_()
    sampled_divergence(
        logprobs,
        teacher_logprobs=teacher,
        behaviour_logprobs=sampled,
        kind="reverse_kl",
        mixture=0.5,
    ).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([np.exp(0.2) * 0.5, np.exp(-0.1) * -1.5])


def test_divergence_estimate_is_finite_when_the_teacher_is_far_away() -> None:
    far = sampled_divergence(
        torch.tensor([-500.0, -0.1]),
        teacher_logprobs=torch.tensor([0.0, -900.0]),
        behaviour_logprobs=torch.tensor([0.0, -0.1]),
        kind="reverse_kl",
        mixture=0.5,
    )
    assert torch.isfinite(far).all()
