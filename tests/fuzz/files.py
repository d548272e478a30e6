"""Input files of a run: run files, rows, exports, manifests, markers, media."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson
from PIL import Image

from relax_events.config import MediaConfig, load_run_config
from relax_events.config.data import DataConfig
from relax_events.data.jsonl import JsonlSource
from relax_events.errors import (
    ConfigError,
    CorruptRecord,
    EnvironmentProblem,
    MediaError,
    WeightsError,
)
from relax_events.events.container import ContainerWriter, LoggedRecord, read_container
from relax_events.events.parts import Modality
from relax_events.kafka.embedded.directory import read_state
from relax_events.media.archives import read_member
from relax_events.media.audio import inspect_audio
from relax_events.media.images import decode_image, inspect_image
from relax_events.media.items import MediaAccess, read_items
from relax_events.media.videos import inspect_video
from relax_events.models.token_table import read_vocabulary
from relax_events.objects.marker import read_marker
from relax_events.objects.rights import MARKER
from relax_events.objects.store import ObjectStore
from relax_events.ops.export_manifest import MANIFEST, Manifest
from relax_events.weights.manifest import WeightManifest
from tests.fuzz.inputs import TEXTS, as_json, json_bytes, mutated
from tests.fuzz.target import SCRATCH, Target

ROOT = Path(__file__).parents[2]
LIMITS = MediaConfig(max_item_bytes=1_000_000, max_image_pixels=1_000_000)
FOLDER = SCRATCH / "files"


def _as_file(name: str, data: bytes) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / name
    file.write_bytes(data)
    return file


def run_file(data: bytes) -> None:
    """Load a run file."""
    with suppress(ConfigError):
        load_run_config(_as_file("run.toml", data), environment={})


def run_file_as_json(data: bytes) -> None:
    """Load a run file that a command has written."""
    with suppress(ConfigError):
        load_run_config(_as_file("run.json", data), environment={})


def override(data: bytes) -> None:
    """Lay an argument over a run file."""
    text = data.decode(errors="replace")
    with suppress(ConfigError):
        load_run_config(
            ROOT / "configs" / "quickstart.toml", [text], environment={"RELAX_RUN__SEED": text}
        )


def rows(data: bytes) -> None:
    """Open a file of rows and read all of them."""
    config = DataConfig(
        source="jsonl:rows",
        max_invalid_rows=3,
        multimodal_keys={"image": "image"},
        media_root=FOLDER,
    )
    with suppress(ConfigError):
        source = JsonlSource(_as_file("rows.jsonl", data), config)
        for index in range(min(source.num_rows, 50)):
            source.row(index)


def packed_rows(data: bytes) -> None:
    """Open a compressed file of rows."""
    with suppress(ConfigError, EnvironmentProblem):
        JsonlSource(_as_file("rows.jsonl.gz", data), DataConfig(source="jsonl:rows"))


def container(data: bytes) -> None:
    """Read an exported partition."""
    with suppress(CorruptRecord):
        for _ in read_container(_as_file("partition.avro", data)):
            pass


def export_manifest(data: bytes) -> None:
    """Read the table of contents of an export."""
    _as_file(MANIFEST, data)
    with suppress(ConfigError):
        Manifest.load(FOLDER)


def weight_manifest(data: bytes) -> None:
    """Read the table of contents of weights."""
    with suppress(WeightsError):
        WeightManifest.from_json(data).to_json()


def marker(data: bytes) -> None:
    """Read the marker of a store."""
    store = ObjectStore.open("memory://", waits=False)
    store.put_at(MARKER, data)
    with suppress(ConfigError):
        read_marker(store)


def broker_state(data: bytes) -> None:
    """Read what a folder remembers of its broker."""
    with suppress(EnvironmentProblem):
        read_state(_as_file("broker.json", data))


def vocabulary(data: bytes) -> None:
    """Read a tokenizer's vocabulary."""
    _as_file("tokenizer.json", data)
    with suppress(ConfigError):
        read_vocabulary(FOLDER)


def check_image(data: bytes) -> None:
    """Check an image, and decode it at a size."""
    with suppress(MediaError, MemoryError):
        inspect_image(data, limits=LIMITS, location="image")
        decode_image(data, size=(16, 16), limits=LIMITS, location="image")


def check_audio(data: bytes) -> None:
    """Check audio."""
    with suppress(MediaError, MemoryError):
        inspect_audio(data, limits=LIMITS, location="audio")


def check_video(data: bytes) -> None:
    """Check a video."""
    with suppress(MediaError, MemoryError):
        inspect_video(data, limits=LIMITS, location="video")


def archive(data: bytes) -> None:
    """Read a member of an archive."""
    file = _as_file("archive.tar", data)
    with file.open("rb") as opened, suppress(MediaError):
        read_member(opened, "a/b.png", path=file, max_bytes=LIMITS.max_item_bytes, location="row")


