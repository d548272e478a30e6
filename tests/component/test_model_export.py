"""A version of a run becomes a folder that transformers loads, with the trainer's log-probabilities,
whatever it is read from and however the base folder names its tensors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from published_model import TrainedRun, make_base, rewrite, token_logprobs
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax_events.errors import ConfigError, ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.media.token_layout import MEDIA_FAMILIES
from relax_events.models.tokenizer_folder import read_folder_template
from relax_events.objects import ObjectStore
from relax_events.objects.download import download
from relax_events.ops.model_export.export import Export, export_version
from relax_events.runtime.run_description import build_run_description
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.weights.artifact_writer import weights_digest

FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
)
SMALL_SHARD = 20_000
TURNS = [{"role": "user", "content": "hello"}]


def loader_of(family: str) -> Any:
    if "omni" in family:
        return Qwen3OmniMoeThinkerForConditionalGeneration
    return AutoModelForImageTextToText if family in MEDIA_FAMILIES else AutoModelForCausalLM


def load(folder: Path, family: str = "qwen3", **settings: Any) -> Any:
    return loader_of(family).from_pretrained(folder, dtype="auto", **settings)


def exported(run: TrainedRun, folder: Path, version: int = 2, **settings: Any) -> Export:
    return export_version(run.config, run.versions, version, folder, **settings)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [safetensors.torch.load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("source", ["weights", "checkpoint"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_model_has_the_trainers_logprobs(tmp_path: Path, family: str, source: str) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base", family))
    if source == "checkpoint":
        run.delete_weights(2)
    done = exported(run, tmp_path / "out", max_shard_bytes=SMALL_SHARD)
    assert (done.source, done.policy_version) == (source, 2)
    assert done.num_trained == done.num_tensors
    loaded = load(tmp_path / "out", family, attn_implementation="sdpa")
    own = run.logprobs()
    assert torch.allclose(token_logprobs(loaded), own, atol=1e-5, rtol=0)
    base = load(tmp_path / "base", family, attn_implementation="sdpa")
    assert (token_logprobs(base) - own).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_has_the_names_shapes_and_files_of_the_base_folder(
    tmp_path: Path, family: str
) -> None:
    base = make_base(tmp_path / "base", family)
    run = TrainedRun(tmp_path / "run", base)
    done = exported(run, tmp_path / "out", max_shard_bytes=SMALL_SHARD)
    mine, theirs = tensors_of(tmp_path / "out"), tensors_of(base)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()
    }
    files = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) == done.num_files > 1
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == mine.keys()
    assert index["metadata"]["total_size"] == done.num_bytes
    assert set(index["weight_map"].values()) == shards
    small = {path.name for path in base.iterdir() if path.suffix != ".safetensors"}
    assert files == shards | small | {"README.md", "model.safetensors.index.json"}
    for name in small:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("12=21").input_ids
    assert ids == AutoTokenizer.from_pretrained(base)("12=21").input_ids


def test_delta_is_applied_to_its_bases_and_checked_by_the_digest(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3_moe")
    run = TrainedRun(
        tmp_path / "run", base, dtype="bfloat16", num_versions=4, full_snapshot_interval=4
    )
    manifest = json.loads(run.store.get(run.versions.artifacts[3]))
    assert manifest["changed"]
    done = exported(run, tmp_path / "out", version=3)
    assert done.weights_digest == run.versions.digests[3].hex()
    loaded = load(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert weights_digest(dict(loaded.named_parameters())) == run.versions.digests[3]


def test_checkpoint_of_master_weights_gives_the_published_bits(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"), dtype="bfloat16")
    first = exported(run, tmp_path / "first")
    run.delete_weights(2)
    second = exported(run, tmp_path / "second")
    assert (first.source, second.source) == ("weights", "checkpoint")
    mine, theirs = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "second")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert json.loads((tmp_path / "first/config.json").read_text())["dtype"] == "bfloat16"


def test_tied_head_is_left_out_or_repeated_as_in_the_base_folder(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", is_tied=True)
    run = TrainedRun(tmp_path / "run", base)
    exported(run, tmp_path / "out")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    assert torch.allclose(token_logprobs(load(tmp_path / "out")), run.logprobs(), atol=1e-5)
    rewrite(
        base,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    exported(run, tmp_path / "repeated")
    repeated = tensors_of(tmp_path / "repeated")
    assert torch.equal(repeated["lm_head.weight"], repeated["model.embed_tokens.weight"])
    assert torch.allclose(token_logprobs(load(tmp_path / "repeated")), run.logprobs(), atol=1e-5)


def test_complete_omni_folder_keeps_its_talker(tmp_path: Path) -> None:
    family = "qwen3_omni_moe_thinker"
    base = make_base(tmp_path / "base", family)
    run = TrainedRun(tmp_path / "run", base)

    def complete(tensors: dict[str, torch.Tensor]) -> None:
        whole = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(whole | {"talker.model.norm.weight": torch.full((3,), 7.0)})

    rewrite(base, complete)
    done = exported(run, tmp_path / "out")
    mine = tensors_of(tmp_path / "out")
    assert mine.keys() == tensors_of(base).keys()
    assert done.num_tensors - done.num_trained == 1
    assert mine["talker.model.norm.weight"].tolist() == [7.0] * 3
    weights = collect_weights(run.backend)
    assert torch.equal(mine["thinker.lm_head.weight"], weights["lm_head.weight"])
    fused = weights["model.layers.1.mlp.experts.gate_up_proj"]
    gate, up = fused[5].chunk(2)
    assert torch.equal(mine["thinker.model.layers.1.mlp.experts.5.gate_proj.weight"], gate)
    assert torch.equal(mine["thinker.model.layers.1.mlp.experts.5.up_proj.weight"], up)


def test_transposed_experts_are_written_transposed(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3_vl_moe")
    run = TrainedRun(tmp_path / "run", base)

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    rewrite(base, turn)
    exported(run, tmp_path / "out")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(
        tensors_of(tmp_path / "out")[name].transpose(1, 2), collect_weights(run.backend)[name]
    )
    assert torch.allclose(
        token_logprobs(load(tmp_path / "out", "qwen3_vl_moe")), run.logprobs(), atol=1e-5
    )


def test_base_of_another_dtype_lets_the_config_name_the_weights_dtype(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3_vl")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["dtype"] = config["dtype"] = "bfloat16"
    (base / "config.json").write_text(json.dumps(config))
    run = TrainedRun(tmp_path / "run", base)
    exported(run, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["dtype"], written["text_config"]["dtype"]) == ("float32", "float32")
    assert load(tmp_path / "out", "qwen3_vl").dtype == torch.float32


def test_template_that_the_run_trained_with_is_exported(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    run = TrainedRun(
        tmp_path / "run", make_base(tmp_path / "base"), data={"chat_template_file": template}
    )
    exported(run, tmp_path / "out")
    turns = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "hello!"


def describe(run: TrainedRun, template: str) -> None:
    """Let the run's log describe the run, with the template that it trains with."""
    described = build_run_description(run.config, chat_template=template)
    run.versions.state.apply(described)


