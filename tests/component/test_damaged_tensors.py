"""A damaged file of tensors gets the same error from whatever reads it: one sentence that names the
file, the rule and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_events.config import RunConfig
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.errors import ConfigError, DamagedTensors, ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyVersionPublished
from relax_events.launcher.broker_checks import require_fitting_model
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.checks import check_run
from relax_events.launcher.file_checks import check_model
from relax_events.launcher.run_file.proposal import Wishes, propose_run_file
from relax_events.model_folder.tensors import StoredTensors, list_weight_files, read_layouts
from relax_events.models.adapter_folder import TENSORS_FILE, read_adapter_tensors
from relax_events.models.base_digest import compute_base_digest
from relax_events.models.causal_lm import load_causal_lm
from relax_events.models.checkpoint_facts import read_facts
from relax_events.objects import ObjectStore
from relax_events.ops.model_export.export import export_version
from relax_events.ops.model_export.versions import PublishedVersions
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.megatron.conversion import convert_to_megatron
from relax_events.packages.megatron.folder_tensors import FolderTensors
from relax_events.session.planned import plan_devices
from relax_events.training.checkpoint.stored_state import StoredState
from relax_events.weights.artifact_files import ArtifactTensors
from relax_events.weights.artifact_reader import read_weights
from relax_events.weights.artifact_writer import write_weights

REMEDY = "; fetch or write it again"
PAIR = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [8, 12]},
}


def build_file(header: Any, num_bytes: int = 12) -> bytes:
    """Return a file with this header and so many bytes of values."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def with_b(**properties: Any) -> bytes:
    """Return a file of two tensors, the second with other properties."""
    return build_file(PAIR | {"b": PAIR["b"] | properties})


DAMAGED_FILES = {
    "nothing": (b"", "it can't be read (cannot mmap an empty file)"),
    "half a length": (b"\2\0\0", "its header must have 1 to 0 bytes, got 2"),
    "a length beyond the file": (
        (2**40).to_bytes(8, "little") + b"{}",
        "its header must have 1 to 2 bytes, got 1,099,511,627,776",
    ),
    "no header": (bytes(16), "its header must have 1 to 8 bytes, got 0"),
    "a truncated header": (
        build_file(PAIR)[:60],
        f"its header must have 1 to 52 bytes, got {len(json.dumps(PAIR))}",
    ),
    "no JSON": (build_file(b"{nonsense"), "its header must be JSON (unexpected character"),
    "no object": (build_file([1]), "its header must be a JSON object, got [1]"),
    "deep JSON": (build_file(b"[" * 9000), "its header must be JSON (depth limit exceeded"),
    "no properties": (
        build_file({"a": 1}),
        "its header must give dtype, shape and data_offsets of each tensor (TypeError: ",
    ),
    "no shape": (
        build_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
        "its header must give dtype, shape and data_offsets of each tensor (KeyError: 'shape')",
    ),
    "an unknown dtype": (with_b(dtype="F128"), "dtype of tensor b must be known, got 'F128'"),
    "another dtype": (
        with_b(dtype="F32"),
        "tensor b must have 8 bytes as float32 [2, 1], its offsets are 8 and 12",
    ),
    "a negative offset": (
        with_b(data_offsets=[-4, 0]),
        "shape and offsets of tensor b must be whole numbers from 0, got [2, 1] and [-4, 0]",
    ),
    "a fraction": (
        with_b(shape=[2.0]),
        "shape and offsets of tensor b must be whole numbers from 0, got [2.0] and [8, 12]",
    ),
    "a number of 31 digits": (
        with_b(shape=[10**30]),
        "shape and offsets of tensor b must be whole numbers from 0, got [1e+30] and [8, 12]",
    ),
    "a product that takes hours": (
        with_b(shape=[2**63] * 100_000),
        "tensor b must have at most 64 dimensions, got 100,000",
    ),
    "offsets outside of the file": (
        with_b(shape=[100], data_offsets=[8, 208]),
        "its tensors must have 12 bytes, as many as follow the header, got 208",
    ),
    "overlapping tensors": (
        with_b(data_offsets=[4, 8]),
        "tensor b must begin at byte 8, where the one before it ends, got 4",
    ),
    "a hole": (
        with_b(data_offsets=[9, 13]),
        "tensor b must begin at byte 8, where the one before it ends, got 9",
    ),
    "truncated values": (
        build_file(PAIR)[:-1],
        "its tensors must have 11 bytes, as many as follow the header, got 12",
    ),
    "bytes behind the values": (
        build_file(PAIR, 13),
        "its tensors must have 13 bytes, as many as follow the header, got 12",
    ),
}
"""Of each damaged file its bytes, and how the rule that it breaks begins."""
DAMAGED_INDEXES = {
    "no JSON": (b"{", "it must hold a weight_map (JSONDecodeError: "),
    "no map": (b'{"metadata": {}}', "it must hold a weight_map (KeyError: "),
    "a list": (b'{"weight_map": [1]}', "it must hold a weight_map (AttributeError: "),
    "a missing file": (
        b'{"weight_map": {"a": "model-2.safetensors"}}',
        "it names model-2.safetensors, which the folder must hold",
    ),
    "a path outside of the folder": (
        b'{"weight_map": {"a": "../model.safetensors"}}',
        "it must name files of its folder, got '../model.safetensors'",
    ),
    "a file of another kind": (
        b'{"weight_map": {"a": "config.json"}}',
        "it must name files of its folder, got 'config.json'",
    ),
    "a missing tensor": (
        b'{"weight_map": {"a": "model-1.safetensors", "c": "model-1.safetensors"}}',
        "it names tensor c, which model-1.safetensors must hold",
    ),
}


