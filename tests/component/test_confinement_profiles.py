"""What a child process of each profile may touch, tried in real children."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Profile
from relax_events.confinement.entry_points import Door, EntryPoint
from relax_events.confinement.profiles import describe_missing, list_ports
from relax_events.sandbox.inside import landlock, seccomp

Try = Callable[..., str]
REFUSED = "refused"
SECRET = "RELAX_TEST_SECRET"
confined = pytest.mark.skipif(
    bool(describe_missing()), reason=f"this kernel does not restrict {describe_missing()}"
)


@pytest.fixture
def try_in(tmp_path: Path) -> Iterator[Callable[..., Try]]:
    """Return what opens a child of a profile, and returns a function that evaluates code there."""
    opened: list[ChildPool] = []

    def open_child(profile: Profile, **settings: Any) -> Try:
        point = EntryPoint("test", (Door.REPLY,), profile, "relax_events.attacks.probe_child")
        setup = {"memory_bytes": 2 * 1024**3}
        pool = ChildPool(ChildSettings(entry_point=point, setup=setup, **settings))
        opened.append(pool)

        def evaluate(code: str, **names: Any) -> str:
            question = {"code": code, "names": names}
            try:
                head = pool.call(question, seconds=60.0).result().head
            except ChildLost as lost:
                return lost.kind
            return REFUSED if "error" in head else str(head["value"])

        return evaluate

    yield open_child
    for pool in opened:
        pool.close()


@pytest.mark.parametrize("profile", [Profile.PURE, Profile.NETWORK, Profile.TRUSTED])
def test_child_can_not_read_its_worker(try_in: Callable[..., Try], profile: Profile) -> None:
    evaluate = try_in(profile)
    memory = "Path(f'/proc/{pid}/mem').open('rb').read(1)"
    assert evaluate(memory, pid=os.getpid()) == REFUSED
    variables = "b'PATH=' in Path(f'/proc/{pid}/environ').read_bytes()"
    assert evaluate(variables, pid=os.getpid()) in ("False", REFUSED)


def test_variables_of_a_worker_stay_for_itself_and_those_that_it_starts() -> None:
    """Also those of a process that was started with them, not only those that were set later."""
    program = (
        "import os, subprocess, sys\n"
        "from relax_events.privileges import hide_process\n"
        "hide_process()\n"
        "assert not any(open('/proc/self/environ', 'rb').read())\n"
        f"assert os.environ['{SECRET}'] == 'kept'\n"
        f"code = 'import os; print(os.environ[\"{SECRET}\"])'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True).stdout.decode())\n"
    )
    environment = {**os.environ, SECRET: "kept"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True
    )
    assert said.stdout.split() == [b"kept"]


@confined
@pytest.mark.parametrize("profile", [Profile.PURE, Profile.NETWORK])
@pytest.mark.parametrize(
    "code",
    [
        "Path(file).read_text()",
        "Path(file).write_text('x')",
        "Path(file).unlink()",
        "Path(folder).joinpath('new').touch()",
        "os.listdir(folder)",
        "os.fork()",
        "subprocess.run(['true'], check=True)",
        "os.execv('/bin/true', ['true'])",
        "os.kill(pid, 0)",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_server(('127.0.0.1', 0))",
        "socket.create_connection(('127.0.0.1', port), 5)",
        "os.memfd_create('x')",
        "os.open(folder, os.O_TMPFILE | os.O_RDWR)",
    ],
)
def test_confined_child_is_refused(
    try_in: Callable[..., Try], tmp_path: Path, profile: Profile, code: str
) -> None:
    (tmp_path / "file").write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "file": str(tmp_path / "file"),
            "folder": str(tmp_path),
            "pid": os.getpid(),
            "port": server.getsockname()[1],
        }
        assert try_in(profile)(code, **names) == REFUSED
        assert not (tmp_path / "new").exists()
        assert try_in(Profile.TRUSTED)(code, **names) != REFUSED, "the check can fail"


@confined
def test_pure_child_reads_its_packages_and_what_its_setup_names(
    try_in: Callable[..., Try], tmp_path: Path
) -> None:
    (tmp_path / "named").write_text("named")
    (tmp_path / "other").write_text("other")
    evaluate = try_in(Profile.PURE, readable=(str(tmp_path / "named"),))
    assert evaluate("Path(file).read_text()", file=str(tmp_path / "named")) == "'named'"
    assert evaluate("Path(file).read_text()", file=str(tmp_path / "other")) == REFUSED
    assert evaluate("__import__('sympy').Integer(2) + 2") == "4"
    assert evaluate("[t.start() or t.join() for t in [threading.Thread(target=int)]]") == "[None]"


@confined
def test_network_child_connects_to_its_ports_alone(try_in: Callable[..., Try]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as named,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [one.getsockname()[1] for one in (named, other)]
        evaluate = try_in(Profile.NETWORK, ports=(ports[0],))
        code = "socket.create_connection(('127.0.0.1', port), 5) and 1"
        assert evaluate(code, port=ports[0]) == "1"
        assert evaluate(code, port=ports[1]) == REFUSED


def test_ports_are_those_of_the_addresses_and_of_the_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    addresses = ["http://a:8000/x", "https://b", "ws://c", "wss://d:99", "not an address"]
    assert list_ports(addresses) == (80, 99, 443, 8000)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert list_ports(["https://b"]) == (443, 3128)


def test_what_the_kernel_can_not_restrict_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert describe_missing().startswith("files (Landlock")
    monkeypatch.setattr(seccomp, "ARCHITECTURES", {})
    assert " and system calls (seccomp" in describe_missing()


@confined
def test_pure_child_reads_packages_of_another_environment(
    try_in: Callable[..., Try], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "of_another_environment.py").write_text("VALUE = 'here'\n")
    (tmp_path / "secret").write_text("of the account")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    evaluate = try_in(Profile.PURE)
    assert evaluate("__import__('of_another_environment').VALUE") == "'here'"
    assert evaluate("Path(file).read_text()", file=str(tmp_path / "secret")) == REFUSED


def test_title_of_a_process_stays_when_it_hides_its_variables() -> None:
    """A title may be longer than the command line, and then stands where the variables were."""
    title = "a title " + "that is long " * 10
    program = (
        "import os, sys\nfrom setproctitle import setproctitle\n"
        "from relax_events.privileges import hide_process\n"
        f"setproctitle({title!r})\nhide_process()\n"
        "sys.stdout.buffer.write(open('/proc/self/cmdline', 'rb').read())\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout.rstrip(b"\0").decode() == title
