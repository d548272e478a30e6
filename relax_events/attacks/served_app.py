"""An HTTP application on a free port, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from relax_events.http.guard import App
from relax_events.http.server import build_server_config, build_url, open_listener
from relax_events.http.tls import TlsFiles

START_SECONDS = 60.0


@contextmanager
def serving(app: App, *, tls: TlsFiles | None = None) -> Iterator[str]:
    """Serve an application, and give its address."""
    with open_listener("127.0.0.1", 0, remedies=("", ""), what="an attacked server") as listener:
        listener.listen()
        config = build_server_config(app, tls=tls, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield build_url(listener, tls=tls)
        finally:
            server.should_exit = True
            thread.join()
