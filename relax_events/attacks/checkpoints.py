"""Pickles that an attacker could put in place of a distributed checkpoint's `.metadata`.

They are written by hand, byte by byte: the product has no writer of pickles.
"""

from __future__ import annotations

from pathlib import Path

HIGHEST_PLACE = (1 << 32) - 1


def metadata_pickles(canary: Path) -> dict[str, bytes]:
    """Return the pickles by the effect that they try to have.

    Args:
        canary: A file that the pickles with code create.
    """
    command = f"touch {canary}"
    return {
        "os.system": _call("os", "system", command),
        "posix.system by opcode GLOBAL": b"cposix\nsystem\n" + _text(command) + b"\x85R.",
        "exec": _call("builtins", "exec", f"open({str(canary)!r}, 'w')"),
        "eval": _call("builtins", "eval", f"open({str(canary)!r}, 'w')"),
        "open": _name("builtins", "open") + _text(str(canary)) + _text("w") + b"\x86R.",
        "subprocess": _call("subprocess", "getoutput", command),
        "dotted name": _call("os", "path.os.system", command),
        "dotted name below an allowed module": _call("torch", "os.system", command),
        "dotted name below an allowed class": _call(
            "torch.distributed.checkpoint.metadata", "os.system", command
        ),
        "import of a module": _call("importlib", "import_module", "antigravity"),
        "getattr": _call("builtins", "getattr", "Metadata"),
        "torch.load in the pickle": _call("torch.storage", "_load_from_bytes", "x"),
        "torch.hub": _call("torch.hub", "load", "x"),
        "opcode INST": b"(" + _text(command) + b"ios\nsystem\n.",
        "opcode OBJ": b"(" + _name("os", "system") + _text(command) + b"o.",
        "opcode EXT1": b"\x80\x04\x82\x01.",
        "opcode PERSID": b"Pos.system\n.",
        "opcode NEXT_BUFFER": b"\x80\x05\x97.",
        "place in the memo": b"\x80\x04Nr" + HIGHEST_PLACE.to_bytes(4, "little") + b".",
        "bytes that are not there": b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".",
        "text that is not there": b"\x80\x04X\xff\xff\xff\x7fx.",
        "change of a class": (
            _name("torch.distributed.checkpoint.metadata", "Metadata")
            + b"N}"
            + _text("__init__")
            + _name("torch", "Size")
            + b"s\x86b."
        ),
        "another object": b"\x80\x04}.",
        "class instead of an object": _name("torch.distributed.checkpoint.metadata", "Metadata")
        + b".",
        "nothing": b"",
        "end too early": b"\x80\x04}",
        "no pickle": b"\x00" * 100,
        "lists in lists": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    }


def _name(module: str, name: str) -> bytes:
    """Return the opcodes that push a name of a module."""
    return _text(module) + _text(name) + b"\x93"


def _call(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x04" + _name(module, name) + _text(argument) + b"\x85R."


def _text(text: str) -> bytes:
    content = text.encode()
    return b"X" + len(content).to_bytes(4, "little") + content
