"""A headless Chromium, driven through its DevTools protocol: what the tests and print need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
SETTLED = """(async () => {
  if (document.readyState !== "complete")
    await new Promise(done => addEventListener("load", done, {once: true}));
  if (window.MathJax && MathJax.startup && MathJax.startup.promise) {
    await MathJax.startup.promise;
    await MathJax.startup.document.lazyTypesetAll();  // what a reader has not scrolled to yet
  }
  await document.fonts.ready;
  for (let n = 0; n < 2; n++) await new Promise(requestAnimationFrame);  // laid out, and drawn
  return true;
})()"""


def find() -> str | None:
    """Return the path of a Chromium: ``$CHROMIUM``, or the first known name on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One open page: what it asked for, what it complained about, and its script console."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **params: object) -> dict:
        """Send one protocol command to this page and return its answer."""
        return self.browser.call(method, params, self.session)

    def evaluate(self, script: str) -> object:
        """Return the value of a JavaScript expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def show(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open an address at a width in CSS pixels, and wait until the formulas are set."""
        self.prefer(dark)
        self._size(width, height)
        self.call("Page.navigate", url=url)
        self.browser.wait_for("Page.loadEventFired", self.session)
        self.evaluate(SETTLED)

    def prefer(self, dark: bool) -> None:
        """Let the reader's system ask for dark pages, or for light ones."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def print(self) -> None:
        """Show an open page as it goes on paper."""
        self.call("Emulation.setEmulatedMedia", media="print")
        self.evaluate("dispatchEvent(new Event('beforeprint'))")
        self.evaluate(SETTLED)

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window of an open page wider or narrower."""
        self._size(width, height)
        self.evaluate(SETTLED)

    def _size(self, width: int, height: int) -> None:
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def press(self, key: str, code: int) -> None:
        """Press a key, by its name and its number on Windows."""
        for kind in ("keyDown", "keyUp"):
            keys = dict(type=kind, key=key, code=key, windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", **keys)

    def close(self) -> None:
        """Close the page."""
        self.browser.call("Target.closeTarget", {"targetId": self.target})
        self.browser.pages.pop(self.session, None)

    def note(self, method: str, params: dict) -> None:
        """Keep what an event says about requests and complaints."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            said = details.get("exception", {}).get("description") or details.get("text")
            self.complaints.append(f"exception: {said}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            said = " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
            self.complaints.append(f"console: {said}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.complaints.append(f"log: {entry['text']} {entry.get('url', '')}")


class Browser:
    """A running Chromium and the one socket to it."""

    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, timeout=600, suppress_origin=True)
        self.count = 0
        self.pages: dict[str, Page] = {}
        self.seen: set[tuple[str, str]] = set()

    def call(self, method: str, params: dict | None = None, session: str | None = None) -> dict:
        """Send a command, keep the events that come meanwhile, and return the answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        self.seen.discard(("Page.loadEventFired", session or ""))
        self.socket.send(json.dumps(message))
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, method: str, session: str) -> None:
        """Return once an event of this page has come."""
        while (method, session) not in self.seen:
            self._receive()

    def open(self) -> Page:
        """Open an empty page whose requests and complaints are recorded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, attached["sessionId"], target)
        self.pages[page.session] = page
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        return page

    def _receive(self) -> dict:
        message = json.loads(self.socket.recv())
        session = message.get("sessionId", "")
        if "method" in message:
            self.seen.add((message["method"], session))
            if session in self.pages:
                self.pages[session].note(message["method"], message["params"])
        return message


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a Chromium with an empty profile; stop it at the end."""
    program = find()
    if program is None:
        raise FileNotFoundError("no Chromium: install one, or name it in CHROMIUM")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            browser = Browser(_address(Path(profile) / "DevToolsActivePort", process))
            yield browser
            browser.socket.close()
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Ask a process to stop, and stop it if it does not."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _address(port_file: Path, process: subprocess.Popen, patience: float = 60) -> str:
    over = time.monotonic() + patience
    while time.monotonic() < over:
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended at once with status {process.returncode}")
        lines = port_file.read_text().split() if port_file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.1)
    raise TimeoutError("Chromium did not say where it listens")
