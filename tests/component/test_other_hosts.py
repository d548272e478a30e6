"""How the first host starts and ends the supervisors of the others, by a command that runs here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher import joined_host, other_hosts
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.other_hosts import JOINED, OtherHost, check_hosts
from relax_events.launcher.own_process import start_command
from relax_events.session.gpus import find_gpus

MakeRunConfig = Callable[..., RunConfig]
DEADLINE_SECONDS = 60.0
BROKER = {"bootstrap_servers": "10.0.0.9:9092"}
HERE = ["env", "RELAX_TEST_HOST={host}", "sh", "-c"]


def make_config(make_run_config: MakeRunConfig, *command: str) -> RunConfig:
    hosts = {"addresses": ["10.0.0.1", "10.0.0.2"], "command": [*command]}
    return make_run_config(broker=BROKER, hosts=hosts)


def wait_for(condition: Callable[[], bool], host: OtherHost) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        host.tend(time.monotonic())
        time.sleep(0.02)


def test_host_that_answers_alike_is_accepted(make_run_config: MakeRunConfig) -> None:
    text = check_hosts(CheckedRun(make_config(make_run_config, *HERE)))
    assert text.startswith("10.0.0.2 can be reached, and have relax-events ")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("no route to host", r"host 10.0.0.2 can't run .*: no route to host; it needs the folder"),
        ('{"clock": 0, "relax-events": "0.0"}', r"host 10.0.0.2 has relax-events 0.0, and this"),
        (None, r"the clock of host 10.0.0.2 is \d+ s off"),
    ],
)
def test_host_that_can_not_take_part_is_refused(
    make_run_config: MakeRunConfig, answer: str | None, text: str
) -> None:
    if answer is None:
        answer = orjson.dumps(other_hosts.describe_host() | {"clock": 0}).decode()
    config = make_config(make_run_config, "env", "HOST={host}", sys.executable, "-c",
                         f"print({answer!r})")  # fmt: skip
    with pytest.raises(EnvironmentProblem, match=text):
        check_hosts(CheckedRun(config))


def test_supervisor_gets_the_run_and_ends_with_its_input(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    program = (
        "import sys; open(sys.argv[1], 'w').write(sys.stdin.readline()); print('joined', "
        "flush=True); sys.stdin.read(); print('drained', flush=True)"
    )
    path = tmp_path / "order"
    config = make_config(
        make_run_config, "env", "H={host}", sys.executable, "-c", program, str(path)
    )
    lines: list[str] = []
    host = OtherHost(config, 1, lines.append, num_gpus=8, num_steps=3)
    wait_for(lambda: bool(lines), host)
    order = orjson.loads(path.read_bytes())
    assert (order["host"], order["num_gpus"], order["num_steps"]) == (1, 8, 3)
    assert RunConfig.model_validate_json(orjson.dumps(order["config"])) == config
    host.drain()
    host.wait(DEADLINE_SECONDS)
    assert lines == ["host 10.0.0.2: joined", "host 10.0.0.2: drained"]


def test_host_with_other_gpus_than_the_first_stays_out(make_run_config: MakeRunConfig) -> None:
    num_gpus = len(find_gpus())
    lines: list[str] = []
    host = OtherHost(make_config(make_run_config, *HERE), 1, lines.append, num_gpus=num_gpus + 3)
    wait_for(lambda: len(lines) > 1, host)
    host.wait(DEADLINE_SECONDS)
    assert lines == [
        (
            f"host 10.0.0.2: error: host 10.0.0.2 has {num_gpus} GPUs, and the first host "
            f"{num_gpus + 3}; see nvidia-smi and CUDA_VISIBLE_DEVICES there"
        ),
        "host 10.0.0.2: its supervisor ended with exit code 1; it is started again",
    ]


def test_lost_supervisor_is_started_again(
    make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_hosts, "AGAIN_SECONDS", 0.0)
    starts = tmp_path / "starts"
    program = f"import sys; open({str(starts)!r}, 'a').write('x'); sys.exit(255)"
    config = make_config(make_run_config, "env", "H={host}", sys.executable, "-c", program)
    lines: list[str] = []
    host = OtherHost(config, 1, lines.append)
    wait_for(lambda: starts.exists() and len(starts.read_text()) >= 3, host)
    host.wait(DEADLINE_SECONDS)
    assert lines == ["host 10.0.0.2: its supervisor ended with exit code 255; it is started again"]


def test_attempts_become_rarer_until_the_host_has_joined(
    make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_hosts, "MAX_AGAIN_SECONDS", 15.0)
    host = OtherHost(make_config(make_run_config, "false", "{host}"), 1, lambda _: None)
    now, delays = 0.0, []
    for _ in range(4):
        host.tend(now)
        assert host._process is not None
        host._process.wait(DEADLINE_SECONDS)
        host.tend(now)
        delays.append(host._start_after - now)
        now = host._start_after
    assert delays == [5.0, 10.0, 15.0, 15.0]


def test_large_order_arrives_whole_through_a_small_pipe(
    make_run_config: MakeRunConfig,
) -> None:
    program = (
        "import sys; line = sys.stdin.readline(); print(len(line), flush=True); sys.stdin.read()"
    )
    config = make_config(make_run_config, "env", "H={host}", sys.executable, "-c", program)
    lines: list[str] = []
    host = OtherHost(config, 1, lines.append)
    host._order = b"x" * (3 << 20) + b"\n"
    wait_for(lambda: bool(lines), host)
    host.drain()
    host.wait(DEADLINE_SECONDS)
    assert lines == [f"host 10.0.0.2: {(3 << 20) + 1}"]


@pytest.mark.parametrize("content", [b"", b'{"host": 1'])
def test_supervisor_whose_input_ends_early_ends(content: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", joined_host.__name__],
        input=content,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert not done.stdout


def test_missing_program_of_the_command_is_named(make_run_config: MakeRunConfig) -> None:
    config = make_config(make_run_config, "no-such-program", "{host}")
    text = r"hosts.command.*no-such-program"
    with pytest.raises(EnvironmentProblem, match=text):
        check_hosts(CheckedRun(config))
    with pytest.raises(EnvironmentProblem, match=text):
        OtherHost(config, 1, lambda _: None).tend(0.0)


def test_no_probe_outlives_a_refused_host(
    make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "test $H = 10.0.0.3 || exit 1; exec sleep 1000"
    hosts = {
        "addresses": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        "command": ["env", "H={host}", "sh", "-c", script],
    }
    started: list[subprocess.Popen[bytes]] = []

    def record(command: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(start_command(command))
        return started[-1]

    monkeypatch.setattr(other_hosts, "start_command", record)
    with pytest.raises(EnvironmentProblem, match=r"host 10.0.0.2 can't run"):
        check_hosts(CheckedRun(make_run_config(broker=BROKER, hosts=hosts)))
    assert [process.returncode for process in started] == [1, -signal.SIGKILL]


def test_wrong_run_file_of_a_host_ends_the_run(make_run_config: MakeRunConfig) -> None:
    config = make_config(
        make_run_config, "env", "H={host}", sys.executable, "-c",
        "import sys; print('error: no model here'); sys.exit(2)",
    )  # fmt: skip
    host = OtherHost(config, 1, lambda _: None)
    with pytest.raises(ConfigError, match=r"host 10.0.0.2 can't continue: error: no model here"):
        wait_for(lambda: False, host)


def test_host_that_has_joined_is_lost_by_any_exit_code(
    make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_hosts, "AGAIN_SECONDS", 0.0)
    joined = tmp_path / "joined"
    program = (
        "import os, sys; path = sys.argv[1]; "
        f"print('error: no folder' if os.path.exists(path) else {JOINED!r}); "
        "open(path, 'a').write('x'); sys.exit(2)"
    )
    config = make_config(
        make_run_config, "env", "H={host}", sys.executable, "-c", program, str(joined)
    )
    lines: list[str] = []
    host = OtherHost(config, 1, lines.append)
    wait_for(lambda: joined.exists() and len(joined.read_text()) >= 4, host)
    host.wait(DEADLINE_SECONDS)
    assert lines == [
        "host 10.0.0.2 has joined",
        "host 10.0.0.2: its supervisor ended with exit code 2; it is started again",
        "host 10.0.0.2: error: no folder",
    ]
