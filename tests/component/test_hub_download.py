"""Fetching models by name from a hub: once a host, by commit, without code, and with a remedy in
every error."""

from __future__ import annotations

import errno
import io
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hub_server import Hub, Repo, serve_hub
from huggingface_hub import constants
from pyarrow import parquet

from relax_events.config import RunConfig, load_run_config
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher.hub_download import fetch_models, find_commit
from relax_events.launcher.preparation import fetch_named
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
    row = json.dumps({"problem": "<image> 2 + 2", "images": ["a"], "answer": "4"})
    rows = hub.add("org/rows", kind="datasets").commit({"rows.jsonl": row.encode()})
    run_file = propose_run_file("mine", Path("hf:org/name"), Path("hf:org/rows:train"), Wishes())
    assert f'path = "hf:org/name@{commit}"' in run_file
    assert f'source = "hf:org/rows@{rows}:train"' in run_file


def write_parquet(*questions: str) -> bytes:
    buffer = io.BytesIO()
    table = {"question": list(questions), "answer": [one[::-1] for one in questions]}
    parquet.write_table(pa.table(table), buffer)
    return buffer.getvalue()


CARD = b"""---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


@pytest.fixture
def dataset(hub: Hub) -> Repo:
    repo = hub.add("org/rows", kind="datasets")
    files = {
        "README.md": CARD,
        "main/train-00000-of-00002.parquet": write_parquet("a1", "b2"),
        "main/train-00001-of-00002.parquet": write_parquet("c3"),
        "main/test-00000-of-00001.parquet": write_parquet("d4"),
        "loader.py": b"import os",
    }
    repo.commit(files)
    return repo


def fetch_rows(folder: Path, source: str, **more: Any) -> RunConfig:
    data = {"source": source, "prompt_key": "question"}
    config = load(folder, "model", data=data, **more)
    fetch_named(config, report=print)
    return config


def read_prompts(config: RunConfig) -> list[str]:
    source = open_source(config.data, seed=0)
    return [source.row(index).messages[0].text for index in range(source.num_rows)]


def test_split_of_a_dataset_is_fetched_and_read(hub: Hub, dataset: Repo, tmp_path: Path) -> None:
    config = fetch_rows(tmp_path, "hf:org/rows:main:train")
    assert config.data.source == f"hf:org/rows@{dataset.branches['main']}:main:train"
    assert read_prompts(config) == ["a1", "b2", "c3"]
    assert not [call for call in hub.calls if "test" in call or "loader" in call]


def test_dataset_asks_nothing_the_second_time(hub: Hub, dataset: Repo, tmp_path: Path) -> None:
    first = fetch_rows(tmp_path, "hf:org/rows:train[1:3]")
    dataset.commit({"README.md": CARD, "main/train-0.parquet": write_parquet("e5")})
    hub.calls.clear()
    assert fetch_rows(tmp_path, "hf:org/rows:train[1:3]") == first
    assert read_prompts(first) == ["b2", "c3"]
    assert hub.calls == []


def test_another_split_is_fetched_later(hub: Hub, dataset: Repo, tmp_path: Path) -> None:
    fetch_rows(tmp_path, "hf:org/rows:train")
    evaluation = {"datasets": [{"name": "held-out", "source": "hf:org/rows:main:test"}]}
    config = fetch_rows(tmp_path, "hf:org/rows:train", evaluation=evaluation)
    (held_out,) = config.evaluation.datasets
    assert held_out.prompt_key == "question", "it takes the columns of the prompts"
    assert open_source(held_out, seed=0).row(0).messages[0].text == "d4"


def test_dataset_that_was_not_fetched_names_the_command(
    hub: Hub, dataset: Repo, tmp_path: Path
) -> None:
    config = fetch_rows(tmp_path, "hf:org/rows:train")
    source = config.data.source.replace("train", "test")
    test = config.data.model_copy(update={"source": source})
    with pytest.raises(ConfigError, match=f"fetch it: .* RUN_FILE data.source={source}"):
        open_source(test, seed=0)
    with pytest.raises(ConfigError, match=r"name it so in the run file, .* prepare RUN_FILE$"):
        open_source(test, seed=0, section="data.datasets[1]")


def test_dataset_that_lacks_a_part_is_completed(hub: Hub, dataset: Repo, tmp_path: Path) -> None:
    fetch_rows(tmp_path, "hf:org/rows:train")
    (part,) = (tmp_path / "cache").rglob("train-00001*")
    part.resolve().unlink()
    part.unlink()
    config = load(tmp_path, "model", data={"source": "hf:org/rows:train", "prompt_key": "question"})
    with pytest.raises(ConfigError, match="is not in this host's cache"):
        open_source(config.data, seed=0)
    fetch_named(config, report=print)
    assert read_prompts(config) == ["a1", "b2", "c3"]


def test_converted_branch_is_read_by_its_folders(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/csv", kind="datasets")
    repo.commit({"rows.csv": b"a,b"})
    converted = {"default/train/0000.parquet": write_parquet("a1")}
    repo.commit(converted, branch="refs/convert/parquet")
    with pytest.raises(ConfigError, match="hf:org/csv@refs/convert/parquet:CONFIG:SPLIT"):
        fetch_rows(tmp_path, "hf:org/csv")
    config = fetch_rows(tmp_path, "hf:org/csv@refs/convert/parquet:default:train")
    assert read_prompts(config) == ["a1"]


def test_json_lines_of_a_hub_are_read(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/lines", kind="datasets")
    repo.commit({"rows.jsonl": b'{"question": "a1", "answer": "b"}\n'})
    assert read_prompts(fetch_rows(tmp_path, "hf:org/lines")) == ["a1"]


def test_missing_dataset_and_card_that_is_damaged_are_errors(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{hub.url} shows no dataset org/no: check the name"):
        load(tmp_path, "model", data={"source": "hf:org/no"})
    repo = hub.add("org/bad", kind="datasets")
    repo.commit({"README.md": b"---\na: [\n---\n", "rows.jsonl": b"{}"})
    with pytest.raises(ConfigError, match=r"README\.md can't be read: .*; name another revision"):
        fetch_rows(tmp_path, "hf:org/bad")


def test_path_out_of_the_repository_is_not_read(hub: Hub, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}")
    hub.add("org/out", kind="datasets").commit({f"../../../../{secret.name}": b"{}"})
    with pytest.raises(ConfigError, match="holds no Parquet file and no JSON lines"):
        fetch_rows(tmp_path, "hf:org/out")
