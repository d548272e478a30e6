"""Weight files are written and read one tensor at a time, and a folder gets its name when it is
complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from relax_events.errors import ConfigError, EnvironmentProblem, WeightsError
from relax_events.model_folder.tensors import StoredTensors, TensorLayout
from relax_events.ops.model_export.new_folder import write_folder
from relax_events.weights.tensor_files import write_tensor_file

MIB = 1024**2
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor([1, 2, 3], dtype=torch.int64),
    "half": torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
}


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def test_written_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    layouts = {name: layout_of(tensor) for name, tensor in TENSORS.items()}
    write_tensor_file(tmp_path / "f.safetensors", layouts, TENSORS.__getitem__)
    read = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    files = StoredTensors.from_files([tmp_path / "f.safetensors"])
    assert files.layouts == layouts
    (tmp_path / "f.safetensors").unlink()
    assert all(torch.equal(files.read(name), tensor) for name, tensor in TENSORS.items())


def test_tensor_is_converted_and_its_shape_is_checked(tmp_path: Path) -> None:
    wanted = {"b": TensorLayout("bfloat16", (2, 3))}
    write_tensor_file(tmp_path / "f.safetensors", wanted, TENSORS.__getitem__)
    assert StoredTensors.from_files([tmp_path / "f.safetensors"]).layouts == wanted
    with pytest.raises(WeightsError, match=r"b must be \[3, 2\], got \[2, 3\]"):
        write_tensor_file(
            tmp_path / "g.safetensors", {"b": TensorLayout("float32", (3, 2))}, TENSORS.__getitem__
        )


COPY = """
import re, sys
from pathlib import Path
import torch
from relax_events.model_folder.tensors import StoredTensors
from relax_events.weights.tensor_files import write_tensor_file
folder = Path(sys.argv[1])
files = StoredTensors.from_files([folder / "large.safetensors"])
def private_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before, peak = private_bytes(), 0
def read(name):
    global peak
    peak = max(peak, private_bytes())
    return files.read(name)
write_tensor_file(folder / "copy.safetensors", files.layouts, read)
print(max(peak, private_bytes()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_copy_of_a_large_file_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((8 * MIB // 4,), float(number)) for number in range(16)}
    safetensors.torch.save_file(tensors, tmp_path / "large.safetensors")
    ended = subprocess.run(
        [sys.executable, "-c", COPY, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 16 * MIB
    copied = safetensors.torch.load_file(tmp_path / "copy.safetensors")
    assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())


def test_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with write_folder(target) as folder:
        (folder / "a").write_text("a")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "a").read_text() == "a"


def write_until_full(target: Path) -> None:
    with write_folder(target, replaces=True) as folder:
        (folder / "config.json").write_text("new")
        raise OSError(28, "No space left on device")


def test_folder_of_a_failed_block_is_deleted_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with write_folder(target) as folder:
        (folder / "config.json").write_text("old")
    with pytest.raises(EnvironmentProblem, match="No space left"):
        write_until_full(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "config.json").read_text() == "old"


def test_two_writers_of_one_folder_are_kept_apart(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with write_folder(target) as folder:
        (folder / "a").write_text("first")
        with (
            pytest.raises(ConfigError, match="another process is writing"),
            write_folder(target),
        ):
            pass
        assert (folder / "a").exists()
    assert (target / "a").read_text() == "first"


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".out.part" / ".weights").mkdir(parents=True)
    (tmp_path / ".out.part" / "old").write_text("")
    with write_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
    assert list((tmp_path / "out").iterdir()) == []


def test_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="is not a folder"), write_folder(tmp_path / "out"):
        pass
