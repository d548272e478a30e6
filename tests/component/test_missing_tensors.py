"""A folder without a tensor of its model is refused by the tensor's name: transformers would draw
the tensor at random, in each process another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from relax_events.config import MediaConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.launcher.checks import check_run
from relax_events.models.causal_lm import (
    build_causal_lm,
    load_causal_lm,
    require_all_tensors,
)
from relax_events.models.families import read_family
from relax_events.packages.examples.tiny_models import FAMILY_SETTINGS, make_tiny

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MakeRunConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a maker of whole folders of a family."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        return make_tiny(folder / "model", corpus=["12=21"], family=family, hidden_size=32)

    return make


def rewrite(
    source: Path,
    target: Path,
    *,
    without: Collection[str] = (),
    changed: Mapping[str, torch.Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Copy a model folder without some tensors, and return the copy."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors") | dict(changed or {})
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | dict(settings or {})
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(folder: Path, *, needs_head: bool = True) -> None:
    """Load a folder's model as workers do."""
    load_causal_lm(
        folder,
        attention="sdpa",
        dtype=torch.float32,
        device=torch.device("cpu"),
        loader=read_family(folder, MediaConfig()).loader,
        needs_head=needs_head,
    )


def build(folder: Path, *, needs_head: bool = True) -> None:
    """Load a folder's model as ranks of a sharded one do."""
    loader = read_family(folder, MediaConfig()).loader
    model, weights = build_causal_lm(
        folder, attention="sdpa", dtype=torch.float32, loader=loader, needs_head=needs_head
    )
    assert weights is not None
    if needs_head:
        weights.fill(model, device=torch.device("cpu"))


def read_headers(folder: Path, *, needs_head: bool = True) -> None:
    """Compare a folder's tensors as the doctor does."""
    loader = read_family(folder, MediaConfig()).loader
    require_all_tensors(folder, loader=loader, needs_head=needs_head)


@pytest.mark.parametrize("read", [load, build, read_headers])
def test_an_untied_head_that_the_folder_lacks_is_named(
    read: Callable[[Path], None], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = rewrite(whole("qwen3"), tmp_path / "model", without=[HEAD])
    with pytest.raises(
        ConfigError, match=r"lacks 1 of the tensors .*: lm_head\.weight; .*tie_word"
    ):
        read(folder)


@pytest.mark.parametrize("read", [load, build, read_headers])
@pytest.mark.parametrize("left_out", [HEAD, EMBEDDING])
def test_tied_weights_are_there_once(
    read: Callable[[Path], None],
    left_out: str,
    whole: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    tied = {"tie_word_embeddings": True}
    read(rewrite(whole("qwen3"), tmp_path / "model", without=[left_out], settings=tied))
    folder = rewrite(whole("qwen3"), tmp_path / "model", without=[HEAD, EMBEDDING], settings=tied)
    with pytest.raises(ConfigError, match="lacks"):
        read(folder)


@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_whole_folders_of_all_families_pass(family: str, whole: Callable[[str], Path]) -> None:
    read_headers(whole(family))
    load(whole(family))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5"])
@given(data=st.data())
@settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_every_tensor_is_missed(
    family: str, data: st.DataObject, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    names = sorted(load_file(whole(family) / "model.safetensors"))
    without = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    folder = rewrite(whole(family), tmp_path / "model", without=without)
    for read in (load, build, read_headers):
        with pytest.raises(ConfigError) as caught:
            read(folder)
        joined = [".experts." if ".experts." in name else name for name in without]
        assert any(name in str(caught.value) for name in joined), without


@pytest.mark.parametrize("read", [load, build, read_headers])
def test_a_tensor_of_another_shape_is_named(
    read: Callable[[Path], None], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    changed = {"model.norm.weight": torch.ones(16)}
    folder = rewrite(whole("qwen3"), tmp_path / "model", changed=changed)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight as \[16\], .* describes \[32\]"):
        read(folder)


def test_a_head_of_its_own_that_the_configuration_ties_is_refused(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": True}
    differing = rewrite(whole("qwen3"), tmp_path / "model", settings=tied)
    for read in (load, build):
        with pytest.raises(ConfigError, match=r"lm_head\.weight .*set tie_word_embeddings = false"):
            read(differing)
    same = {HEAD: load_file(whole("qwen3") / "model.safetensors")[EMBEDDING].clone()}
    folder = rewrite(whole("qwen3"), tmp_path / "model", changed=same, settings=tied)
    load(folder)
    read_headers(folder)


@pytest.mark.parametrize("read", [load, build, read_headers])
def test_integer_weights_need_a_quantization(
    read: Callable[[Path], None], whole: Callable[[str], Path], tmp_path: Path
) -> None:
    changed = {"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    folder = rewrite(whole("qwen3"), tmp_path / "model", changed=changed)
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight as int8 \[32\].*quantization_config"
    ):
        read(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(
    value: float, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    weight = torch.ones(32)
    weight[7] = value
    folder = rewrite(whole("qwen3"), tmp_path / "model", changed={"model.norm.weight": weight})
    for read in (load, build):
        with pytest.raises(ConfigError, match=r"model\.norm\.weight with NaN or infinite values"):
            read(folder)


def test_a_critic_needs_no_head(whole: Callable[[str], Path], tmp_path: Path) -> None:
    headless = rewrite(whole("qwen3"), tmp_path / "headless", without=[HEAD])
    for read in (load, build, read_headers):
        read(headless, needs_head=False)
    folder = rewrite(whole("qwen3"), tmp_path / "model", without=[HEAD, "model.norm.weight"])
    for read in (load, build):
        with pytest.raises(ConfigError, match=r"lacks 1 .*: model\.norm\.weight;"):
            read(folder, needs_head=False)


def test_more_tensors_than_the_model_has_are_no_fault(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """As layers for speculative decoding, or a talker."""
    changed = {"mtp.layers.0.norm.weight": torch.ones(4)}
    folder = rewrite(whole("qwen3"), tmp_path / "model", changed=changed)
    for read in (load, build, read_headers):
        read(folder)


def test_the_doctor_names_what_is_missing(
    make_run_config: MakeRunConfig, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = rewrite(whole("qwen3"), tmp_path / "broken", without=[HEAD])
    for path, is_good in ((whole("qwen3"), True), (folder, False)):
        findings, _ = check_run(make_run_config(model={"path": path}))
        (finding,) = [one for one in findings if one.what == "tensors"]
        assert (finding.is_good, str(path) in finding.text) == (is_good, True), finding
    assert "lm_head.weight" in finding.text


def test_the_doctor_names_a_target_of_adapters_that_the_model_lacks(
    make_run_config: MakeRunConfig, whole: Callable[[str], Path]
) -> None:
    texts = []
    for target in ("q_proj", "query_proj"):
        lora = {"rank": 2, "target_modules": [target]}
        findings, _ = check_run(make_run_config(model={"path": whole("qwen3"), "lora": lora}))
        (finding,) = [one for one in findings if one.what == "tensors"]
        texts.append(finding.text if not finding.is_good else "")
    assert texts[0] == ""
    assert "target_modules names 'query_proj', but the linear layers of the language" in texts[1]
