"""A Chromium without a screen, driven over DevTools on a pipe: enough to open pages, act on them and
look at what they did.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str:
    """Return the path of an installed Chromium; empty where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Chromium:
    """A browser with one page. `requests` has every URL that it asked for, `problems` what its
    console said as errors, violations of the page's policy included."""

    def __init__(self, *, lang: str = "en-US", timeout_seconds: float = 60.0) -> None:
        self._timeout = timeout_seconds
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        to_read, to_write = os.pipe(), os.pipe()
        # other shells know no numbers of two digits here
        command = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
        flags = (*FLAGS, f"--user-data-dir={self._folder}", f"--lang={lang}")
        self._process = subprocess.Popen(
            ["bash", "-c", command, find_chromium(), *flags, "about:blank"],
            pass_fds=(to_read[0], to_write[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"LANGUAGE": lang[:2], "TMPDIR": self._folder},
            start_new_session=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._out, self._in = os.fdopen(to_read[1], "wb"), os.fdopen(to_write[0], "rb")
        self._number = 0
        self._buffer = b""
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._session = ""

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def _attach(self) -> None:
        """Wait for the first page, and turn on what is noted of it."""
        stop = time.monotonic() + self._timeout
        while True:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next((found for found in targets if found["type"] == "page"), None)
            if page is not None:
                break
            assert time.monotonic() < stop, "Chromium opened no page"
            time.sleep(0.1)
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        with suppress(RuntimeError, OSError, subprocess.TimeoutExpired):
            self._call("Browser.close")
            self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()
        self._in.close()
        stop = time.monotonic() + 10
        while Path(self._folder).exists() and time.monotonic() < stop:
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(0.05)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the page's DevTools."""
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in.fileno(), 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.problems.append(json.dumps(values["args"])[:600])

    def resize(self, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the colours that the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def wait_for(self, script: str, *, seconds: float | None = None) -> Any:
        """Wait until an expression is true."""
        return self.wait(lambda: self.run(f"!!({script})"), what=script, seconds=seconds)

    def wait(self, ready: Callable[[], Any], *, what: str, seconds: float | None = None) -> Any:
        """Wait until a call returns something true, and return it."""
        stop = time.monotonic() + (seconds or self._timeout)
        while True:
            try:
                if found := ready():
                    return found
            except RuntimeError as error:  # the page is just being replaced
                if "Chromium has ended" in str(error):
                    raise
            if time.monotonic() > stop:
                text = self.run("document.body.innerText.slice(0, 1500)")
                raise AssertionError(f"not in time: {what}\n{self.problems}\n{text}")
            time.sleep(0.1)

    def press(self, key: str, *, code: int = 0, shift: bool = False) -> None:
        """Press a key; Enter has a text too, without which it presses no button."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )

    def photograph(self, path: Path, *, whole: bool = True) -> None:
        """Write what the page looks like as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
