"""Parts of engine `sglang` that need no server: weight folders, checksums, and
files of a request.
"""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import make_request, other_weights, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax_events.config import EngineConfig, SGLangConfig
from relax_events.engines.requests import SampleState, build_samples
from relax_events.engines.sglang import launch
from relax_events.engines.sglang.checkpoint import ModelFolder, find_non_finite
from relax_events.engines.sglang.engine import servers
from relax_events.engines.sglang.inflight import InflightRequest, UnknownVersion
from relax_events.engines.sglang.patches import model as model_intake
from relax_events.engines.sglang.patches import plugin
from relax_events.engines.sglang.weight_group import split_into_buckets
from relax_events.errors import ConfigError, WeightsError
from relax_events.events.parts import VersionSegment
from tests.unit.video_and_audio import expert_model, omni_model, whole_omni_model


def parameters(path: Path, loader: Any = AutoModelForCausalLM) -> dict[str, torch.Tensor]:
    """Return a model's tensors as a trainer publishes them."""
    return {name: value.detach() for name, value in loader.from_pretrained(path).named_parameters()}


def check_fits(path: Path, loader: Any) -> None:
    """Compare what is read of a folder with what transformers reads, tensor by tensor."""
    model = ModelFolder.read(path)
    match_tensors, own = model.match_tensors(parameters(path, loader)), model.tensors()
    assert match_tensors.keys() == own.keys() == model.shapes.keys()
    assert all(torch.equal(match_tensors[name], own[name]) for name in own)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_trainer_weights_are_mapped_to_the_tensor_names_of_the_folder(family: str) -> None:
    check_fits(tiny_model(family), AutoModelForCausalLM)


@pytest.mark.parametrize("is_turned", [False, True])
def test_fused_experts_are_read_as_transformers_reads_them(tmp_path: Path, is_turned: bool) -> None:
    """Qwen3-VL's mixture is published with its experts turned."""
    path = copytree(expert_model(), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    fused = [name for name in tensors if name.endswith(".experts.gate_up_proj")]
    assert {tuple(tensors[name].shape) for name in fused} == {(8, 64, 32)}
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in fused if is_turned}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    check_fits(path, AutoModelForImageTextToText)
    loaded: dict[str, torch.Tensor] = {}
    model_intake.load_mixture(
        lambda _, named: loaded.update(named),
        SimpleNamespace(config=SimpleNamespace(hidden_size=32)),
        tensors.items(),
    )
    assert {tuple(loaded[name].shape) for name in fused} == {
        (8, 32, 64)
    }  # as published, in any layout
    assert all(
        torch.equal(loaded[name], tensors[name] if is_turned else tensors[name].transpose(1, 2))
        for name in fused
    )
    assert all(loaded[name] is tensors[name] for name in tensors if ".experts." not in name)


def test_thinker_in_a_full_omni_model_has_the_same_tensor_names() -> None:
    alone, whole = (
        ModelFolder.read(path, records_experts=True) for path in (omni_model(), whole_omni_model())
    )
    assert (whole.shapes, whole.vocab_size, whole.num_layers, whole.experts) == (
        alone.shapes,
        alone.vocab_size,
        2,
        alone.experts,
    )
    assert whole.layout is not None
    for path in (omni_model(), whole_omni_model()):
        check_fits(path, Qwen3OmniMoeThinkerForConditionalGeneration)
    assert all(
        torch.equal(tensor, whole.tensors()[name]) for name, tensor in alone.tensors().items()
    )


def test_weights_of_another_model_are_rejected_by_tensor_name() -> None:
    model = ModelFolder.read(tiny_model())
    tensors = parameters(model.path)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=f"the weights lack {name} "):
        model.match_tensors({other: value for other, value in tensors.items() if other != name})
    with pytest.raises(
        WeightsError,
        match=r"the model has no tensor model.layers.9.norm \(1 unknown in all\); publish weights of",
    ):
        model.match_tensors(tensors | {"model.layers.9.norm": torch.zeros(1)})
    with pytest.raises(
        WeightsError, match=rf"{name} must be \(64, 32\) as in the model, got \(32, 64\)"
    ):
        model.match_tensors(tensors | {name: tensors[name].T})


