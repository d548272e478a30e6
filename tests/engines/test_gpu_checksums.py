"""A server whose checksums are those of a GPU: SGLang hashes its tensors with the kernel for GPUs, in
Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.lifecycle import ServerLifecycle
from relax_events.engines.sglang.server import SGLangServer
from relax_events.errors import WeightsError
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.weights import Weights
from relax_events.weights.artifact_writer import weights_digest
from tests.folders import kept_folder
from tests.gpu_digests import interpreting_interpreter

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def model_of(family: str, seed: int) -> Path:
    """Write a random model whose heads and experts two ranks can share; a CPU pads experts that
    can't be divided into 32 rows for each.
    """
    path = make_tiny(
        kept_folder("gpu-checksums") / f"{family}-{seed}",
        corpus=["12=21"],
        family=family,
        num_layers=1,
        seed=seed,
    )
    if family == "qwen3_moe":
        config = AutoConfig.from_pretrained(path, moe_intermediate_size=64, num_experts=4)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def weights_of(policy_version: int, *, family: str, seed: int) -> Weights:
    """Return the weights of another model as a version."""
    model = AutoModelForCausalLM.from_pretrained(model_of(family, seed))
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    return Weights(policy_version, tensors, weights_digest(tensors))


def lifecycle_of(engine: SGLangEngine) -> ServerLifecycle:
    """Return the lifecycle of the engine's only server."""
    (replica,) = engine._replicas
    server = replica._engine
    assert isinstance(server, SGLangServer)
    return server._lifecycle


@pytest.mark.parametrize(
    ("family", "dtype", "arguments"),
    [
        ("qwen3", "bfloat16", ()),
        ("qwen3_moe", "float32", ("--tp-size", "2", "--ep-size", "2")),
    ],
)
def test_weights_of_a_server_that_hashes_as_on_a_gpu_are_proven(
    family: str,
    dtype: Literal["float32", "bfloat16"],
    arguments: tuple[str, ...],
    sglang_python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    path = model_of(family, 0)
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    server = SGLangConfig(
        python=interpreting_interpreter(sglang_python, plugin),
        weights_directory=tmp_path,
        arguments=arguments,
        stall_seconds=500.0,
    )
    config = EngineConfig(threads=1, max_running_samples=8, max_context_tokens=512, sglang=server)
    engine = SGLangEngine(path, config=config, model=ModelConfig(dtype=dtype, path=path))
    try:
        engine.load_weights(weights_of(1, family=family, seed=7))
        lifecycle = lifecycle_of(engine)
        recipes = lifecycle._checksums._recipes
        assert len(recipes) > 8
        assert all(recipe.is_on_gpu for recipe in recipes.values())
        assert lifecycle._is_proven

        async def load_nothing(*_: object, **__: object) -> None: ...

        monkeypatch.setattr(lifecycle, "_put", load_nothing)
        with pytest.raises(WeightsError, match="the server has other values in "):
            engine.load_weights(weights_of(2, family=family, seed=9))
    finally:
        engine.close()
