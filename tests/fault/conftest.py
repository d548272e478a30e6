"""Whole runs for fault injection: one broker and one small random model for the session, a new run
for every test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import FaultRun
from link import Link
from node import choose_ports
from run_setup import default_config, lay_out, make_model, merge_config

from relax_events.config import RunConfig
from relax_events.kafka.embedded import EmbeddedBroker

TEST_SECONDS = 480
NUM_OUTPUT_LINES = 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the timeout of whole runs, where a test has none of its own."""
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs of the session, with prompts and a reward file in it."""
    folder = tmp_path_factory.mktemp("fault")
    lay_out(folder)
    return folder


@pytest.fixture(scope="session")
def broker(directory: Path) -> Iterator[EmbeddedBroker]:
    """Yield the session's broker; a test may kill it, since `relax run` starts it again."""
    with EmbeddedBroker(directory / "broker") as started:
        try:
            yield started
        finally:
            started.stop()  # whichever process started it last, and whatever still uses it


@pytest.fixture(scope="session")
def model(directory: Path) -> Path:
    """Return a random model, as `relax models prepare` makes it."""
    return make_model(directory)


@pytest.fixture
def link() -> Iterator[Link]:
    """Yield a link to a port where a test may start a broker."""
    (linked_port,) = choose_ports(1)
    with Link(linked_port) as opened:
        yield opened


@pytest.fixture
def start_run(
    directory: Path, broker: EmbeddedBroker, model: Path, run_id: str
) -> Iterator[Callable[..., FaultRun]]:
    """Return a maker of runs with every role in them: `start_run(run={"num_steps": 8})` lays
    sections over the usual ones."""
    opened: list[FaultRun] = []

    def start(**sections: dict[str, Any]) -> FaultRun:
        tree = merge_config(default_config(directory, f"{run_id}-{len(opened)}"), sections)
        broker.start()
        opened.append(FaultRun(RunConfig.model_validate(tree), broker))
        return opened[-1]

    yield start
    for run in opened:
        run.__exit__(None, None, None)
        if run.output.exists():
            print(
                "\n".join(run.output.read_text(errors="replace").splitlines()[-NUM_OUTPUT_LINES:])
            )  # shown with a failure
