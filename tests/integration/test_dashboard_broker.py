"""The broker dies under an open page and comes back: the page says so, and continues by itself with
what is written afterwards.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from small_settings import small_run
from written_run import WrittenRun

from relax_events.history.cluster import Cluster
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.packages.dashboard.access import PageAccess
from relax_events.packages.dashboard.registry import RunRegistry
from relax_events.packages.dashboard.server import build_server, build_url, open_port
from tests.chromium import Chromium, find_chromium

GROUPS = ("000000-0000-0", "000000-0001-0")


def write_group(run: WrittenRun, row: int) -> None:
    """Write a prompt group of two samples."""
    run.issue(GROUPS[row], row=row)
    run.generate(GROUPS[row], version=0, rewards=[0.0, 1.0])


@pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_open_page_continues_after_the_broker_was_killed_and_started_again(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "broker", has_password=False) as broker:
        config = small_run(
            {
                "run": {"id": "restarted", "directory": str(tmp_path / "runs")},
                "model": {"path": str(tmp_path / "model")},
                "data": {"source": "jsonl:unused"},
                "broker": {"bootstrap_servers": broker.bootstrap_servers},
            }
        )
        run = WrittenRun(config)
        run.describe()
        run.publish(0)
        write_group(run, 0)
        registry = RunRegistry(Cluster(config.broker, config.run.directory), first=config)
        with open_port(0) as listener, Chromium(timeout_seconds=120) as browser:
            access = PageAccess(config.run.directory)
            server = build_server(registry, access)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                browser.open(access.create_link(build_url(listener), run_id="restarted"))
                browser.wait_for("document.getElementById('step')")
                browser.open(f"{build_url(listener)}/?run=restarted&page=samples")
                browser.wait_for("document.querySelectorAll('tbody tr').length === 2")
                browser.run("window.opened = 'once'")
                broker.kill()
                browser.wait_for("document.getElementById('trouble')")
                broker.restart()
                write_group(run, 1)
                browser.wait_for("!document.getElementById('trouble')")
                browser.wait_for("document.getElementById('num-samples')?.innerText === '4'")
                browser.wait_for("document.querySelectorAll('tbody tr').length === 4")
                assert browser.run("window.opened") == "once", "the page was not loaded again"
                unexpected = [one for one in browser.problems if " 503 " not in one]
                assert unexpected == [], "texts can't be read while the broker is down"
            finally:
                server.should_exit = True
                thread.join(20)
                registry.close()
                run.close()
