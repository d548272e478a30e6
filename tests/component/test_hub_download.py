"""Fetching models by name from a hub: once a host, by commit, without code, and with a remedy in
every error."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serve_hub
from huggingface_hub import constants

from relax_events.config import RunConfig, load_run_config
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher.hub_download import fetch_models, find_commit
from relax_events.launcher.run_file.proposal import Wishes, propose_run_file
from relax_events.model_folder.tensors import TensorLayout, render_header

pytestmark = pytest.mark.component
MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"weights" * 4000,
    "README.md": b"---\nlicense: mit\n---\n",
    "LICENSE": b"free",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
UNWANTED = {
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"other",
    "consolidated.safetensors": b"again",
    "setup.sh": b"rm",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        use_hub(monkeypatch, hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield hub


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def load(folder: Path, model: str = "hf:org/name", **more: Any) -> RunConfig:
    tree = {"run": {"id": "r"}, "model": {"path": model}, "data": {"source": "jsonl:rows"}, **more}
    path = folder / "run.json"
    path.write_text(json.dumps(tree))
    return load_run_config(path, find_commit=find_commit)


def fetch(folder: Path, model: str = "hf:org/name", **more: Any) -> RunConfig:
    config = load(folder, model, **more)
    fetch_models(config.list_models(), report=print)
    return config


def test_model_is_fetched_without_code_and_pickles(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/name").commit(MODEL | UNWANTED)
    folder = fetch(tmp_path).model.path
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert files == MODEL
    assert folder.name == commit
    assert not [call for call in hub.calls for name in UNWANTED if call.endswith(f"/{name}")]


def test_second_time_asks_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/name").commit(MODEL)
    first = fetch(tmp_path)
    assert capsys.readouterr().out.startswith("fetching model.path hf:org/name@")
    hub.calls.clear()
    assert fetch(tmp_path) == first
    assert hub.calls == []
    assert capsys.readouterr().out == ""


def test_branch_that_moved_keeps_its_commit(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/name")
    first = repo.commit(MODEL)
    assert fetch(tmp_path).model.path.name == first
    repo.commit(MODEL | {"config.json": b"{}"})
    assert fetch(tmp_path).model.path.name == first


def test_commit_is_fetched_though_its_branch_moved(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/name")
    first = repo.commit(MODEL)
    repo.commit(MODEL | {"config.json": b"{}"})
    config = fetch(tmp_path, f"hf:org/name@{first}")
    assert (config.model.path / "config.json").read_bytes() == MODEL["config.json"]


def test_branch_is_fetched_by_its_name(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/name")
    other = repo.commit(MODEL | {"config.json": b"{}"}, branch="v2")
    repo.commit(MODEL)
    assert fetch(tmp_path, "hf:org/name@v2").model.path.name == other


def test_mirror_is_asked_in_place_of_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub() as mirror:
        commit = mirror.add("org/name").commit(MODEL)
        use_hub(monkeypatch, mirror.url)
        assert fetch(tmp_path).model.path.name == commit
        assert mirror.calls
    assert hub.calls == []


def test_offline_uses_the_cache_and_else_names_the_variable(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/name").commit(MODEL)
    fetch(tmp_path)
    hub.calls.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(tmp_path).model.path.name == commit
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE forbids to fetch it; unset"):
        load(tmp_path, "hf:org/other")
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE forbids to fetch it; unset"):
        fetch(tmp_path, "hf:org/name@" + "c" * 40)
    assert hub.calls == []


def test_private_model_needs_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.add("org/name")
    commit, repo.token = repo.commit(MODEL), "hf_test"
    with pytest.raises(ConfigError, match=r"shows no model org/name: .* token in HF_TOKEN"):
        load(tmp_path)
    monkeypatch.setenv("HF_TOKEN", repo.token)
    assert fetch(tmp_path).model.path.name == commit


def test_gated_model_names_the_page_of_its_conditions(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/name")
    commit, repo.token, repo.is_gated = repo.commit(MODEL), "hf_test", True
    for name in ("hf:org/name", f"hf:org/name@{commit}"):
        with pytest.raises(EnvironmentProblem) as error:
            fetch(tmp_path, name)
        assert f"is gated: accept its conditions at {hub.url}/org/name, and give" in str(
            error.value
        )


def test_missing_names_are_errors_with_the_page(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name").commit(MODEL)
    with pytest.raises(ConfigError, match=f"{hub.url} shows no model org/nam: check the name"):
        load(tmp_path, "hf:org/nam")
    with pytest.raises(ConfigError, match=r"model org/name has no revision 'v9'; see .*/commits/"):
        load(tmp_path, "hf:org/name@v9")
    with pytest.raises(ConfigError, match="model org/name has no revision 'ccc"):
        fetch(tmp_path, "hf:org/name@" + "c" * 40)


def test_hub_that_is_away_names_mirror_and_proxy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match=r"127\.0\.0\.1:9 can't be reached: .*HF_ENDPOINT"):
        load(tmp_path)


def test_weights_as_pickles_alone_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name").commit({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(
        ConfigError, match=r"no weights as safetensors, only pytorch_model\.bin, and a pickle"
    ):
        fetch(tmp_path)
    assert not [call for call in hub.calls if call.endswith(".bin")]


def test_teacher_on_servers_needs_no_weights(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/teacher").commit(MODEL)
    teacher = {"model_path": "hf:org/teacher", "urls": ["http://127.0.0.1:1"]}
    config = fetch(tmp_path, "model", algorithm={"name": "opd"}, teacher=teacher)
    assert config.teacher.model_path is not None
    assert (config.teacher.model_path / "tokenizer.json").is_file()
    assert not (config.teacher.model_path / "model.safetensors").exists()


def test_download_that_broke_off_continues_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    weights = b"weights " * 2_700_000  # the library writes 10 MB at a time
    hub.add("org/name").commit(MODEL | {"model.safetensors": weights})
    hub.cut_after = 20_500_000
    folder = fetch(tmp_path).model.path
    assert (folder / "model.safetensors").read_bytes() == weights
    assert any(call.startswith("RANGE model.safetensors from ") for call in hub.calls)


def test_snapshot_that_lacks_a_file_is_completed(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name").commit(MODEL)
    folder = fetch(tmp_path).model.path
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    assert (fetch(tmp_path).model.path / "model.safetensors").is_file()


def test_disk_without_room_is_refused_before_the_weights_are_asked_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name").commit(MODEL)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100_000, 90_000, 10_000))
    with pytest.raises(EnvironmentProblem, match=r"GB to fetch, .* has room for 0\.0 GB; free"):
        fetch(tmp_path)
    assert not [call for call in hub.calls if call.endswith(".safetensors")]


def test_full_disk_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name").commit(MODEL)

    def fail(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = load(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("relax_events.launcher.hub_download._is_fetched", lambda *_: False)
    with pytest.raises(EnvironmentProblem, match="No space left on device; free some of the disk"):
        fetch_models(config.list_models(), report=print)


def test_proposed_run_file_names_the_commit(hub: Hub, tmp_path: Path) -> None:
    layouts = {"a": TensorLayout("float32", (1,))}
    config = {
        "architectures": ["Tiny"],
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "torch_dtype": "float32",
    }
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": render_header(layouts) + bytes(4),
    }
    commit = hub.add("org/name").commit(files)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"problem": "<image> 2 + 2", "images": ["a"], "answer": "4"}) + "\n")
    run_file = propose_run_file("mine", Path("hf:org/name"), data, Wishes())
    assert f'path = "hf:org/name@{commit}"' in run_file
