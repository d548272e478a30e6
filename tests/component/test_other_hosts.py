"""How the first host starts and ends the supervisors of the others, by a command that runs here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher import other_hosts
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.other_hosts import OtherHost, check_hosts

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
    host = OtherHost(config, 1, lines.append)
    wait_for(lambda: bool(lines), host)
    order = orjson.loads(path.read_bytes())
    assert order["host"] == 1
    assert RunConfig.model_validate_json(orjson.dumps(order["config"])) == config
    host.drain()
    host.wait(DEADLINE_SECONDS)
    assert lines == ["host 10.0.0.2: joined", "host 10.0.0.2: drained"]


def test_lost_supervisor_is_started_again(
    make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_hosts, "AGAIN_SECONDS", 0.0)
    starts = tmp_path / "starts"
    program = f"import sys; open({str(starts)!r}, 'a').write('x'); sys.exit(255)"
    config = make_config(make_run_config, "env", "H={host}", sys.executable, "-c", program)
    lines: list[str] = []
    host = OtherHost(config, 1, lines.append)
    wait_for(lambda: starts.exists() and len(starts.read_text()) >= 2, host)
    host.wait(DEADLINE_SECONDS)
    assert "exit code 255; it is started again" in lines[0]


def test_wrong_run_file_of_a_host_ends_the_run(make_run_config: MakeRunConfig) -> None:
    config = make_config(
        make_run_config, "env", "H={host}", sys.executable, "-c",
        "import sys; print('error: no model here'); sys.exit(2)",
    )  # fmt: skip
    host = OtherHost(config, 1, lambda _: None)
    with pytest.raises(ConfigError, match=r"host 10.0.0.2 can't continue: error: no model here"):
        wait_for(lambda: False, host)
