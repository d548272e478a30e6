"""What all tests share: a mark for each folder, one real broker for the session, a new run id for
every test.
"""

from __future__ import annotations

import copy
import signal
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from small_settings import small_run

from relax_events.config import RunConfig

if TYPE_CHECKING:
    from engine_gate import Gate

TESTS = Path(__file__).parent
SGLANG_PYTHON = TESTS.parent / ".venv-sglang" / "bin" / "python"
RunConfigFactory = Callable[..., RunConfig]
BROKER_LOG = pytest.StashKey[Path]()
NUM_LOG_LINES = 40

settings.register_profile("relax", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relax")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the suite run against a cluster and a server that are there already."""
    parser.addoption(
        "--bootstrap-servers",
        default="",
        help="host:port,... of an existing cluster; default: an embedded broker for the session",
    )
    help_text = "what ports and files do that a session leaves behind; processes always fail it"
    parser.addoption("--leftovers", choices=["fail", "report"], default="fail", help=help_text)
    parser.addoption(
        "--sglang-url",
        default="",
        help=(
            "of an SGLang server on the engines' tiny model; default: one is started for the "
            "session"
        ),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let no session leave anything behind, and let tests interrupt programs: a shell starts what
    runs in its background with SIGINT ignored, which programs inherit."""
    from tests.leftovers import Leftovers

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.option.collectonly:
        config.pluginmanager.register(Leftovers(config), "leftovers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder, those of the gate, and those that need an SGLang
    server."""
    from tests.gate import SGLANG_FIXTURES, is_in_gate

    for item in items:
        if TESTS not in item.path.parents:
            continue
        path_in_tests = item.path.relative_to(TESTS)
        item.add_marker(getattr(pytest.mark, path_in_tests.parts[0]))
        if is_in_gate(f"{path_in_tests.as_posix()}::{item.name}"):
            item.add_marker(pytest.mark.gate)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if (
            SGLANG_FIXTURES & set(getattr(item, "fixturenames", ()))
            or parameters.get("make") == "sglang"
        ):
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def bootstrap_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Addresses of the session's broker."""
    if given := request.config.getoption("--bootstrap-servers"):
        yield given
        return
    from relax_events.kafka.embedded import EmbeddedBroker

    with EmbeddedBroker(
        tmp_path_factory.mktemp("broker"), has_password=False
    ) as broker:  # tests reach it by its address, with clients of all kinds
        request.config.stash[BROKER_LOG] = broker.log_path
        yield broker.bootstrap_servers


@pytest.fixture(scope="session")
def gate_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Name the file that shuts the gate before SGLang's servers while it is there."""
    return tmp_path_factory.mktemp("gate") / "shut"


@pytest.fixture(scope="session")
def sglang_python(tmp_path_factory: pytest.TempPathFactory, gate_file: Path) -> str:
    """Return an interpreter that has SGLang, and the gate before it."""
    from sglang_gate import gated_interpreter

    if not SGLANG_PYTHON.exists() and find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; run `make sglang`")
    python = str(SGLANG_PYTHON) if SGLANG_PYTHON.exists() else sys.executable
    return gated_interpreter(python, tmp_path_factory.mktemp("gated"), gate_file)


def pytest_runtest_setup() -> None:
    """Let each test log to its own stderr, as a command does: its stdout is for data, and it
    inherits no log that writes to the streams of the test before."""
    structlog.reset_defaults()
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the broker's last log lines to a failure report."""
    report = yield
    log_path = item.config.stash.get(BROKER_LOG, None)
    if (
        report.failed
        and log_path is not None
        and "bootstrap_servers" in getattr(item, "fixturenames", ())
    ):
        report.sections.append(
            (
                "the broker's log",
                "\n".join(log_path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]),
            )
        )
    return report


@pytest.fixture
def run_id() -> str:
    """Name a run that no other test has: it prefixes the test's topics and groups."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, gate_file: Path) -> Iterator[Gate]:
    """Yield a gate, open at first, before all engines of this process and all servers that tests
    start."""
    from engine_gate import Gate

    made = Gate(monkeypatch, gate_file)
    yield made
    made.open()


@pytest.fixture
def make_run_config(run_id: str, tmp_path: Path) -> RunConfigFactory:
    """Return a maker of run configurations: `make_run_config(run={"max_staleness": 0}, ...)` overrides
    sections of the test's own."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        tree: dict[str, dict[str, Any]] = {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "model": {"path": str(tmp_path / "model")},
            "data": {"source": "jsonl:unused"},
            "broker": {"request_timeout_seconds": 10.0},
            "workers": {"heartbeat_seconds": 0.2},
        }
        for name, keys in copy.deepcopy(sections).items():
            tree[name] = tree.get(name, {}) | keys
        return small_run(tree)

    return make
