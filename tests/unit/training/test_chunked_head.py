"""The gradient of an output head computed in chunks is as exact as that of one computed at once,
compared with float64.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from relax_events.training.backend.chunked_head import ChunkedHead
from relax_events.training.backend.head_logprobs import HeadInputs, apply_head

NUM_TOKENS, HIDDEN, VOCABULARY = 4096, 32, 64


def gradients(
    dtype: torch.dtype,
    *,
    chunk: int,
    open_head: Callable[[nn.Linear], Callable[[Tensor], Tensor]],
    bias: bool,
) -> list[Tensor]:
    """Return the gradients of hidden states, weight and bias for log-probabilities of which half
    should grow and half fall."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    nn.init.normal_(head.weight, std=0.02)
    hidden, targets = (
        torch.randn(NUM_TOKENS, HIDDEN).to(torch.bfloat16).to(dtype).requires_grad_(),
        torch.randint(VOCABULARY, (NUM_TOKENS,)),
    )
    head = head.to(torch.bfloat16).to(dtype)
    apply = open_head(head)

    def logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = apply(hidden)
        return (
            logits.to(torch.promote_types(dtype, torch.float32))
            .log_softmax(-1)
            .gather(-1, targets[:, None])[:, 0]
        )

    parts = [
        checkpoint(logprobs, *piece, use_reentrant=False)
        for piece in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    (torch.cat(parts) * torch.where(torch.arange(NUM_TOKENS) % 2 == 0, 1.0, -1.0)).sum().backward()
    return [
        tensor.grad.double() for tensor in (hidden, *head.parameters()) if tensor.grad is not None
    ]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [False, True])
def test_chunked_head_gradients_match_a_linear_head(bias: bool) -> None:
    mine = gradients(torch.float64, chunk=100, open_head=ChunkedHead, bias=bias)
    whole = gradients(torch.float64, chunk=NUM_TOKENS, open_head=lambda head: head, bias=bias)
    assert len(mine) == len(whole) == 2 + bias
    for found, exact in zip(mine, whole, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_many_chunks_in_bfloat16_cost_no_precision() -> None:
    exact = gradients(torch.float64, chunk=NUM_TOKENS, open_head=lambda head: head, bias=False)[1]
    whole = error(
        gradients(torch.bfloat16, chunk=NUM_TOKENS, open_head=lambda head: head, bias=False)[1],
        exact,
    )
    mine = error(gradients(torch.bfloat16, chunk=32, open_head=ChunkedHead, bias=False)[1], exact)
    summed_in_bfloat16 = error(
        gradients(torch.bfloat16, chunk=32, open_head=lambda head: head, bias=False)[1], exact
    )
    assert mine < 2 * whole
    assert summed_in_bfloat16 > 3 * mine  # which is what it would cost otherwise


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that are made in its context, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("num_ids", [0, 3])
def test_backward_pass_holds_the_logits_of_one_chunk(num_ids: int) -> None:
    chunk, vocabulary, most = 8, 5000, []
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    for num_chunks in (2, 12):
        num_tokens = num_chunks * chunk
        inputs = HeadInputs(
            torch.randn(num_tokens, HIDDEN, requires_grad=True),
            torch.randint(vocabulary, (num_tokens,)),
            torch.ones(num_tokens),
            torch.randint(vocabulary, (num_tokens, num_ids)),
        )
        outputs = apply_head(head, inputs, chunk=chunk, entropy_gradient=False, num_top=0)
        with LiveBytes() as live:
            outputs[0].sum().backward()
        most.append(live.most)
    assert most[1] < most[0] + 0.5 * chunk * vocabulary * 4