def test_encoded_experts_have_zeros_for_layers_without_experts() -> None:
    model = replace(
        ModelFolder.read(tiny_model("qwen3_moe"), records_experts=True),
        num_layers=4,
        expert_layers=(1, 3),
    )
    chosen = np.array([[[7, 0], [2, 5]], [[1, 3], [6, 4]]], np.uint8)
    said = np.frombuffer(b64decode(model.encode_experts(chosen)), "<i4").reshape(2, 4, 2)
    assert said.tolist() == [[[0, 0], [7, 0], [0, 0], [2, 5]], [[0, 0], [1, 3], [0, 0], [6, 4]]]
    assert model.decode_experts(model.encode_experts(chosen)).tolist() == chosen.tolist()


def test_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"config.json can't be read: .* use the model folder as published",
    ):
        ModelFolder.read(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match=r"holds no language model in \*.safetensors"):
        ModelFolder.read(tmp_path)


def test_audio_model_without_audio_tokens_is_rejected(tmp_path: Path) -> None:
    path = copytree(omni_model(), tmp_path / "model")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    assert ModelFolder.read(path).extractor is not None
    name = settings.pop("audio_token")
    (path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"extra_special_tokens": {"audio_token": name}})
    )
    assert ModelFolder.read(path).extractor is not None
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ConfigError,
        match=r"tokenizer_config.json has no audio_token, which SGLang needs; .* or delete a tiny one",
    ):
        ModelFolder.read(path)


def test_written_version_folder_is_a_complete_model(tmp_path: Path) -> None:
    model = ModelFolder.read(tiny_model())
    weights, path = other_weights(1)
    folder = model.write_version(model.match_tensors(weights.tensors), tmp_path / "1")
    written, expected = ModelFolder.read(folder).tensors(), parameters(path)
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    with pytest.raises(
        WeightsError, match=r"can't be written .* set engine.sglang.weights_directory"
    ):
        model.write_version({}, tmp_path / "1")


def test_tensor_with_a_non_finite_value_is_named() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.tensor([1.0, torch.inf]), "n": torch.arange(3)}
    assert find_non_finite(tensors) == "b"
    assert find_non_finite({"a": tensors["a"], "n": tensors["n"]}) is None


def test_buckets_keep_all_experts_of_a_layer_together() -> None:
    own = ModelFolder.read(tiny_model("qwen3_moe")).tensors()
    names = sorted(own)
    buckets = list(split_into_buckets({name: own[name] for name in names}, max_bytes=5000))
    assert sorted(name for bucket in buckets for name in bucket) == names
    assert len(buckets) > 4
    for layer in ("model.layers.0.", "model.layers.1."):
        with_experts = [
            bucket
            for bucket in buckets
            if any(name.startswith(layer) and ".experts." in name for name in bucket)
        ]
        assert len(with_experts) == 1
    mixed = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2), "c": torch.zeros(1)}
    assert list(split_into_buckets(mixed, max_bytes=100)) == [["b", "c", "a"]]


def admitted(num_top: int = 0) -> SampleState:
    """Return a sample that is to be generated."""
    request = make_request(1, num_samples=1, max_new_tokens=9, num_top=num_top)
    return build_samples(
        request,
        first_order=0,
        running_ids=(),
        model=ModelFolder.read(tiny_model()),
        max_context_tokens=128,
    )[0]


