"""Receive buffers that another process of the same host maps: who gets a buffer's descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ordinary_user import ORDINARY_USER

from relax_events.weights.broadcast.channel import SEALS, ConnectionLost, ReceiveBuffer
from relax_events.weights.broadcast.descriptors import (
    KEY_BYTES,
    NAME,
    REQUEST_SECONDS,
    RESPONSE_SECONDS,
    DescriptorServer,
    SharedFile,
    request_descriptor,
)
from relax_events.weights.broadcast.shared_memory import (
    SameHostProbe,
    is_on_same_host,
    map_remote_buffer,
)

PATIENCE_SECONDS = 60.0
PRELUDE = """
import json, os, socket, sys
from relax_events.privileges import hide_process
from relax_events.weights.broadcast.channel import ConnectionLost, ReceiveBuffer
from relax_events.weights.broadcast.shared_memory import (
    SameHostProbe, is_on_same_host, map_remote_buffer
)
def become(user):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    hide_process()
def send(value):
    print(json.dumps(value), flush=True)
def receive():
    return json.loads(sys.stdin.readline())
"""
OWNER = """
become(receive())
probe, buffer = SameHostProbe(), ReceiveBuffer(64)
send([probe.handle, buffer.handle])
receive()
send(buffer.data[:4].tolist())
"""
TRAINER = """
become(receive())
probe, handle = receive()
view = None
try:
    view = map_remote_buffer(handle, 64)
    view[1] = 7
    lost = ""
except ConnectionLost as error:
    lost = str(error)
send([is_on_same_host(probe), lost])
"""
ASKER = """
become(receive())
_, handle = receive()
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(chr(0) + handle["socket"])
try:
    connection.send(bytes.fromhex(handle["key"]))
    send([connection.recvmsg(1, 4096)[0].hex()])
except OSError as error:
    send([""])
"""
FORKING = """
first = ReceiveBuffer(64)
map_remote_buffer(first.handle, 64)
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    buffer = ReceiveBuffer(64)
    send([buffer.handle, first.handle])
    receive()
    send(buffer.data[:4].tolist() + first.data[:4].tolist())
    os._exit(0)
