"""Image files: valid, rotated, and hostile."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.media.facts import MediaFacts
from relax_events.media.images import decode_image, inspect_image
from tests.unit.image_model import image_file

WEBP_HEAD = image_file(96, 96, kind="WEBP")[:200]
"""A decoder of WebP does not even open what was cut off."""
LIMITS = MediaConfig(max_item_bytes=50_000, max_image_pixels=10_000)


def check_refused(data: bytes, reason: str, *, decode: bool = False) -> str:
    with pytest.raises(MediaError) as caught:
        decode_image(
            data, size=(16, 16), limits=LIMITS, location="rows:1"
        ) if decode else inspect_image(data, limits=LIMITS, location="rows:1")
    assert caught.value.reason == reason
    return str(caught.value)


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose head claims any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif")],
)
def test_image_header_gives_media_type_and_size(kind: str, media_type: str) -> None:
    assert inspect_image(
        image_file(48, 32, kind=kind), limits=LIMITS, location="rows:1"
    ) == MediaFacts(media_type, 48, 32)


def test_decoded_pixels_match_the_image_file() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert np.array_equal(
        decode_image(file.getvalue(), size=(16, 24), limits=LIMITS, location="rows:1"), pixels
    )


def test_image_is_rotated_by_its_exif_orientation() -> None:
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = 255
    image, file, exif = Image.fromarray(pixels), BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    image.save(file, "JPEG", quality=100, exif=exif)
    assert inspect_image(file.getvalue(), limits=LIMITS, location="rows:1") == MediaFacts(
        "image/jpeg", 16, 32
    )
    upright = decode_image(file.getvalue(), size=(32, 16), limits=LIMITS, location="rows:1")
    assert upright[:14].min() > 200  # what was left is on top now
    assert upright[18:].max() < 50


def test_image_of_any_mode_is_converted_to_rgb() -> None:
    for mode in ("RGBA", "L", "P", "LA", "1"):
        file = BytesIO()
        Image.new(mode, (16, 16)).save(file, "PNG")
        assert decode_image(
            file.getvalue(), size=(16, 16), limits=LIMITS, location="rows:1"
        ).shape == (16, 16, 3)


@pytest.mark.parametrize("side", [200, 10_000, 60_000])
def test_decompression_bomb_is_rejected_by_its_header_size(side: int) -> None:
    text = check_refused(png_that_claims(side, side), "too_many_pixels")
    assert text.startswith("rows:1")


STRANGERS = [
    b"",
    b"hello",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"%PDF-1.7",
    b"\x7fELF" + bytes(60),
    b"GIF89a",
    WEBP_HEAD,
]


@pytest.mark.parametrize("data", STRANGERS)
def test_non_image_files_are_rejected(data: bytes) -> None:
    assert "is not an image of the formats PNG" in check_refused(data, "wrong_type")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_error_names_a_truncated_image_file(kind: str) -> None:
    whole = image_file(96, 96, kind=kind)
    assert check_refused(whole[: len(whole) * 2 // 3], "truncated", decode=True).startswith(
        "rows:1 is truncated or damaged"
    )


def test_error_names_a_png_without_pixel_data() -> None:
    check_refused(png_that_claims(90, 90), "truncated", decode=True)


def test_large_file_is_refused() -> None:
    assert "must be at most model.media.max_item_bytes = 50000, got 50001" in check_refused(
        bytes(50_001), "too_large"
    )
