"""LoRA adapters in the trainer: against merged weights, and against gradients by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_events.config import LoRAConfig, ModelConfig, RunConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.models.adapters import ADAPTER, published_parameters
from relax_events.models.causal_lm import load_causal_lm
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import pack
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, plain_model, run_config, tiny_model

CPU = torch.device("cpu")
LORA = LoRAConfig(rank=3, alpha=7.0)
SAMPLES = make_samples(6, seed=1)


def lora_run(*, dtype: str = "float32", lora: LoRAConfig = LORA, **sections: Any) -> RunConfig:
    config = run_config(dtype=dtype, **sections)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def backend(**settings: Any) -> TorchBackend:
    return TorchBackend(lora_run(**settings), ranks=SingleRank())


def trained(**settings: Any) -> TorchBackend:
    """A backend after two steps."""
    found = backend(**settings)
    for _ in range(2):
        found.accumulate(SAMPLES)
        found.step()
    return found


def merged(path: Path, adapters: dict[str, Tensor], *, scaling: float) -> dict[str, Tensor]:
    """Base weights plus the product of each pair, by name of the weight in the base model."""
    weights = {name: one.detach() for name, one in plain_model(path).named_parameters()}
    for name, matrix in adapters.items():
        found = ADAPTER.fullmatch(name)
        assert found is not None
        if found["matrix"] == "A":
            other = adapters[name.replace(".lora_A.", ".lora_B.")]
            key = f"{found['module']}.weight"
            weights[key] = weights[key] + scaling * other.to(weights[key]) @ matrix.to(weights[key])
    return weights


def test_new_adapters_change_nothing() -> None:
    batch = pack(SAMPLES, vocab_size=256)
    plain = PolicyModel(tiny_model(), config=run_config().model, device=CPU)
    ours = PolicyModel(tiny_model(), config=lora_run().model, device=CPU)
    assert torch.equal(
        plain.token_logprobs(batch).logprobs.detach(), ours.token_logprobs(batch).logprobs.detach()
    )


def test_trained_adapters_compute_what_merged_weights_do() -> None:
    trainer = trained()
    batch = pack(SAMPLES, vocab_size=256)
    ours = PolicyModel(tiny_model(), config=lora_run().model, device=CPU)
    ours.replace_weights(collect_weights(trainer))
    whole = PolicyModel(tiny_model(), config=run_config().model, device=CPU)
    base = whole.token_logprobs(batch).logprobs.detach()
    whole.replace_weights(
        {
            name: tensor.float()
            for name, tensor in merged(
                tiny_model(), collect_weights(trainer), scaling=LORA.scaling
            ).items()
        }
    )
    expected = whole.token_logprobs(batch).logprobs.detach()
    assert float((expected - base).abs().max()) > 1e-2, "the adapters learned nothing"
    torch.testing.assert_close(
        ours.token_logprobs(batch).logprobs.detach(), expected, atol=1e-5, rtol=0
    )


def test_gradients_are_those_of_a_product_added_to_the_weights_and_of_nothing_else() -> None:
    model = PolicyModel(tiny_model(), config=lora_run().model, device=CPU, dtype=torch.float64)
    assert model.adapters is not None
    with model.adapters.randomised():
        values = {name: one.detach().clone() for name, one in model.adapters.parameters.items()}
        batch = pack(SAMPLES[:1], vocab_size=256)
        model.token_logprobs(batch).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert {name for name, one in model.module.named_parameters() if one.grad is not None} == set(
        values
    )
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    sample, plain = SAMPLES[0], plain_model(tiny_model())
    logits = torch.func.functional_call(
        plain,
        merged(tiny_model(), leaves, scaling=LORA.scaling),
        (torch.from_numpy(sample.tokens.astype(np.int64))[None],),
        tie_weights=True,
    ).logits[0]
    positions = np.flatnonzero(sample.loss_mask)
    chosen = logits[positions - 1].log_softmax(-1)
    targets = torch.from_numpy(sample.tokens[positions].astype(np.int64))
    chosen.gather(-1, targets[:, None]).sum().backward()
    for name, parameter in model.adapters.parameters.items():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, atol=1e-6, rtol=1e-6)


def test_weights_and_state_hold_adapters_alone() -> None:
    trainer = trained(dtype="bfloat16")
    names = set(collect_weights(trainer))
    assert names
    assert all(ADAPTER.fullmatch(name) for name in names)
    assert {one.dtype for one in collect_weights(trainer).values()} == {torch.bfloat16}
    state = trainer.state().tensors
    sized = {name for name, tensor in state.items() if tensor.numel() > 1}
    assert sized - {name for name in sized if name.startswith("rng.")} == {
        f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq") for name in names
    } | {"base_model.digest"}
    assert {state[f"model.{name}"].dtype for name in names} == {torch.float32}


def test_training_gives_the_same_bits_again_and_continues_from_a_state() -> None:
    whole, first = trained(), backend()
    first.accumulate(SAMPLES)
    first.step()
    saved = {name: tensor.clone() for name, tensor in first.state().tensors.items()}
    second = backend()
    second.load_state(TrainerState(policy_version=1, tensors=saved))
    second.accumulate(SAMPLES)
    second.step()
    for name, tensor in collect_weights(whole).items():
        assert torch.equal(tensor, collect_weights(second)[name])


def test_seed_of_the_run_draws_the_first_adapters() -> None:
    config = lora_run()
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 5})})
    mine, same, changed = (
        collect_weights(TorchBackend(one, ranks=SingleRank())) for one in (config, config, other)
    )
    assert all(torch.equal(tensor, same[name]) for name, tensor in mine.items())
    initial = [name for name in mine if ".lora_A." in name]
    assert not any(torch.equal(mine[name], changed[name]) for name in initial)


def test_state_of_another_base_model_is_refused(tmp_path: Path) -> None:
    saved = backend().state()
    path = make_tiny(tmp_path, corpus=["12=21"], hidden_size=32, seed=4)
    with pytest.raises(WeightsError, match="trained on a base model with digest"):
        TorchBackend(
            lora_run().model_copy(
                update={"model": lora_run().model.model_copy(update={"path": path})}
            ),
            ranks=SingleRank(),
        ).load_state(saved)


def test_adapters_of_other_modules_or_rank_are_refused() -> None:
    model = PolicyModel(tiny_model(), config=lora_run().model, device=CPU)
    few = collect_weights(backend(lora=LoRAConfig(rank=3, target_modules=("q_proj",))))
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.0.*set rank and target_modules"):
        model.replace_weights(few)
    with pytest.raises(WeightsError, match=r"must be \(3, 32\) as in the model, got \(4, 32\)"):
        model.replace_weights(collect_weights(backend(lora=LoRAConfig(rank=4))))


def test_target_modules_limit_the_adapters_and_must_exist() -> None:
    wanted = ("q_proj", "layers.1.mlp.up_proj")
    found = collect_weights(backend(lora=LoRAConfig(target_modules=wanted)))
    assert {name.partition(".lora_")[0] for name in found} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    for name in ("query", "embed_tokens", "lm_head"):
        with pytest.raises(ConfigError, match=rf"names '{name}'.*down_proj, gate_proj"):
            backend(lora=LoRAConfig(target_modules=("q_proj", name)))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"lora": {"dropout": 0.1}}, "dropout must be 0, got 0.1"),
        ({"lora": {"rank": 8}, "frozen": ["vision"]}, "has no use next to"),
    ],
)
def test_settings_without_meaning_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig(path=Path("model"), **section)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_language_models_of_other_families_get_adapters(tmp_path: Path, family: str) -> None:
    path = make_tiny(tmp_path, corpus=["12=21"], family=family, hidden_size=32, seed=3)
    model = PolicyModel(
        path, config=ModelConfig(path=path, device="cpu", dtype="float32", lora=LORA), device=CPU
    )
    batch = pack(SAMPLES, vocab_size=256, share_rows=model.shares_rows)
    model.token_logprobs(batch).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    names = set(published_parameters(model.module))
    with_gradient = {name for name, one in model.module.named_parameters() if one.grad is not None}
    assert with_gradient <= names
    assert {name for name in names if ".lora_B." in name} <= with_gradient
    assert not any("visual" in name or "expert" in name.split(".") for name in names)


def test_adapters_cost_no_gradient_and_no_moment_of_the_base() -> None:
    trainer = backend()
    flat = trainer._parameters
    base = plain_model(tiny_model())
    num_adapters = sum(tensor.numel() for tensor in collect_weights(trainer).values())
    assert flat.gradients.numel() == flat.values.numel() == num_adapters
    assert num_adapters < sum(one.numel() for one in base.parameters())
    loaded = load_causal_lm(tiny_model(), attention="sdpa", dtype=torch.float32, device=CPU)
    assert not set(published_parameters(loaded)) & set(collect_weights(trainer))