send(first.handle)
os.waitpid(pid, 0)
"""
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Program:
    """A Python process that receives and sends JSON values, one a line."""

    def __init__(self, text: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(opened: contextlib.ExitStack, text: str, *, user: int | None = None) -> Program:
    program = opened.enter_context(contextlib.closing(Program(text)))
    if user is not None:
        program.send(user)
    return program


@contextlib.contextmanager
def fake_server(*files: int) -> Iterator[dict[str, Any]]:
    """Send these descriptors to the first client, and yield the handle that leads to them."""
    name = f"{NAME}-{secrets.token_hex(KEY_BYTES)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(KEY_BYTES)
                if files:
                    socket.send_fds(connection, [b"1"], files)

        thread = threading.Thread(target=respond)
        thread.start()
        number = os.fstat(files[0]).st_ino if files else 0
        try:
            yield {"socket": name, "key": "00" * KEY_BYTES, "number": number}
        finally:
            thread.join(PATIENCE_SECONDS)


def descriptors_of(file: int) -> list[str]:
    """Return the descriptors of this process that have the same file open."""
    number = os.fstat(file).st_ino
    paths = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == number:
                paths.append(path.name)
    return paths


def memory_file(*, seals: int = SEALS) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 64)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def test_bytes_written_through_the_handle_are_in_the_buffer() -> None:
    buffer = ReceiveBuffer(1000)
    assert buffer.data.tolist() == [0] * 1000
    map_remote_buffer(buffer.handle, 1000)[3] = 7
    assert buffer.data[:5].tolist() == [0, 0, 0, 7, 0]


def test_buffer_may_be_empty() -> None:
    buffer = ReceiveBuffer(0)
    assert len(buffer.data) == len(map_remote_buffer(buffer.handle, 0)) == 0


def test_each_buffer_has_its_own_key_and_one_socket_serves_all() -> None:
    first, second = ReceiveBuffer(64), ReceiveBuffer(64)
    assert first.handle["socket"] == second.handle["socket"]
    assert len({first.handle["key"], second.handle["key"]}) == 2
    assert len(bytes.fromhex(first.handle["key"])) == 16
    assert first.handle == first.handle


@pytest.mark.parametrize("key", ["00" * KEY_BYTES, "", None])
def test_wrong_key_is_refused(key: str | None) -> None:
    buffer = ReceiveBuffer(64)
    true = buffer.handle["key"]
    wrong = true[:-2] + ("00" if true[-2:] != "00" else "01") if key is None else key
    with pytest.raises(OSError, match=r"no buffer of it has this key|reset|Broken"):
        request_descriptor(buffer.handle["socket"], bytes.fromhex(wrong))
    with pytest.raises(ConnectionLost):
        map_remote_buffer(buffer.handle | {"key": wrong}, 64)
    map_remote_buffer(buffer.handle, 64)


def test_request_that_is_longer_than_a_key_is_refused() -> None:
    buffer = ReceiveBuffer(64)
    with pytest.raises(OSError, match=r"no buffer of it has this key|reset|Broken"):
        request_descriptor(buffer.handle["socket"], buffer.file.key * 1000)


def test_handle_of_a_deleted_buffer_is_refused() -> None:
    buffer, other = ReceiveBuffer(64), ReceiveBuffer(64)
    handle = buffer.handle
    map_remote_buffer(handle, 64)
    del buffer
    with pytest.raises(ConnectionLost, match="no buffer of it has this key any more"):
        map_remote_buffer(handle, 64)
    map_remote_buffer(other.handle, 64)


def test_handle_with_another_number_size_or_socket_is_rejected() -> None:
    buffer = ReceiveBuffer(64)
    with pytest.raises(ConnectionLost, match="is not the buffer of the handle"):
        map_remote_buffer(buffer.handle | {"number": 5}, 64)
    with pytest.raises(ConnectionLost, match="is not the buffer of the handle"):
        map_remote_buffer(buffer.handle, 65)
    with pytest.raises(ConnectionLost, match=r"no buffer came over the socket .*refused"):
        map_remote_buffer(buffer.handle | {"socket": f"{NAME}-{'00' * KEY_BYTES}"}, 64)


def test_buffer_that_its_worker_may_truncate_is_not_mapped(opened: contextlib.ExitStack) -> None:
    file = memory_file(seals=0)
    opened.callback(os.close, file)
    with (
        fake_server(file) as handle,
        pytest.raises(ConnectionLost, match="has a size that its worker may change"),
    ):
        map_remote_buffer(handle, 64)
    assert descriptors_of(file) == [str(file)]


def test_file_that_is_no_memory_is_not_mapped(tmp_path: Path, opened: contextlib.ExitStack) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    file = os.open(path, os.O_RDWR)
    opened.callback(os.close, file)
    with fake_server(file) as handle, pytest.raises(ConnectionLost, match="can't be mapped"):
        map_remote_buffer(handle, 64)
    assert descriptors_of(file) == [str(file)]


@pytest.mark.parametrize("count", [0, 2, 3])
def test_other_than_one_descriptor_is_refused_and_leaves_none_open(
    opened: contextlib.ExitStack, count: int
) -> None:
    file = memory_file()
    opened.callback(os.close, file)
    text = "several descriptors" if count else "no descriptor"
    with fake_server(*[file] * count) as handle, pytest.raises(ConnectionLost, match=text):
        map_remote_buffer(handle, 64)
    assert descriptors_of(file) == [str(file)]


def test_received_descriptor_is_not_inherited() -> None:
    buffer = ReceiveBuffer(64)
    file = request_descriptor(buffer.handle["socket"], buffer.file.key)
    try:
        assert not os.get_inheritable(file)
    finally:
        os.close(file)


def test_silent_peer_delays_others_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stays connected all the time; a peer whose request is late here asks again."""
    assert REQUEST_SECONDS < RESPONSE_SECONDS
    monkeypatch.setattr("relax_events.weights.broadcast.descriptors.REQUEST_SECONDS", 0.1)
    buffer, is_mapped, end = ReceiveBuffer(64), False, time.monotonic() + PATIENCE_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.settimeout(PATIENCE_SECONDS)
        silent.connect(f"\0{buffer.handle['socket']}")
        while not is_mapped and time.monotonic() < end:
            with contextlib.suppress(ConnectionLost):
                map_remote_buffer(buffer.handle, 64)
                is_mapped = True
        assert is_mapped
        assert silent.recv(1) == b""  # it was dropped


