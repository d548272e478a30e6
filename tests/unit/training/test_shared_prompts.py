"""Prompts that are computed once for a prompt group: every sample attends to its own tokens alone,
and results do not change.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.parts import MediaRef
from relax_events.examples.tiny_models import make_tiny
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch import row_layout
from relax_events.training.batch.packing import pack
from relax_events.training.batch.row_layout import PromptSharing
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, plain_logprobs, run_config, tiny_model

FREE = PromptSharing(cell_cost=0.0)
DEAR = PromptSharing(cell_cost=1e6)


def in_groups(samples, sizes):
    """Return samples the prompt of the first of their prompt group."""
    grouped, rest = [], iter(samples)
    for number, size in enumerate(sizes):
        members = [sample for sample, _ in zip(rest, range(size), strict=False)]
        for index, sample in enumerate(members):
            prompt, own = (
                members[0].tokens[: members[0].num_prompt_tokens],
                slice(sample.num_prompt_tokens, None),
            )
            zeros = np.zeros(len(prompt), np.float32)
            arrays = {
                name: np.concatenate(
                    [zeros.astype(getattr(sample, name).dtype), getattr(sample, name)[own]]
                )
                for name in (
                    "loss_mask",
                    "rollout_logprobs",
                    "actor_logprobs",
                    "ref_logprobs",
                    "advantages",
                )
            }
            tokens = np.concatenate([prompt, sample.tokens[own]])
            grouped.append(
                dataclasses.replace(
                    sample,
                    key=dataclasses.replace(
                        sample.key, prompt_group_id=f"g{number}", sample_id=f"g{number}/{index}"
                    ),
                    num_prompt_tokens=len(prompt),
                    tokens=tokens,
                    temperature=0.5 + 0.1 * index,
                    **arrays,
                )
            )
    return grouped


SAMPLES = in_groups(make_samples(13, seed=4), [4, 1, 6, 2])


def load(dtype=torch.float64, path=None, attention="sdpa"):
    config = run_config().model.model_copy(update={"attention": attention})
    return PolicyModel(path or tiny_model(), config=config, device=torch.device("cpu"), dtype=dtype)


@given(seed=st.integers(0, 50), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_last_token_attends_only_to_its_own_sample(seed, sizes):
    samples = in_groups(make_samples(sum(sizes), seed=seed), sizes)
    batch = pack(samples, vocab_size=256, sharing=FREE)
    apart = pack(samples, vocab_size=256)
    assert batch.input_ids.size <= apart.input_ids.size
    if batch.units is None:
        return
    np.testing.assert_array_equal(batch.targets, apart.targets)
    unit, branch = batch.units, batch.branches
    seen = (unit[:, :, None] == unit[:, None]) & (
        (branch[:, None] == 0) | (branch[:, :, None] == branch[:, None])
    )
    seen &= np.tri(unit.shape[1], dtype=bool)
    ends = np.cumsum(batch.num_loss_tokens) - 1
    for sample, end in zip(samples, ends, strict=True):
        row, column = divmod(int(batch.loss_positions[end]), batch.units.shape[1])
        visible = np.flatnonzero(seen[row, column])
        last = int(np.flatnonzero(sample.loss_mask)[-1])
        np.testing.assert_array_equal(batch.input_ids[row, visible], sample.tokens[:last])
        np.testing.assert_array_equal(batch.position_ids[row, visible], np.arange(last))


@pytest.mark.parametrize(
    ("digests", "num_prompt_media", "is_shared"),
    [((1, 1), 1, True), ((1, 2), 1, False), ((1, 2), 0, True)],
)
def test_equal_tokens_with_other_images_are_other_prompts(digests, num_prompt_media, is_shared):
    samples = [
        dataclasses.replace(
            sample,
            media=[MediaRef("file:///a.png", bytes([digest]) * 32, "image/png", 3)],
            num_prompt_media=num_prompt_media,
        )
        for sample, digest in zip(in_groups(make_samples(2, seed=4), [2]), digests, strict=True)
    ]
    batch = pack(samples, vocab_size=256, sharing=FREE)
    assert (batch.units is not None) == is_shared


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shared_prompt_logprobs_match_unpacked_samples(attention):
    batch = pack(SAMPLES, vocab_size=256, sharing=FREE)
    assert batch.units is not None
    logprobs = load(attention=attention).token_logprobs(batch).logprobs
    expected = np.concatenate(
        [
            plain_logprobs(sample.tokens, sample.temperature)[sample.loss_mask == 1]
            for sample in SAMPLES
        ]
    )
    np.testing.assert_allclose(
        logprobs.detach().numpy(), expected, atol=5e-6
    )  # temperatures are float32, and so is the eager softmax


def test_gradients_match_those_without_shared_prompts():
    together, apart = load(), load()
    for model, sharing in ((together, FREE), (apart, None)):
        model.token_logprobs(
            pack(SAMPLES, vocab_size=256, sharing=sharing)
        ).logprobs.square().sum().backward()
    for mine, other in zip(together.module.parameters(), apart.module.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, rtol=1e-5, atol=2e-5
        )  # the model norms in float32


def test_prompts_are_not_shared_where_attention_would_cost_more():
    assert pack(SAMPLES, vocab_size=256, sharing=DEAR).units is None


def test_prompts_are_not_shared_where_the_mask_would_be_too_large(monkeypatch):
    monkeypatch.setattr(row_layout, "MAX_MASK_CELLS", 100)
    assert pack(SAMPLES, vocab_size=256, sharing=FREE).units is None


def test_samples_of_a_group_with_different_prompts_keep_their_own():
    other = dataclasses.replace(
        SAMPLES[1],
        tokens=np.where(
            np.arange(len(SAMPLES[1].tokens)) == 0, SAMPLES[1].tokens + 1, SAMPLES[1].tokens
        ),
    )
    assert pack([SAMPLES[0], other], vocab_size=257, sharing=FREE).units is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_model_shares_prompts_when_branches_do_not_leak(dtype):
    sharing = load(dtype).prompt_sharing
    assert sharing is not None
    assert 0 < sharing.cell_cost < 1


def test_sliding_window_model_shares_no_prompts(tmp_path):
    path = make_tiny(tmp_path / "model", corpus=["12=21"], hidden_size=32, seed=3)
    config = json.loads((path / "config.json").read_text())
    sliding = {
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
    }
    (path / "config.json").write_text(json.dumps(config | sliding))
    assert load(path=path).prompt_sharing is None


def test_model_that_lets_branches_leak_shares_no_prompts(monkeypatch):
    monkeypatch.setattr(PolicyModel, "_shared_prompt_mask", lambda self, units, branches: None)
    assert load().prompt_sharing is None


def test_train_step_is_equal_with_and_without_shared_prompts():
    metrics, weights = [], []
    for share_prompts in (True, False):
        config = run_config(
            algorithm={"kl_coefficient": 0.1}, trainer={"share_prompts": share_prompts}
        )
        backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
        backend.accumulate(SAMPLES)
        metrics.append(backend.step())
        weights.append(collect_weights(backend))
    assert (
        metrics[0].num_tokens
        == metrics[1].num_tokens
        == sum(len(sample.tokens) for sample in SAMPLES)
    )
    assert metrics[0].loss == pytest.approx(metrics[1].loss, rel=1e-6)
    assert metrics[0].grad_norm == pytest.approx(metrics[1].grad_norm, rel=1e-6)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-6, atol=1e-6)
