"""Training and scoring without a model's modules: log-probabilities and gradients as with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_models import write_plain_model
from structlog.testing import capture_logs
from torch.nn.functional import scaled_dot_product_attention

from relax_events.config import ModelConfig
from relax_events.examples.tiny_models import make_tiny
from relax_events.training.backend import plain_decoder
from relax_events.training.backend.head_logprobs import HeadInputs, apply_head
from relax_events.training.backend.policy_model import MAX_SHORT_SEQUENCE, PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.tree_batches import TreeBatches, last_descendants
from relax_events.training.batch.packing import pack
from relax_events.training.batch.prefix_tree import PrefixTree
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.folders import kept_folder
from tests.unit.trainer_samples import make_samples, run_config, tiny_model

CPU = torch.device("cpu")


def open_model(folder: Path, family: str = "qwen3", **shape: Any) -> PolicyModel:
    write_plain_model(folder, family, vocab_size=256, **shape)
    config = ModelConfig(path=folder, dtype="float32", device="cpu")
    return PolicyModel(folder, config=config, device=CPU)


def prompt_groups(*, num_prompt_tokens: tuple[int, ...]) -> list[Any]:
    """Return four samples for each prompt, the last two of them the same."""
    generator, samples = np.random.default_rng(2), []
    for group, length in enumerate(num_prompt_tokens):
        prompt = generator.integers(0, 256, length)
        ends = [generator.integers(0, 256, own) for own in (5, 1, 9)]
        for index, end in enumerate([*ends, ends[-1]]):
            made = make_samples(1)[0]
            tokens = np.concatenate([prompt, end]).astype(np.int32)
            mask = (np.arange(len(tokens)) >= length).astype(np.uint8)
            key = replace(made.key, sample_id=f"{group}/{index}", prompt_group_id=f"{group}")
            samples.append(
                changed(made, key=key, tokens=tokens, loss_mask=mask, num_prompt_tokens=length)
            )
    return samples


def train(model: PolicyModel, samples: list[Any], sharing: PrefixSharing | None) -> list[Any]:
    """Return log-probabilities, entropies and gradients."""
    model.module.zero_grad()
    batch = pack(samples, vocab_size=256, sharing=sharing)
    found = model.token_logprobs(batch, entropy_gradient=True)
    (found.logprobs.square().sum() + found.entropies.sum()).backward()
    gradients = [one.grad for one in model.module.parameters()]
    return [found.logprobs.detach(), found.entropies.detach(), *gradients]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_plain_decoder_gives_what_the_modules_give(
    tmp_path: Path, family: str, shape: dict[str, Any]
) -> None:
    model = open_model(tmp_path, family, **shape)
    assert model.is_plain
    # trees that are computed whole, and trees that are computed run by run
    samples = prompt_groups(num_prompt_tokens=(12, 30, 90, 13, 9, 120))
    for sharing in (PrefixSharing(min_tokens=8), None):
        found = train(model, samples, sharing)
        decoder, model._decoder = model._decoder, None
        expected = train(model, samples, sharing)
        model._decoder = decoder
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_plain_decoder_computes_the_same_bits_again(tmp_path: Path) -> None:
    model = open_model(tmp_path)
    samples = prompt_groups(num_prompt_tokens=(12, 90))
    first, again = (train(model, samples, PrefixSharing(min_tokens=8)) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_long_sequences_are_computed_by_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(tmp_path)
    lengths: list[int] = []
    decoder: Any = model._decoder

    def noted(tokens: Any, *given: Any, **named: Any) -> Any:
        lengths.append(tokens.numel())
        return decoder(tokens, *given, **named)

    monkeypatch.setattr(model, "_decoder", noted)
    generator = np.random.default_rng(0)
    for length in (MAX_SHORT_SEQUENCE, MAX_SHORT_SEQUENCE + 1):
        tokens = generator.integers(0, 256, length).astype(np.int32)
        mask = np.append(np.zeros(length - 1, np.uint8), np.uint8(1))
        sample = changed(make_samples(1)[0], tokens=tokens, loss_mask=mask)
        model.token_logprobs(pack([sample], vocab_size=256))
    assert lengths == [MAX_SHORT_SEQUENCE]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3", {"lora": {"rank": 2}}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"attention": "eager"}),
    ],
)
def test_models_of_another_form_are_trained_by_their_modules(
    family: str, changes: dict[str, Any]
) -> None:
    path = make_tiny(
        kept_folder(f"other-{family}"), corpus=["12=21"], family=family, hidden_size=32, seed=4
    )
    config = ModelConfig.model_validate(
        run_config(path).model.model_dump(exclude_unset=True) | changes
    )
    assert not PolicyModel(path, config=config, device=CPU).is_plain


def test_model_with_a_sliding_window_is_trained_by_its_modules(tmp_path: Path) -> None:
    window = {
        "sliding_window": 4096,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * 3,
    }
    assert not open_model(tmp_path, **window).is_plain


def test_recomputed_layers_are_trained_by_their_modules() -> None:
    config = run_config()
    trainer = config.trainer.model_copy(update={"activation_checkpointing": "whole"})
    backend = TorchBackend(config.model_copy(update={"trainer": trainer}), ranks=SingleRank())
    assert not backend._model.is_plain
    assert TorchBackend(config, ranks=SingleRank())._model.is_plain


def test_model_whose_modules_compute_something_else_is_trained_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def norm_otherwise(values: Any, norm: Any) -> Any:
        return values * norm.weight

    monkeypatch.setattr(plain_decoder, "_norm", norm_otherwise)
    with capture_logs() as logs:
        model = PolicyModel(tiny_model(), config=run_config().model, device=CPU)
    assert not model.is_plain
    (logged,) = (line for line in logs if line["event"] == "plain_decoder.differs")
    assert logged["largest"] > 1e-3


def test_cell_is_seen_up_to_its_last_descendant() -> None:
    #       p p p a a u b b  v c  d d d; then a sequence of its own
    tree = PrefixTree(np.array([8, 10, 13, 15]), np.array([-1, 4, 2, -1]))
    assert last_descendants(tree).tolist() == [12] * 3 + [9] * 2 + [7] * 3 + [9] * 2 + [12] * 3 + [
        14,
        14,
    ]


def test_attention_in_few_calls_is_that_of_each_sequence_alone() -> None:
    ends, forks, sequences = [], [], []
    for num_prompt, own in ((20, (4, 6, 5)), (70, (12, 20)), (10, (3,)), (90, (30, 30, 8))):
        start = ends[-1] if ends else 0
        prompt = list(range(start, start + num_prompt))
        for index, length in enumerate(own):
            first = prompt[-1] + 1 if index == 0 else ends[-1]
            run = list(range(first, first + length))
            sequences.append([*prompt, *run])
            ends.append(run[-1] + 1)
            forks.append(prompt[-1] if index else -1)
    length = ends[-1] + 6  # with padding
    tree = PrefixTree(np.array(ends), np.array(forks))
    attend = TreeBatches(tree, num_cells=length, num_heads=4, num_groups=2)
    assert len(attend._masks) < len(sequences)
    query, key, value = (torch.randn(length, heads * 8, requires_grad=True) for heads in (4, 2, 2))
    output = attend(query, key, value, scale=0.3)[: ends[-1]]
    whole = torch.zeros_like(output)
    for cells in sequences:
        parts = (
            part[cells].view(1, len(cells), -1, 8).transpose(1, 2) for part in (query, key, value)
        )
        alone = scaled_dot_product_attention(*parts, is_causal=True, scale=0.3, enable_gqa=True)
        whole = whole.index_copy(0, torch.tensor(cells), alone[0].transpose(0, 1).flatten(1))
    torch.testing.assert_close(output, whole, rtol=1e-5, atol=1e-5)
    weights = torch.randn(output.shape)
    gradients = [
        torch.autograd.grad((result * weights).sum(), (query, key, value))
        for result in (output, whole)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("num_top", [0, 3])
def test_head_at_rows_computed_once_gives_what_it_gives_at_each_token(
    chunk: int, num_top: int
) -> None:
    torch.manual_seed(1)
    head, rows = torch.nn.Linear(8, 40), torch.tensor([2, 0, 2, 2, 1, 0, 4, 3, 4])
    hidden = torch.randn(5, 8, requires_grad=True)
    once = HeadInputs(
        hidden, torch.randint(40, (9,)), torch.rand(5) + 0.5, torch.randint(40, (9, 2)), rows
    )
    found, gradients = [], []
    for inputs in (once, once.expanded()):
        values = apply_head(head, inputs, chunk=chunk, entropy_gradient=True, num_top=num_top)
        loss = values[0].sum() + values[1].square().sum() + values[3].square().sum()
        gradients.append(torch.autograd.grad(loss, [hidden, *head.parameters()]))
        found.append(values)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients)


def test_samples_at_other_temperatures_do_not_share_a_row_of_the_head(tmp_path: Path) -> None:
    model = open_model(tmp_path)
    cold, warm = (
        changed(one, temperature=temperature)
        for one, temperature in zip(
            prompt_groups(num_prompt_tokens=(12,))[2:], (0.5, 2.0), strict=True
        )
    )
    together, *alone = (
        model.token_logprobs(
            pack(part, vocab_size=256, sharing=PrefixSharing(min_tokens=8))
        ).logprobs
        for part in ([cold, warm], [cold], [warm])
    )
    torch.testing.assert_close(together, torch.cat(alone))
    assert not torch.allclose(*alone, atol=0.01)


def test_scores_are_those_of_the_modules(tmp_path: Path) -> None:
    open_model(tmp_path)
    config = ModelConfig(path=tmp_path, dtype="float32", device="cpu")
    scorer = LogprobScorer(tmp_path, model=config, threads=1, max_tokens=10_000)
    samples = prompt_groups(num_prompt_tokens=(12, 30, 90))
    found = scorer.score(samples)
    scorer._model._decoder = None
    for ours, expected in zip(found, scorer.score(samples), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