def media_item(data: bytes) -> None:
    """Read what a row names."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    inside = MediaAccess(root=FOLDER)
    (FOLDER / "a").mkdir(parents=True, exist_ok=True)
    with suppress(MediaError):
        for item in read_items(value, modality=Modality.IMAGE, location="row", access=inside):
            if not (isinstance(item.source, str) and item.source.startswith("http")):
                assert len(item.read(LIMITS)) <= LIMITS.max_item_bytes


def _image_seeds() -> list[bytes]:
    image = Image.fromarray(np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3))
    found = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        image.save(file, kind)
        found.append(file.getvalue())
    return found


def _tar_seed(format_: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format_) as made:
        for name in ("a/b.png", "n" * 150, "c"):
            info = tarfile.TarInfo(name)
            info.size = 5
            made.addfile(info, io.BytesIO(b"12345"))
    return file.getvalue()


def _container_seed() -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # importing this module leaves nothing behind
        path = Path(folder) / "seed.avro"
        with ContainerWriter(path) as writer:
            for offset in range(5):
                writer.write(LoggedRecord(offset, 1, b"k", b"value" * 20, (("h", b"1"),)))
        return path.read_bytes()


def _packed(data: bytes) -> bytes:
    import gzip

    return gzip.compress(data, mtime=0)


def _moving(write: Callable[[io.BytesIO], None]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _wave(file: io.BytesIO) -> None:
    import wave

    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(8000)
        made.writeframes(np.arange(800, dtype="<i2").tobytes())


def _movie(file: io.BytesIO, *, kind: str = "mp4", codec: str = "mpeg4") -> None:
    import av

    with av.open(file, "w", format=kind) as made:
        stream = made.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(4):
            frame = av.VideoFrame.from_ndarray(
                np.full((32, 32, 3), number * 40, np.uint8), format="rgb24"
            )
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))


ROWS = [
    {"prompt": "2 + 2?", "answer": "4"},
    {
        "prompt": [{"role": "user", "content": "<image> what?"}],
        "answer": 4,
        "image": ["a.png"],
        "metadata": {"a": 1},
    },
    {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "answer": None,
        "tools": [{"name": "f"}],
    },
]
ITEMS = [
    "a.png",
    "data:image/png;base64,iVBORw0KGgo=",
    "data:,%41%42",
    {"path": "archive.tar", "member": "a/b.png"},
    {"bytes": "x"},
    ["a/../../x", "/etc/hosts"],
]
REFERENCE = {"uri": "file:///a", "digest": "ab" * 32, "num_bytes": 5}
TENSOR = {"name": "w", "dtype": "F32", "shape": [2, 2], "file": 0}
MANIFEST_TREE = {
    "format": 1,
    "policy_version": 1,
    "model_type": "qwen3",
    "digest": "cd" * 32,
    "files": [REFERENCE],
    "tensors": [TENSOR],
}
CHANGES_TREE = MANIFEST_TREE | {
    "format": 2,
    "base": REFERENCE | {"weights_digest": "ef" * 32},
    "changed": ["w"],
    "in_transit": "ab",
}
TENSORS_TREE = MANIFEST_TREE | {
    "format": 3,
    "files": [{"uri": "file:///a", "num_bytes": 5}],
    "tensors": [TENSOR | {"digest": "ab" * 32}],
}
PARTITION = {
    "entity": "a",
    "partition": 0,
    "begin": 0,
    "end": 5,
    "is_compacted": False,
    "file": "a.avro",
}
EXPORT = {
    "format": 1,
    "run_id": "r",
    "topics": {"a": {}},
    "partitions": [PARTITION],
    "objects": [{"key": "a", "num_bytes": 1, "digest": "ab"}],
}
STATE = {
    "port": 9092,
    "controller_port": 9093,
    "kafka_version": "4.3.1",
    "pid": 1,
    "started_at_seconds": 1.0,
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
RUN_FILES = [file.read_bytes() for file in sorted((ROOT / "configs").glob("*.toml"))]
RUN_TREE = {
    "run": {"id": "a"},
    "model": {"path": "m"},
    "data": {"source": "jsonl:rows"},
    "broker": {"client": {"a.b": 1}},
}
OVERRIDES = [
    b"run.seed=1",
    b"broker.client.a=[1]",
    b'data.source="x"',
    b"run.id='''a'''",
    b"algorithm.kl_coefficient=1e9999",
    b"run={a=1}",
]

TARGETS = [
    Target("run-file", mutated(RUN_FILES), run_file),
    Target("run-file-json", json_bytes([RUN_TREE], odd=TEXTS), run_file_as_json),
    Target("override", mutated(OVERRIDES), override),
    Target(
        "rows",
        json_bytes(ROWS).map(lambda line: line + b"\n" + as_json(ROWS[0]))
        | mutated([b"\n".join(map(as_json, ROWS))]),
        rows,
    ),
    Target("packed-rows", mutated([_packed(b"\n".join(map(as_json, ROWS)))]), packed_rows),
    Target("partition-file", mutated([_container_seed()]), container),
    Target("export-manifest", json_bytes([EXPORT]), export_manifest),
    Target(
        "weight-manifest", json_bytes([MANIFEST_TREE, CHANGES_TREE, TENSORS_TREE]), weight_manifest
    ),
    Target("store-marker", json_bytes([{"run_id": "a", "value": "b"}]), marker),
    Target("broker-state", json_bytes([STATE]), broker_state),
    Target("vocabulary", json_bytes([TOKENIZER]), vocabulary),
    Target("image", mutated(_image_seeds()), check_image),
    Target("audio", mutated([_moving(_wave)]), check_audio),
    Target(
        "video",
        mutated([_moving(_movie), _moving(lambda file: _movie(file, kind="matroska"))]),
        check_video,
    ),
    Target(
        "archive", mutated([_tar_seed(tarfile.PAX_FORMAT), _tar_seed(tarfile.GNU_FORMAT)]), archive
    ),
    Target("media-item", json_bytes(ITEMS, odd=TEXTS), media_item),
]
