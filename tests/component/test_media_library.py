"""A run's media library: each item is stored once and processed once per machine;
and its errors.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_events.errors import MediaError, ObjectError, PoisonSample
from relax_events.events.parts import MediaRef, Modality
from relax_events.media.items import MediaAccess, MediaItem
from relax_events.media.library import CACHE_FOLDER, MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.packages.examples.tiny_models import make_tiny
from tests.unit.image_model import image_file, image_item, image_run


@pytest.fixture
def library(tmp_path: Path) -> MediaLibrary:
    return MediaLibrary(image_run(tmp_path))


def object_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "runs" / "images" / "objects").rglob("*") if path.is_file()]


def cached_files(folder: Path) -> list[Path]:
    return [path for path in (folder / CACHE_FOLDER).glob("*/*") if path.parent.name != "locks"]


def of_path(path: Path) -> MediaItem:
    return MediaItem(Modality.IMAGE, path.name, f"rows:{path.name}", MediaAccess(path.parent))


def check_fails(library: MediaLibrary, reference: MediaRef, reason: str) -> str:
    with pytest.raises(MediaError) as caught:
        library.load(reference)
    assert caught.value.reason == reason
    return str(caught.value)


def test_same_image_is_stored_once_under_its_content(library: MediaLibrary, tmp_path: Path) -> None:
    one, other = (
        library.add(replace(image_item(48, 32), location=location))
        for location in ("row 1", "row 2")
    )
    assert one == other
    (file,) = object_files(tmp_path)
    assert file.read_bytes() == image_file(48, 32)
    assert file.name == f"{one.digest.hex()}.png"
    assert (one.media_type, one.width, one.height, one.num_bytes) == (
        "image/png",
        48,
        32,
        file.stat().st_size,
    )


def test_media_of_a_repeated_row_are_not_read_again(library: MediaLibrary, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(image_file(32, 32))
    first = library.add(of_path(path))
    path.unlink()
    assert library.add(of_path(path)) == first


def test_equal_media_locations_in_two_datasets_are_distinguished(
    library: MediaLibrary, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(
            image_file(32, 32, seed=len(list(tmp_path.iterdir())))
        )
    items = [
        MediaItem(
            Modality.IMAGE, "a.png", "rows.jsonl:row 0: images[0]", MediaAccess(tmp_path / folder)
        )
        for folder in ("one", "two")
    ]
    inline = [
        replace(image_item(32, 32, seed=seed), location="rows.jsonl:row 0: images[0]")
        for seed in (7, 8)
    ]
    assert len({library.add(item).digest for item in (*items, *inline)}) == 4


def test_workers_of_a_machine_fetch_and_process_an_image_once(
    library: MediaLibrary, tmp_path: Path
) -> None:
    reference = library.add(image_item(48, 32))
    pixels = library.load(reference).pixels
    assert library.load(reference).pixels is pixels
    for file in object_files(tmp_path):
        file.unlink()
    other_worker = MediaLibrary(image_run(tmp_path))
    other_worker.prefetch([reference])
    assert np.array_equal(other_worker.load(reference).pixels, pixels)
    assert len(cached_files(tmp_path)) == 1


def test_worker_of_another_machine_fetches_for_itself(
    library: MediaLibrary, tmp_path: Path
) -> None:
    reference = library.add(image_item(100, 70))
    elsewhere = image_run(
        tmp_path / "elsewhere",
        objects={"uri": (tmp_path / "runs" / "images" / "objects").as_uri(), "by_run": False},
    )
    assert np.array_equal(
        MediaLibrary(elsewhere).load(reference).pixels, library.load(reference).pixels
    )


def test_rendering_a_row_stores_nothing(library: MediaLibrary, tmp_path: Path) -> None:
    piece = library.preprocess(image_item(48, 32))
    assert piece.pixels.shape == (32, 48, 3)
    assert object_files(tmp_path) == []


def test_sequence_must_hold_the_placeholders_of_its_media(library: MediaLibrary) -> None:
    reference = library.add(image_item(64, 64))
    layout = library._require_layout()
    (block,) = layout.blocks(reference)
    fit = np.concatenate([[1], block.ids, [2]])
    library.require_fit(fit, np.ones(len(fit), bool), [reference])
    with pytest.raises(
        PoisonSample,
        match=(
            f"1 media files have {len(block)} tokens, and the sequence has "
            f"{len(block) - 1} placeholders"
        ),
    ):
        library.require_fit(fit[2:], np.ones(len(fit) - 2, bool), [reference])
    with pytest.raises(PoisonSample, match="has 0 placeholders"):
        library.require_fit(fit, np.zeros(len(fit), bool), [reference])
    library.require_fit(fit[:1], np.ones(1, bool), [])


def test_error_names_missing_image(library: MediaLibrary, tmp_path: Path) -> None:
    reference = library.add(image_item(48, 32))
    for file in [*object_files(tmp_path), *cached_files(tmp_path)]:
        file.unlink()
    assert reference.uri in check_fails(MediaLibrary(image_run(tmp_path)), reference, "vanished")
    with pytest.raises(MediaError, match="there is no such object"):
        MediaLibrary(image_run(tmp_path)).prefetch([reference])


@pytest.mark.parametrize("content", [image_file(48, 32, seed=9), b"", b"other"])
def test_error_names_altered_image(library: MediaLibrary, tmp_path: Path, content: bytes) -> None:
    reference = library.add(image_item(48, 32))
    cached_files(tmp_path)[0].unlink()
    object_files(tmp_path)[0].write_bytes(content)
    assert "was altered" in check_fails(MediaLibrary(image_run(tmp_path)), reference, "altered")


def test_media_reference_with_a_wrong_image_size_is_rejected(library: MediaLibrary) -> None:
    reference = library.add(image_item(48, 32))
    library.load(reference)
    text = check_fails(library, replace(reference, width=32, height=48), "wrong_size")
    assert text.endswith("is 48 x 32, but its reference has 32 x 48")


def test_reference_to_too_large_a_file_is_refused_unread(tmp_path: Path) -> None:
    library = MediaLibrary(image_run(tmp_path, model={"media": {"max_item_bytes": 100}}))
    check_fails(
        library,
        MediaRef("file:///x", bytes(32), "image/png", 101, width=32, height=32),
        "too_large",
    )


def test_reference_into_an_allowed_root_is_fetched_from_there(tmp_path: Path) -> None:
    elsewhere = ObjectStore.open((tmp_path / "images").as_uri())
    stored = elsewhere.put(image_file(48, 32))
    reference = MediaRef(
        stored.uri, stored.digest, "image/png", stored.num_bytes, width=48, height=32
    )
    allowed = image_run(tmp_path, objects={"allowed_roots": [(tmp_path / "images").as_uri()]})
    assert MediaLibrary(allowed).load(reference).pixels.shape == (32, 48, 3)


def test_store_failure_is_not_reported_as_an_invalid_image(
    library: MediaLibrary, tmp_path: Path
) -> None:
    reference = library.add(image_item(48, 32))
    cached_files(tmp_path)[0].unlink()
    file = object_files(tmp_path)[0]
    file.unlink()
    file.symlink_to(file)  # an endless loop of links
    with pytest.raises(ObjectError):
        MediaLibrary(image_run(tmp_path)).load(reference)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (image_file(96, 96)[:400], "truncated"),
        (b"no image", "wrong_type"),
        (image_file(16, 16 * 201), "bad_shape"),
        (image_file(64, 64, seed=1) + bytes(20_000), "too_large"),
        (image_file(300, 300), "too_many_pixels"),
    ],
)
def test_hostile_image_is_refused_before_it_is_stored(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    library = MediaLibrary(
        image_run(tmp_path, model={"media": {"max_item_bytes": 20_000, "max_image_pixels": 80_000}})
    )
    with pytest.raises(MediaError) as caught:
        library.add(MediaItem(Modality.IMAGE, content, "rows:5"))
    assert caught.value.reason == reason
    assert object_files(tmp_path) == []


def test_media_library_of_a_text_model_rejects_images(tmp_path: Path) -> None:
    config = image_run(
        tmp_path, model={"path": make_tiny(tmp_path / "text", corpus=["x"], hidden_size=32)}
    )
    with pytest.raises(MediaError, match="the model reads text only, and the prompt has media"):
        MediaLibrary(config).add(image_item(32, 32))