def plan(config: RunConfig) -> None:
    plan_devices(config)


def run_doctor(config: RunConfig) -> None:
    """Let the doctor check a run file that leaves keys out; raise what it says."""
    tree = {"run": config.run, "model": {"path": config.model.path}, "data": config.data}
    (finding,), _ = check_run(RunConfig.model_validate(tree))
    raise DamagedTensors(*finding.text.removesuffix(REMEDY).split(" is damaged: "))


def compare_with_version(config: RunConfig) -> None:
    artifact, _ = write_weights(
        ObjectStore.open(config.objects_uri), {"a": torch.zeros(2)}, policy_version=1
    )
    version = PolicyVersionPublished(
        policy_version=1, artifact=artifact, transports=["store"], start_offsets=[]
    )
    require_fitting_model(config, version)


def load_model(config: RunConfig) -> None:
    load_causal_lm(
        config.model.path,
        attention="eager",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def export(config: RunConfig) -> None:
    versions = PublishedVersions("run", {}, {}, {})
    export_version(config, versions, 1, config.run.directory / "exported")


def convert(config: RunConfig) -> None:
    convert_to_megatron(config.model.path, config.run.directory / "converted")


DOORS: dict[str, Callable[[RunConfig], object]] = {
    "relax init": lambda config: propose_run_file(
        "run", config.model.path, config.run.directory, Wishes()
    ),
    "relax plan": plan,
    "relax doctor": run_doctor,
    "launcher": lambda config: check_model(CheckedRun(config)),
    "launcher with a version": compare_with_version,
    "derived defaults": lambda config: read_facts(config.model.path),
    "engine transformers, trainer and scorers": load_model,
    "engine sglang": lambda config: ModelFolder.read(config.model.path),
    "backend megatron": lambda config: FolderTensors(config.model.path, {}),
    "conversion": convert,
    "export": export,
}
"""What reads the folder of a run's model."""


@pytest.fixture
def config(make_run_config: Callable[..., RunConfig]) -> RunConfig:
    """Return a run whose model has damaged weights once a test has written them."""
    config = make_run_config()
    make_tiny(config.model.path, corpus=["12=21"], hidden_size=32)
    (config.model.path / "model.safetensors").unlink()
    return config


def damage(folder: Path, name: str, content: bytes, rule: str) -> str:
    """Write a damaged file; return how its error begins."""
    (folder / name).write_bytes(content)
    return f"{folder / name} is damaged: {rule}"


def refusal(read: Callable[[], object]) -> str:
    """Return the text of the error; both who expects a wrong run file and who expects wrong weights
    catch it."""
    with pytest.raises(DamagedTensors) as raised:
        read()
    assert isinstance(raised.value, ConfigError)
    assert isinstance(raised.value, WeightsError)
    assert raised.value.exit_code == 2
    return str(raised.value)


@pytest.mark.parametrize("case", DAMAGED_FILES)
def test_damaged_file_gets_one_error_from_each_reader_of_a_folder(
    config: RunConfig, case: str
) -> None:
    expected = damage(config.model.path, "model.safetensors", *DAMAGED_FILES[case])
    texts = {name: refusal(lambda door=door: door(config)) for name, door in DOORS.items()}  # type: ignore[misc]
    assert texts == dict.fromkeys(DOORS, texts["launcher"])
    assert texts["launcher"].startswith(expected)
    assert texts["launcher"].endswith(REMEDY)


@pytest.mark.parametrize("case", DAMAGED_INDEXES)
def test_damaged_index_gets_one_error_from_each_reader_of_a_folder(
    config: RunConfig, case: str
) -> None:
    path = config.model.path
    (path / "model-1.safetensors").write_bytes(build_file(PAIR))
    expected = damage(path, "model.safetensors.index.json", *DAMAGED_INDEXES[case])
    texts = {name: refusal(lambda door=door: door(config)) for name, door in DOORS.items()}  # type: ignore[misc]
    assert texts == dict.fromkeys(DOORS, texts["launcher"])
    assert texts["launcher"].startswith(expected)
    assert texts["launcher"].endswith(REMEDY)
    if case != "a missing tensor":
        assert refusal(lambda: compute_base_digest(path)) == texts["launcher"]


def store_damaged(tmp_path: Path, content: bytes) -> tuple[ObjectStore, ObjectRef, str]:
    """Publish a version and put a damaged file in the place of its own, with the right digest."""
    store = ObjectStore.open((tmp_path / "store").as_uri())
    reference, _ = write_weights(store, {"a": torch.zeros(2)}, policy_version=2)
    manifest = json.loads(store.get(reference))
    file = store.put(content)
    manifest["files"] = [{"uri": file.uri, "num_bytes": file.num_bytes}]
    return store, store.put(json.dumps(manifest).encode()), file.uri


@pytest.mark.parametrize("case", sorted(DAMAGED_FILES.keys() - {"nothing"}))
def test_damaged_file_of_a_version_or_checkpoint_breaks_the_same_rule(
    tmp_path: Path, case: str
) -> None:
    content, rule = DAMAGED_FILES[case]
    store, reference, uri = store_damaged(tmp_path, content)
    assert refusal(lambda: read_weights(store, reference)).startswith(f"{uri} is damaged: {rule}")
    (tmp_path / "copies").mkdir()
    with pytest.raises(WeightsError) as exported:
        ArtifactTensors(store, reference, tmp_path / "copies")
    shard = store.put(content)
    with pytest.raises(ObjectError) as restored:
        StoredState(store, {"policy_version": 2}, [shard], folder=tmp_path / "copies")
    for error in (exported.value, restored.value):
        assert isinstance(error.__cause__, DamagedTensors)
        assert f" is damaged: {rule}" in str(error)
    (tmp_path / TENSORS_FILE).write_bytes(content)
    text = refusal(lambda: read_adapter_tensors(tmp_path))
    assert text.startswith(f"{tmp_path / TENSORS_FILE} is damaged: {rule}")


def test_header_above_the_bound_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    text = refusal(lambda: read_layouts(tmp_path))
    assert "its header must have 1 to 100,000,000 bytes, got 100,000,001" in text


def test_files_that_the_index_does_not_name_are_no_weights(tmp_path: Path) -> None:
    assert list_weight_files(tmp_path) == []
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        StoredTensors.from_folder(tmp_path)
    for name, content in {
        "model-1.safetensors": build_file(PAIR),
        "model-2.safetensors": build_file({"c": PAIR["a"]}, 8),
        "consolidated.safetensors": b"of another kind",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}
        ).encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    assert list_weight_files(tmp_path) == files
    tensors = StoredTensors.from_folder(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "a": (2,),
        "b": (2, 1),
        "c": (2,),
    }
    assert read_layouts(tmp_path) == tensors.layouts
