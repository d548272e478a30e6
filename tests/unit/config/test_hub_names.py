"""Names of the hub in a run file: their forms, their commits, their folders, and what the log gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from huggingface_hub import constants

from relax_events.config import RunConfig, load_run_config
from relax_events.config.hub_names import (
    HubName,
    find_model_name,
    parse_hub_name,
)
from relax_events.errors import ConfigError
from relax_events.models.checkpoint_facts import require_fetched
from relax_events.runtime.run_description import build_run_description, read_described_config
from relax_events.session.defaults import keep_commits

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def write_ref(cache: Path, repo: str, revision: str, commit: str) -> None:
    path = cache / repo / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)


def write_run(path: Path, model: str, **more: Any) -> Path:
    tree = {
        "run": {"id": "r"},
        "model": {"path": model},
        "data": {"source": "jsonl:rows"},
        **more,
    }
    path = path / "run.json"
    path.write_bytes(orjson.dumps(tree))
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:org/name", HubName("dataset", "org/name")),
        ("hf:gpt2", HubName("dataset", "gpt2")),
        ("hf:o-1/n.a_me@v1.0", HubName("dataset", "o-1/n.a_me", "v1.0")),
        (
            "hf:org/name@refs/convert/parquet:main:train[10:20]",
            HubName("dataset", "org/name", "refs/convert/parquet", ("main", "train"), "[10:20]"),
        ),
        ("hf:org/name:train[:5]", HubName("dataset", "org/name", "", ("train",), "[:5]")),
    ],
)
def test_name_is_read_and_written_back(text: str, name: HubName) -> None:
    assert parse_hub_name(text, "dataset") == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a/b/c", "hf:../../etc", "hf:org/name@../x", "hf:org/na me", "hf:o/n:a:b:c"]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must have the form hf:org/name"):
        parse_hub_name(text, "dataset")


def test_model_has_no_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must have the form .*set model\.path"):
        load_run_config(write_run(tmp_path, "hf:org/name:train"))


def test_name_stands_for_the_folder_of_the_commit_in_the_cache(tmp_path: Path, cache: Path) -> None:
    write_ref(cache, "models--org--name", "main", COMMIT)
    config = load_run_config(write_run(tmp_path, "hf:org/name"))
    assert config.model.path == cache / "models--org--name" / "snapshots" / COMMIT
    assert config.unpinned_names == {"model.path": "hf:org/name"}


def test_branch_is_read_from_the_cache(tmp_path: Path, cache: Path) -> None:
    write_ref(cache, "models--org--name", "main", COMMIT)
    write_ref(cache, "models--org--name", "v2", OTHER)
    assert load_run_config(write_run(tmp_path, "hf:org/name@v2")).model.path.name == OTHER


def test_name_that_is_not_cached_is_refused_with_the_command_where_the_model_is_used(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path, "hf:org/name")
    config = load_run_config(path)
    assert config.model_dump(mode="json")["model"]["path"] == "hf:org/name@main"
    with pytest.raises(ConfigError) as error:
        require_fetched(config.model.path, key="model.path")
    assert str(error.value) == (
        "model.path hf:org/name@main is not in this host's cache of the hub; fetch it: "
        "relax models prepare RUN_FILE model.path=hf:org/name@main"
    )


def test_name_with_a_commit_needs_no_cache(tmp_path: Path) -> None:
    config = load_run_config(write_run(tmp_path, f"hf:org/name@{COMMIT}"))
    assert config.model.path.name == COMMIT
    assert config.unpinned_names == {}


@pytest.mark.parametrize(
    ("section", "more"),
    [
        ("critic", {"algorithm": {"name": "ppo"}}),
        ("judge", {"reward": {"function": "genrm"}}),
        ("teacher", {"algorithm": {"name": "opd"}}),
    ],
)
def test_every_model_of_a_run_takes_a_name(
    tmp_path: Path, section: str, more: dict[str, Any]
) -> None:
    tree = {section: {"model_path": f"hf:org/other@{COMMIT}"}, **more}
    config = load_run_config(write_run(tmp_path, f"hf:org/model@{COMMIT}", **tree))
    names = [
        find_model_name(config.model.path),
        find_model_name(getattr(config, section).model_path),
    ]
    assert [str(name) for name in names] == [f"hf:org/{one}@{COMMIT}" for one in ("model", "other")]


def test_teacher_of_a_source_takes_a_name(tmp_path: Path) -> None:
    tree = {
        "teachers": {"math": {"model_path": f"hf:org/math@{COMMIT}", "sources": ["m"]}},
        "algorithm": {"name": "opd"},
        "reward": {"route_key": "source"},
    }
    config = load_run_config(write_run(tmp_path, "model", **tree))
    folder = config.teachers["math"].model_path
    assert folder is not None
    assert str(find_model_name(folder)) == f"hf:org/math@{COMMIT}"


def test_log_gets_the_name_and_each_host_its_own_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ref(cache, "models--org--name", "main", COMMIT)
    described = build_run_description(load_run_config(write_run(tmp_path, "hf:org/name")))
    assert orjson.loads(described.config)["model"]["path"] == f"hf:org/name@{COMMIT}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    config = read_described_config(described, run_id="r")
    assert config.model.path == tmp_path / "elsewhere/models--org--name/snapshots" / COMMIT
    again = orjson.loads(build_run_description(config).config)
    assert again["model"] == orjson.loads(described.config)["model"]


def test_data_are_named_by_their_commits(tmp_path: Path, cache: Path) -> None:
    write_ref(cache, "datasets--org--data", "main", COMMIT)
    path = write_run(
        tmp_path, "model", data={"datasets": [{"source": "hf:org/data:main:train[:9]"}]}
    )
    config = load_run_config(path)
    assert config.data.datasets[0].source == f"hf:org/data@{COMMIT}:main:train[:9]"
    assert config.unpinned_names == {"data.datasets.0.source": "hf:org/data:main:train[:9]"}


def test_folders_stay_paths(tmp_path: Path) -> None:
    config = load_run_config(write_run(tmp_path, "models/a"))
    assert config.model.path == Path("models/a")
    assert config.model_dump(mode="json")["model"]["path"] == "models/a"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("hf:org/name", COMMIT),
        ("hf:org/name@main", OTHER),
        (f"hf:org/name@{OTHER}", OTHER),
        ("hf:org/another", OTHER),
    ],
)
def test_resumed_run_keeps_the_commit_of_a_name_without_a_revision(
    tmp_path: Path, cache: Path, text: str, kept: str
) -> None:
    earlier = load_run_config(write_run(tmp_path, f"hf:org/name@{COMMIT}"))
    for repo in ("name", "another"):
        write_ref(cache, f"models--org--{repo}", "main", OTHER)
    config = load_run_config(write_run(tmp_path, text))
    assert config.model.path.name == OTHER
    resumed = keep_commits(config, earlier)
    assert resumed.model.path.name == kept
    assert keep_commits(config, None) == config


def test_resumed_run_keeps_the_commit_of_a_dataset_in_a_list(tmp_path: Path, cache: Path) -> None:
    def load(*sources: str) -> RunConfig:
        data = {"datasets": [{"source": source} for source in sources]}
        return load_run_config(write_run(tmp_path, "model", data=data))

    write_ref(cache, "datasets--org--data", "main", OTHER)
    earlier = load("jsonl:rows", f"hf:org/data@{COMMIT}:main:train")
    resumed = keep_commits(load("jsonl:rows", "hf:org/data:main:train"), earlier)
    assert resumed.data.datasets[1].source == f"hf:org/data@{COMMIT}:main:train"
    other_split = keep_commits(load("jsonl:rows", "hf:org/data:main:test"), earlier)
    assert other_split.data.datasets[1].source == f"hf:org/data@{OTHER}:main:test"
    assert keep_commits(load("hf:org/data:main:train"), earlier).data.datasets[0].source == (
        f"hf:org/data@{OTHER}:main:train"
    )
