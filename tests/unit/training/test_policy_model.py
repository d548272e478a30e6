"""The packed forward against plain forwards of one sequence at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_events.errors import ConfigError, WeightsError
from relax_events.models.causal_lm import choose_device
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend import chunked_head, policy_model
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.batch.packing import pack
from tests.event_samples import changed
from tests.unit.trainer_samples import (
    make_samples,
    plain_logprobs,
    plain_model,
    run_config,
    tiny_model,
)

CPU = torch.device("cpu")
SAMPLES = [
    changed(sample, temperature=0.5 + 0.1 * index)
    for index, sample in enumerate(make_samples(12, seed=1))
]


def load(dtype=torch.float64, attention="sdpa", path=None):
    return PolicyModel(
        path or tiny_model(),
        config=run_config().model.model_copy(update={"attention": attention}),
        device=CPU,
        dtype=dtype,
    )


def one_by_one():
    return np.concatenate(
        [
            plain_logprobs(sample.tokens, sample.temperature)[sample.loss_mask == 1]
            for sample in SAMPLES
        ]
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share_rows", [True, False])
def test_token_logprobs_match_unpacked_samples(attention, share_rows):
    logprobs = (
        load(attention=attention)
        .token_logprobs(pack(SAMPLES, vocab_size=256, share_rows=share_rows))
        .logprobs
    )
    np.testing.assert_allclose(
        logprobs.detach().numpy(), one_by_one(), atol=1e-6
    )  # temperatures are float32


def test_token_logprobs_match_unpacked_samples_in_float32():
    logprobs = load(torch.float32).token_logprobs(pack(SAMPLES, vocab_size=256)).logprobs
    np.testing.assert_allclose(logprobs.detach().numpy(), one_by_one(), atol=2e-5)


def test_token_logprobs_give_the_entropy_of_the_tempered_distribution():
    sample = SAMPLES[3]
    entropies = load().token_logprobs(pack([sample], vocab_size=256)).entropies
    with torch.no_grad():
        logits = (
            plain_model(tiny_model())(
                torch.from_numpy(sample.tokens.astype(np.int64))[None]
            ).logits[0]
            / sample.temperature
        )
    expected = torch.distributions.Categorical(
        logits=logits[np.flatnonzero(sample.loss_mask) - 1]
    ).entropy()
    np.testing.assert_allclose(entropies.numpy(), expected.numpy(), atol=1e-6)


def test_token_logprobs_and_gradients_are_the_same_when_the_head_works_in_chunks(monkeypatch):
    batch = pack(SAMPLES, vocab_size=256)
    whole, pieces = load(), load()
    result = whole.token_logprobs(batch)
    result.logprobs.square().sum().backward()
    monkeypatch.setattr(chunked_head, "MAX_LOGITS_ELEMENTS", 5 * whole.vocab_size)
    chunked = pieces.token_logprobs(batch)
    chunked.logprobs.square().sum().backward()
    torch.testing.assert_close(chunked.logprobs, result.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(chunked.entropies, result.entropies, rtol=0, atol=1e-12)
    for mine, other in zip(pieces.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_model_shares_rows_when_packed_samples_do_not_leak(dtype):
    assert load(dtype).shares_rows


def test_model_gives_each_sample_its_own_row_when_packed_samples_leak(monkeypatch):
    def leaky(self, input_ids, position_ids, tree=None):
        mask = torch.ones_like(
            input_ids
        )  # an all-ones mask makes transformers 5 forget the packing
        return self.module.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state

    monkeypatch.setattr(PolicyModel, "_hidden", leaky)
    assert not load().shares_rows


def test_model_with_a_non_linear_output_head_is_rejected(monkeypatch):
    class Doubling(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return 2 * self.inner(hidden)

    original = policy_model.load_causal_lm

    def scaled(path, **options):
        module = original(path, **options)
        head = module.lm_head
        monkeypatch.setattr(type(module), "get_output_embeddings", lambda self: Doubling(head))
        return module

    monkeypatch.setattr(policy_model, "load_causal_lm", scaled)
    with pytest.raises(ConfigError, match="computes its logits by more than a linear head"):
        load()


def test_model_names_the_folder_when_it_is_missing():
    with pytest.raises(
        ConfigError, match=r"model.path = /nowhere holds no config.json; .*relax models prepare"
    ):
        load(path=Path("/nowhere"))


def test_model_error_names_the_folder_with_an_unsupported_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(ConfigError, match="can't be loaded as a causal language model"):
        load(path=tmp_path)


def test_replace_weights_gives_the_other_models_logprobs(tmp_path):
    model = load(torch.float32)
    other = load(torch.float32, path=make_tiny(tmp_path, corpus=["12=21"], hidden_size=32, seed=4))
    model.replace_weights(dict(other.module.named_parameters()))
    batch = pack(SAMPLES, vocab_size=256)
    assert torch.equal(model.token_logprobs(batch).logprobs, other.token_logprobs(batch).logprobs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "the weights lack model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "the model has no tensor extra"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight must be \(32,\) as in the model, got \(3,\)",
        ),
    ],
)
def test_replace_weights_keeps_the_old_weights_when_the_new_ones_do_not_match(change, text):
    model = load(torch.float32)
    before = {name: value.clone() for name, value in model.module.named_parameters()}
    tensors = {name: torch.zeros_like(value) for name, value in before.items()}
    change(tensors)
    with pytest.raises(WeightsError, match=text):
        model.replace_weights(tensors)
    assert all(torch.equal(value, before[name]) for name, value in model.module.named_parameters())


def test_choose_device_error_names_an_unknown_device():
    with pytest.raises(ConfigError, match=r"model.device = 'abacus' is not a device"):
        choose_device("abacus")
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(("name", "num_gpus"), [("cuda", 0), ("cuda:1", 1)])
def test_choose_device_refuses_a_gpu_that_is_not_here(
    name: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    text = rf"model.device = '{name}' asks for a GPU that is not available: torch .* sees {num_gpus} GPUs; give the process a GPU"
    with pytest.raises(ConfigError, match=text):
        choose_device(name)
    assert choose_device("auto", local_rank=0).type == ("cuda" if num_gpus else "cpu")
