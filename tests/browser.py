"""A real Chromium for tests, driven over a pipe by the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.browser import HOW, find_browser

# The browser reads commands from descriptor 3 and answers on 4. Moving the two ends there is left
# to a small program: in the parent those numbers may be taken.
_LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    # Nothing that a page asks for leaves the machine; that it asked is seen all the same.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


class Browser:
    """One page of a running browser. Use `browser`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write = os.fdopen(to_browser, "wb", buffering=0)
        self._read = from_browser
        self._unread = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, page: Path, *, width: int, height: int = 900, phone: bool = False) -> None:
        """Show a file in a window of so many CSS pixels; returns when it is loaded.

        Args:
            page: The file.
            width: Width of the window.
            height: Height of the window.
            phone: Lay out as phones do, which heed the page's `viewport`.
        """
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self._events.clear()
        self._send("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    @property
    def requested(self) -> list[str]:
        """URLs that the page that is open asked for, its own first."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[str]:
        """What the browser wrote to the console for the page that is open."""
        return [
            event["params"]["entry"]["text"]
            for event in self._events
            if event["method"] == "Log.entryAdded"
        ]

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression, as JSON has it."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def emulate_print(self, on: bool) -> None:
        """Lay out for paper, or for the screen again."""
        self._send("Emulation.setEmulatedMedia", media="print" if on else "")

    def screenshot(self, picture: Path) -> Path:
        """A PNG of the whole page, also what is below the window."""
        answer = self._send("Page.captureScreenshot", captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(answer["data"]))
        return picture

    def pdf(self, file: Path) -> Path:
        """The page as it is printed on A4."""
        answer = self._send(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False
        )
        file.write_bytes(base64.b64decode(answer["data"]))
        return file

    def close(self) -> None:
        """Ask the browser to end."""
        self._session = ""
        self._send("Browser.close")
        self._write.close()
        os.close(self._read)

    def _send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer and answer["id"] == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any] | None:
        """The next answer; None if an event came, which is kept."""
        while b"\0" not in self._unread:
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "id" in message:
            return message
        self._events.append(message)
        return None


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile; ended and removed after the block.

    Raises:
        RuntimeError: There is no browser on this machine; says how to get one.
    """
    path = find_browser()
    if not path:
        raise RuntimeError(HOW)
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with (
        tempfile.TemporaryDirectory(prefix="kvsieve-browser-", ignore_cleanup_errors=True) as home,
        open(Path(home, "log"), "wb") as log,
    ):
        launch = [sys.executable, "-c", _LAUNCHER, str(commands_out), str(answers_in)]
        process = subprocess.Popen(
            [*launch, path, f"--user-data-dir={home}", *flags],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": home},
        )
        os.close(commands_out)
        os.close(answers_in)
        try:
            page = Browser(commands_in, answers_out)
            yield page
            page.close()
            process.wait(30)
        except Exception as error:
            error.add_note(Path(home, "log").read_text(errors="replace")[-2000:])
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