def test_client_gives_up_on_a_server_that_does_not_respond() -> None:
    name = f"{NAME}-{secrets.token_hex(KEY_BYTES)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        with pytest.raises(TimeoutError):
            request_descriptor(name, bytes(KEY_BYTES), seconds=0.1)


def test_server_keeps_no_file_open() -> None:
    server, kept = DescriptorServer(), memory_file()
    try:
        file = SharedFile(os.dup(kept))
        server.share(file)
        assert len(descriptors_of(kept)) == 2
        del file
        assert descriptors_of(kept) == [str(kept)]
    finally:
        os.close(kept)


def test_same_host_is_detected_by_the_content_of_shared_memory() -> None:
    probe = SameHostProbe()
    assert is_on_same_host(probe.handle)
    assert not is_on_same_host(probe.handle | {"content": "00" * 16})
    assert not is_on_same_host(probe.handle | {"content": "\u00fc"})
    assert not is_on_same_host(probe.handle | {"socket": f"{NAME}-{'00' * KEY_BYTES}"})
    probe.data[0] = 255 - int(probe.data[0])
    assert not is_on_same_host(probe.handle)


def test_mapping_outlives_its_buffer() -> None:
    buffer = ReceiveBuffer(64)
    view = map_remote_buffer(buffer.handle, 64)
    data, buffer = buffer.data, None  # type: ignore[assignment]
    view.copy_(torch.arange(64, dtype=torch.uint8))
    assert data.tolist() == list(range(64))


def test_hidden_processes_of_an_ordinary_user_share_a_buffer(opened: contextlib.ExitStack) -> None:
    """Neither can read the other one through /proc."""
    owner = start(opened, OWNER, user=ORDINARY_USER)
    trainer = start(opened, TRAINER, user=ORDINARY_USER)
    trainer.send(owner.receive())
    assert trainer.receive() == [True, ""]
    owner.send("mapped")
    assert owner.receive() == [0, 7, 0, 0]


@root
def test_trainer_of_another_user_refuses_a_buffer(opened: contextlib.ExitStack) -> None:
    owner = start(opened, OWNER, user=ORDINARY_USER)
    trainer = start(opened, TRAINER, user=ORDINARY_USER + 1)
    trainer.send(owner.receive())
    on_same_host, lost = trainer.receive()
    assert not on_same_host
    assert f"runs as user {ORDINARY_USER}, not as this process's user {ORDINARY_USER + 1}" in lost
    owner.send("done")
    assert owner.receive() == [0, 0, 0, 0]


@root
@pytest.mark.parametrize(("user", "response"), [(ORDINARY_USER, "31"), (ORDINARY_USER + 1, "")])
def test_owner_sends_nothing_to_another_user_that_knows_the_key(
    opened: contextlib.ExitStack, user: int, response: str
) -> None:
    owner = start(opened, OWNER, user=ORDINARY_USER)
    asker = start(opened, ASKER, user=user)
    asker.send(owner.receive())
    assert asker.receive() == [response]


def test_forked_process_shares_its_buffers_by_its_own_socket(opened: contextlib.ExitStack) -> None:
    """It and its parent share what they hold, also buffers from before the fork."""
    program = start(opened, FORKING)
    lines = [program.receive(), program.receive()]
    (parent,) = (line for line in lines if isinstance(line, dict))
    (own, inherited) = next(line for line in lines if isinstance(line, list))
    assert own["socket"] == inherited["socket"] != parent["socket"]
    for position, handle in enumerate((own, inherited, parent)):
        map_remote_buffer(handle, 64)[position] = 1 + position
    program.send("mapped")
    assert program.receive() == [1, 0, 0, 0, 0, 2, 3, 0]