def event(
    tokens: list[int],
    *,
    version_spans: list[tuple[str, int, int]] | None = None,
    reason: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a server sends: some tokens, and at the end whose they are."""
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-float(token), token, None] for token in tokens],
        "finish_reason": reason,
    }
    meta["output_top_logprobs"] = [
        [[-1.0, token, None], [-2.0, token + 1, None]] for token in tokens
    ]
    if version_spans is not None:
        meta["weight_versions"] = [
            {"version": name, "start": start, "end": end} for name, start, end in version_spans
        ]
    return {"output_ids": tokens, "meta_info": meta}


def test_finished_request_yields_tokens_with_their_policy_versions() -> None:
    sample = admitted(num_top=2)
    request = InflightRequest(sample, "rid", 0)
    request.add_event(event([1, 2]))
    request.mark_weight_update()
    request.add_event(
        event(
            [3, 4, 5],
            version_spans=[("zero", 0, 3), ("one", 3, 5)],
            reason={"type": "length", "length": 5},
        )
    )
    request.update_sample(versions={"zero": 0, "one": 1}, swapped={1})
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]
    assert sample.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert sample.segments == (VersionSegment(0, 3), VersionSegment(1, 2, kept_cache=True))
    assert sample.top_tokens.tolist() == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    again = InflightRequest(sample, "next", 1)
    assert again.prompt["input_ids"] == [*sample.prompt_tokens.tolist(), 1, 2, 3, 4, 5]
    assert again.prompt["max_new_tokens"] == 4
    again.add_event(
        event(
            [6],
            version_spans=[("one", 0, 1)],
            reason={"type": "abort", "message": "Abort", "status_code": None},
        )
    )
    again.update_sample(versions={"zero": 0, "one": 1}, swapped={1})
    assert sample.segments == (
        VersionSegment(0, 3),
        VersionSegment(1, 2, kept_cache=True),
        VersionSegment(1, 1),
    )


def test_interrupted_request_keeps_only_tokens_of_a_known_version() -> None:
    sample = admitted()
    request = InflightRequest(sample, "rid", 4)
    request.add_event(event([1, 2]))
    request.update_sample(versions={}, swapped=())
    assert (sample.tokens.tolist(), sample.segments) == ([1, 2], (VersionSegment(4, 2),))
    request = InflightRequest(sample, "next", 4)
    request.add_event(event([3]))
    request.mark_weight_update()
    request.add_event(event([7]))  # of the old or the new weights: unknown
    request.update_sample(versions={}, swapped=())
    assert (sample.tokens.tolist(), sample.segments) == ([1, 2, 3], (VersionSegment(4, 3),))


def test_tokens_of_never_loaded_weights_are_rejected() -> None:
    sample = admitted()
    request = InflightRequest(sample, "rid", 0)
    request.add_event(
        event([1], version_spans=[("default", 0, 1)], reason={"type": "length", "length": 1})
    )
    with pytest.raises(
        UnknownVersion,
        match="the server reports tokens of weights 'default', which were never loaded",
    ):
        request.update_sample(versions={"zero": 0}, swapped=())
    assert len(sample.tokens) == 0


def test_rejected_request_reports_the_servers_reason() -> None:
    request = InflightRequest(admitted(), "rid", 0)
    request.add_event(
        event(
            [],
            version_spans=[],
            reason={"type": "abort", "message": "too long", "status_code": 400},
        )
    )
    assert (request.has_finished, request.rejection) == (True, "too long")


@pytest.mark.parametrize(
    ("has_gpu", "environment", "expected"),
    [(False, "", plugin.PLATFORM), (True, "", None), (False, "1", None)],
)
def test_plugin_chooses_its_platform_only_on_plain_cpu_machines(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, environment: str, expected: str | None
) -> None:
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: has_gpu))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", environment)
    assert plugin.choose_platform() == expected
    if expected is None:
        plugin.replace_cuda_calls()  # imports nothing of SGLang, which is not there


def test_missing_logprob_is_kept_as_nan() -> None:
    request = InflightRequest(admitted(), "rid", 0)
    broken = event([1])
    broken["meta_info"]["output_token_logprobs"] = [[None, 1, None]]
    request.add_event(broken)
    assert np.isnan(request.logprobs).all()


@pytest.mark.parametrize(
    ("arguments", "by_server", "gpus", "bases"),
    [
        ((), (), [(0, 1, 1)], [None]),
        (("--tp-size", "4"), (), [(0, 4, 4)], [None]),
        (("--tensor-parallel-size=2", "--pp-size", "2"), (), [(0, 4, 4)], [None]),
        (("--tp", "2", "--dp-size", "2"), (), [(0, 4, 2)], [None]),
        (("--tp", "2", "--dp-size", "2", "--enable-dp-attention"), (), [(0, 2, 2)], [None]),
        (("--tp-size", "2", "--tp-size", "1"), (), [(0, 1, 1)], [None]),
        (("--tp-size", "2"), ((), ()), [(0, 2, 2), (2, 2, 2)], [None, "2"]),
        ((), (("--tp-size", "2"), (), ()), [(0, 2, 2), (2, 1, 1), (3, 1, 1)], [None, "2", "3"]),
        ((), (("--base-gpu-id", "1"), ("--base-gpu-id=0",)), [(1, 1, 1), (0, 1, 1)], ["1", None]),
        (("--base-gpu-id=1",), (), [(1, 1, 1)], [None]),
    ],
)
def test_servers_of_a_worker_have_gpus_of_their_own(
    arguments: tuple[str, ...],
    by_server: tuple[tuple[str, ...], ...],
    gpus: list[tuple[int, int, int]],
    bases: list[str | None],
) -> None:
    section = SGLangConfig(
        arguments=arguments, server_arguments=by_server, num_servers=max(len(by_server), 1)
    )
    assert section.place_servers() == gpus
    engine = EngineConfig(name="sglang", sglang=section)
    assert engine.num_devices == max(first + count for first, count, _ in gpus)
    assert engine.devices_per_copy == min(per_copy for *_, per_copy in gpus)
    added = [
        one.arguments[one.arguments.index("--base-gpu-id") + 1]
        if "--base-gpu-id" in one.arguments
        else None
        for one in servers(section).values()
    ]
    assert added == bases


def test_engines_without_servers_of_their_own_have_one_gpu() -> None:
    arguments = ("--tp-size", "4")
    attached = SGLangConfig(arguments=arguments, urls=("http://gpu-1:30000",))
    assert EngineConfig(name="sglang", sglang=attached).num_devices == 1
    assert EngineConfig(sglang=SGLangConfig(arguments=arguments)).num_devices == 1


@pytest.mark.parametrize(
    "of_gpus",
    [("--base-gpu-id", "1"), ("--base-gpu-id=1",), ("--enable-memory-saver",)],
)
def test_server_without_an_accelerator_gets_no_arguments_of_gpus(of_gpus: tuple[str, ...]) -> None:
    kept = (("--tp-size=1",), ("--files", "a", "b"), ("--sleep-on-idle",), ("--base", "{}"))
    for place in range(len(kept) + 1):
        arguments = [*sum(kept[:place], ()), *of_gpus, *sum(kept[place:], ())]
        assert launch.leave_out_gpus(arguments) == list(sum(kept, ()))


@pytest.mark.parametrize("arguments", [("--tp-size", "two"), ("--tp-size",), ("--pp-size=",)])
def test_sizes_that_are_no_numbers_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"engine\.sglang\.arguments: --.p or --.p-size or .* takes a whole number"
    ):
        SGLangConfig(arguments=arguments)


def test_each_sglang_server_has_its_own_config_section() -> None:
    own = SGLangConfig(
        num_servers=2,
        arguments=("--tp-size", "2"),
        server_arguments=(("--base-gpu-id", "0"), ("--base-gpu-id", "2")),
    )
    assert {name: section.arguments for name, section in servers(own).items()} == {
        "server-0": ("--tp-size", "2", "--base-gpu-id", "0"),
        "server-1": ("--tp-size", "2", "--base-gpu-id", "2"),
    }
    urls = ("http://10.0.0.7:30000", "http://10.0.0.8:30000")
    assert {name: section.urls for name, section in servers(SGLangConfig(urls=urls)).items()} == {
        url: (url,) for url in urls
    }
    assert list(servers(SGLangConfig())) == ["server-0"]


def test_inconsistent_sglang_server_settings_are_rejected() -> None:
    with pytest.raises(
        ValueError,
        match=r"num_servers = 1 needs as many server_arguments, got 2; set engine.sglang.num_servers",
    ):
        SGLangConfig(server_arguments=((), ()))
    with pytest.raises(ValueError, match=r"engine.sglang.urls has http://a:1 twice; leave one out"):
        SGLangConfig(urls=("http://a:1", "http://b:1", "http://a:1"))