def read_templates(folder: Path) -> list[str]:
    """Return the templates of all files that loaders read."""
    holders = [folder / "tokenizer_config.json", folder / "chat_template.json"]
    texts = [json.loads(file.read_text())["chat_template"] for file in holders if file.exists()]
    return [(folder / "chat_template.jinja").read_text(), *texts]


@pytest.mark.parametrize("place", ["jinja", "tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("has_file", [True, False])
def test_template_of_the_log_is_exported_to_all_its_files(
    place: str, has_file: bool, tmp_path: Path
) -> None:
    base, file, trained = make_base(tmp_path / "base"), tmp_path / "own.jinja", "{{ 'trained' }}"
    file.write_text(trained)
    if place == "jinja":
        (base / "chat_template.jinja").write_text("{{ 'of the base' }}")
    else:
        (base / "chat_template.jinja").unlink(missing_ok=True)
        settings = json.loads((base / "tokenizer_config.json").read_text())
        text = "{{ 'of the base' }}"
        (base / place).write_text(json.dumps(settings | {"chat_template": text}))
    data = {"chat_template_file": file} if has_file else {}
    run = TrainedRun(tmp_path / "run", base, data=data)
    describe(run, trained)
    file.write_text("{{ 'edited since' }}")
    exported(run, tmp_path / "out")
    assert set(read_templates(tmp_path / "out")) == {trained}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == "trained"
    assert run.config.model.path == base


def test_template_of_an_earlier_log_is_that_of_the_files(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    describe(run, "")
    exported(run, tmp_path / "out")
    assert read_folder_template(tmp_path / "out") == read_folder_template(tmp_path / "base")


def test_version_that_is_gone_names_what_is_left(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    run.delete_weights(1)
    with pytest.raises(
        WeightsError, match=r"weights of versions 0, 2, and checkpoints of versions 2"
    ):
        exported(run, tmp_path / "out", version=1)
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "base"}


def test_altered_weights_are_refused_and_the_checkpoint_is_taken(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    for version in (1, 2):
        key = next(
            key for key in run.store.list(f"weights/{version:08d}/") if key.endswith(".safetensors")
        )
        data = bytearray(run.store.get_at(key))
        data[-1] ^= 1
        run.store.put_at(key, bytes(data))
    with pytest.raises(WeightsError, match="the digest of its weights must be"):
        exported(run, tmp_path / "out", version=1)
    assert exported(run, tmp_path / "out", version=2).source == "checkpoint"


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    other = make_base(tmp_path / "other", "qwen3_moe")
    model = run.config.model.model_copy(update={"path": other})
    config = run.config.model_copy(update={"model": model})
    with pytest.raises(WeightsError, match=r"has no parameter model\.layers\.0\.mlp\.down_proj"):
        export_version(config, run.versions, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_is_replaced_only_when_asked_and_when_it_holds_a_model(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    out = tmp_path / "out"
    exported(run, out, version=0)
    with pytest.raises(ConfigError, match=r"is not empty; .* replace it by --force"):
        exported(run, out)
    (out / "old").write_text("")
    exported(run, out, replaces=True)
    assert not (out / "old").exists()
    assert "version 2" in (out / "README.md").read_text()
    (out / "config.json").unlink()
    with pytest.raises(ConfigError, match="is no model folder"):
        exported(run, out, replaces=True)
    with pytest.raises(ConfigError, match="is the base model's folder"):
        exported(run, tmp_path / "base", replaces=True)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from published_model import TrainedRun
from relax_events.ops.model_export import export
from relax_events.weights import tensor_files
write_whole = tensor_files.write_tensor_file
def write(path, *arguments, **options):
    if "00002" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    write_whole(path, *arguments, **options)
tensor_files.write_tensor_file = write
run = TrainedRun(Path({folder!r}) / "run", Path({folder!r}) / "base")
export.export_version(run.config, run.versions, 2, Path({folder!r}) / "out", max_shard_bytes=20_000)
"""


def test_killed_export_leaves_nothing_under_the_folders_name(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", KILLED.format(tests=tests, folder=str(tmp_path))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert list((tmp_path / ".out.part").glob("model-00001-*"))
    assert not (tmp_path / "out").exists()
    run = TrainedRun(tmp_path / "run2", tmp_path / "base")
    exported(run, tmp_path / "out")
    assert not (tmp_path / ".out.part").exists()
    assert torch.allclose(token_logprobs(load(tmp_path / "out")), run.logprobs(), atol=1e-5)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_object_is_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("relax_events.objects.store.PART_BYTES", 7)
    store = ObjectStore.open("memory://" if kind == "memory" else (tmp_path / "store").as_uri())
    data = bytes(range(250)) * 3
    reference = store.put_at("large", data)
    assert download(store, reference, tmp_path / "copy").read_bytes() == data
    wrong = ObjectRef(reference.uri, b"0" * 32, reference.num_bytes)
    with pytest.raises(ObjectError, match="was altered: its SHA-256"):
        download(store, wrong, tmp_path / "other")
    assert not (tmp_path / "other").exists()
