"""What programs may still do behind the filter of system calls: ordinary Python and tools, and
connections where they are allowed.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from escape_program import KINDS, WEAKENED, walls_of

from relax_events.sandbox import Limits, Sandbox, Verdict
from relax_events.sandbox.inside import landlock

ORDINARY = """
import asyncio, fcntl, mmap, os, select, shutil, signal, socket, sqlite3, subprocess, sys, tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

def run_shell():
    script = '''
    set -e
    mkdir -p tree/below; echo b > tree/below/file; echo a >> tree/below/file; mkfifo pipe
    sort tree/below/file | head -1; cp -r tree copy; mv copy moved; ln -s file tree/link
    find moved -type f | xargs cat | wc -l; rm -r tree moved; (echo through > pipe &); cat pipe
    dd if=/dev/zero of=zeros bs=1000 count=9 2> /dev/null; truncate -s 100 zeros; wc -c < zeros
    tar cf all.tar zeros; tar tf all.tar; (exit 3) || echo status $?
    '''
    return subprocess.run(['bash', '-c', script], capture_output=True, text=True).stdout.split()

def run_threads():
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(abs, [-1, -2]))

async def run_async():
    process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    reading, _ = await process.communicate(b'piped')
    return reading.decode()

def spawn():
    pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 5'], os.environ, resetids=True)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use_database():
    with sqlite3.connect('database') as database:
        database.execute('create table numbers (number)')
        database.execute('insert into numbers values (7)')
        return database.execute('select number from numbers').fetchone()[0]

def use_files():
    with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as named:
        file.write(b'12345')
        file.seek(0)
        shutil.copyfileobj(file, named)
        named.flush()
        fcntl.flock(named, fcntl.LOCK_EX)
        os.posix_fallocate(named.fileno(), 0, 10)
        with mmap.mmap(named.fileno(), 10) as mapped:
            return shutil.copyfile(named.name, 'copied') and mapped[:5].decode()

def use_pair():
    one, other = socket.socketpair()
    one.setblocking(False)
    one.send(b'x')
    return other.recv(9).decode() + str(select.select([one], [], [], 0)[0])

def use_signals():
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append('alarm'))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while not seen:
        signal.pause()
    return seen

def abort():
    code = 'import os; os.abort()'
    return subprocess.run([sys.executable, '-c', code]).returncode < 0 if executes else True

executes = os.access(sys.executable, os.X_OK)
for one in (run_shell, run_threads, lambda: asyncio.run(run_async()), spawn, use_database,
            use_files, use_pair, use_signals, abort):
    print(one())
"""
PRINTED = """['a', '2', 'through', '100', 'zeros', 'status', '3']
[1, 2]
piped
5
7
12345
x[]
['alarm']
True
"""
CLIENT = """
import json, socket, sys
from relax_events.sandbox.inside import landlock, seccomp
allowed, refused, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if landlock.version():
    landlock.restrict(readable=["/"], writable=[], tcp_ports=[allowed])
seccomp.restrict(may_signal=False, may_start_processes=False, may_connect=True)
ways = {
    "allowed": lambda: socket.create_connection(("127.0.0.1", allowed)),
    "by name": lambda: socket.create_connection(("localhost", allowed)),
    "refused": lambda: socket.create_connection(("127.0.0.1", refused)),
    "first data": lambda: socket.socket().sendto(b"x", 0x20000000, ("127.0.0.1", refused)),
    "several paths": lambda: socket.socket(2, 1, 262).connect(("127.0.0.1", refused)),
    "path": lambda: socket.socket(socket.AF_UNIX).connect(path),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "serve": lambda: socket.create_server(("127.0.0.1", 0)),
    "datagrams": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 53)),
}
succeeded = []
for name, way in ways.items():
    try:
        way()
    except OSError:
        continue
    succeeded.append(name)
print(json.dumps(succeeded))
"""


@pytest.mark.parametrize("kind", [*KINDS, *WEAKENED])
def test_ordinary_programs_run_behind_the_filter(kind: str) -> None:
    if (found := walls_of(kind)) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    with Sandbox(ORDINARY, Limits(seconds=60), isolation=found) as sandbox:
        assert sandbox.run_with_input("") == (Verdict.PASSED, PRINTED)


def test_program_that_may_connect_reaches_the_ports_that_landlock_allows(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as allowed,
        socket.create_server(("127.0.0.1", 0)) as refused,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind(path)
        local.listen()
        ports = [str(server.getsockname()[1]) for server in (allowed, refused)]
        result = subprocess.run(
            [sys.executable, "-c", CLIENT, *ports, path],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
    succeeded = {"allowed", "by name", "datagrams"}
    if landlock.version() < landlock.TCP_VERSION:
        succeeded.add("refused")
    assert set(json.loads(result.stdout)) == succeeded
