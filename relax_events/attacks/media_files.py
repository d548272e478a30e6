"""Files that a decoder of images, videos or audio must refuse: of no format, damaged, huge when
they are unpacked, or naming other files.
"""

from __future__ import annotations

import struct
import zlib
from hashlib import sha256

PNG = b"\x89PNG\r\n\x1a\n"
HUGE_SIDE = 60_000


def list_files(path: str, *, port: int) -> dict[str, bytes]:
    """Return the files by the effect that they try to have.

    Args:
        path: A file of this machine that some of them name.
        port: On 127.0.0.1, to which some of them lead.
    """
    address = f"http://127.0.0.1:{port}/x"
    return {
        "nothing": b"",
        "a text": b"no media at all",
        "a million pixels a side": _png(1_000_000, 1_000_000, b""),
        "a compressed image of many pixels": _png(HUGE_SIDE, HUGE_SIDE, bytes(64 << 20)),
        "half of an image": _png(64, 64, _noise(64 * 193))[:4000],
        "a negative side": _png(-1, -1, b""),
        "a chunk of 2 GB": PNG + struct.pack(">I", 0x7FFFFFFF) + b"IHDR",
        "text that unpacks to 64 MB": _png(8, 8, bytes(200), text=bytes(64 << 20)),
        "a GIF without end": b"GIF89a\xff\xff\xff\xff\xf7\x00\x00" + b"\x00" * 768 + b"\x2c" * 999,
        "SVG with a file": _svg(f"file://{path}"),
        "SVG with an address": _svg(address),
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file\n",
        "PDF": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\n",
        "a playlist of files": f"#EXTM3U\n#EXTINF:1,\nfile://{path}\n".encode(),
        "a playlist of addresses": f"#EXTM3U\n#EXTINF:1,\n{address}\n".encode(),
        "a list of files to join": f"ffconcat version 1.0\nfile '{path}'\n".encode(),
        "subtitles": b"1\n00:00:00,000 --> 00:00:01,000\nx\n",
        "a wave of 4 GB": b"RIFF\xff\xff\xff\xffWAVEfmt \x10\x00\x00\x00\x01\x00\x02\x00"
        b"\x80\xbb\x00\x00\x00\xee\x02\x00\x04\x00\x10\x00data\xff\xff\xff\xff",
        "a wave without channels": b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x00\x00"
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00data\x00\x00\x00\x00",
        "a film of boxes in boxes": _boxes(2000),
        "a film with a huge box": struct.pack(">I4sQ", 1, b"ftyp", 1 << 62) + b"isom" * 8,
        "a film of zeros": b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + bytes(100_000),
        "Matroska that is damaged": b"\x1aE\xdf\xa3" + b"\xff" * 10_000,
        "an archive": b"PK\x03\x04" + bytes(1000),
        "a pickle": b"cos\nsystem\n(S'id'\ntR.",
    }


def _png(width: int, height: int, pixels: bytes, *, text: bytes = b"") -> bytes:
    head = struct.pack(">ii5B", width, height, 8, 2, 0, 0, 0)
    texts = _chunk(b"zTXt", b"x\x00\x00" + zlib.compress(text)) if text else b""
    data = _chunk(b"IDAT", zlib.compress(pixels, 9))
    return PNG + _chunk(b"IHDR", head) + texts + data + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def _svg(address: str) -> bytes:
    link = f'<image href="{address}" width="9" height="9"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg">{link}</svg>'.encode()


def _boxes(depth: int) -> bytes:
    content = b"\x00\x00\x00\x10ftypisom\x00\x00\x02\x00"
    for number in range(depth, 0, -1):
        content += struct.pack(">I4s", number * 8, b"moov")
    return content


def _noise(num_bytes: int) -> bytes:
    """Return bytes that can't be compressed, always the same."""
    digests = (sha256(number.to_bytes(4)).digest() for number in range(num_bytes // 32 + 1))
    return b"".join(digests)[:num_bytes]
