"""Clients that ask what open pages of a run ask, in a process of their own with the lowest priority:
they stand for the browsers of other machines.

    python -m benchmarks.open_pages ADDRESS RUN_ID

For each line on standard input, a number of seconds, it has five pages open for so long, and prints
how long they waited for each answer, in seconds, as a JSON list. Drawing is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from relax_events.dashboard.server import LOWEST_PRIORITY, give_way

VIEWS = ("overview", "timeline", "samples", "fleet", "lag")
ASK_SECONDS, ALARMS_SECONDS, RUNS_SECONDS = 2.0, 5.0, 30.0
REST_OF_TIME = 10.0
CALL_SECONDS = 60.0


class Page(threading.Thread):
    """Asks what an open page asks, until it is closed: it follows the stream of events, and asks for
    its view every other second or after ten times as long as it waited, for the alarms every five
    seconds, and for the runs every thirty.
    """

    def __init__(self, address: str, run_id: str, view: str, *, cookie: str) -> None:
        super().__init__(daemon=True)
        self._login = {"Cookie": cookie}
        self._address, self._view, self._closed = address, view, threading.Event()
        self._run = f"{address}/api/runs/{run_id}"
        self._tags: dict[str, str] = {}
        self._asked: dict[str, float] = {}
        self._pause = ASK_SECONDS
        self.seconds: list[float] = []

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed.set()

    def run(self) -> None:
        """Follow the stream of events."""
        with (
            suppress(OSError),  # the run has ended, and its page with it
            urllib.request.urlopen(
                urllib.request.Request(f"{self._run}/events", headers=self._login),
                timeout=CALL_SECONDS,
            ) as stream,
        ):
            for line in stream:
                if self._closed.is_set():
                    return
                if line.startswith(b"data:"):
                    self._draw()

    def _draw(self) -> None:
        began, num_answers = time.monotonic(), len(self.seconds)
        found = self._ask(f"{self._run}/{self._view}", self._pause)
        if found and self._view == "samples":
            rows = ",".join(str(row["row"]) for row in json.loads(found)["rows"])
            self._ask(f"{self._run}/texts?rows={rows}", 0.0)
        if len(self.seconds) > num_answers:
            self._pause = max(ASK_SECONDS, REST_OF_TIME * (time.monotonic() - began))
        self._ask(f"{self._run}/alarms", ALARMS_SECONDS)
        self._ask(f"{self._address}/api/runs", RUNS_SECONDS)

    def _ask(self, address: str, interval_seconds: float) -> bytes:
        """Return the answer; nothing where the page has it, or asked a short time ago."""
        began = time.monotonic()
        if began - self._asked.get(address, -1e9) < interval_seconds:
            return b""
        if interval_seconds:
            self._asked[address] = began
        known = {"If-None-Match": self._tags[address]} if address in self._tags else {}
        request = urllib.request.Request(address, headers=self._login | known)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                body: bytes = answer.read()
                if interval_seconds and (tag := answer.headers.get("ETag")):
                    self._tags[address] = tag
        except urllib.error.HTTPError as error:
            if error.code != 304:
                raise
            body = b""
        self.seconds.append(time.monotonic() - began)
        return body


class PageClients(AbstractContextManager["PageClients"]):
    """The process of the clients."""

    def __init__(self, address: str, run_id: str, cookie: str) -> None:
        """Start it, with no page open."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.open_pages", address, run_id, cookie],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def open_for(self, seconds: float) -> list[float]:
        """Have five pages open for a time; return how long they waited for each answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        waits: list[float] = json.loads(self._process.stdout.readline())
        return waits

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main(address: str, run_id: str, cookie: str) -> None:
    """Open pages for as long as each line says."""
    give_way(LOWEST_PRIORITY)
    for line in sys.stdin:
        pages = [Page(address, run_id, view, cookie=cookie) for view in VIEWS]
        for page in pages:
            page.start()
        time.sleep(float(line))
        for page in pages:
            page.close()
        print(json.dumps([seconds for page in pages for seconds in page.seconds]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
