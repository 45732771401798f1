"""A real JupyterLab on a folder of notebooks, driven through a headless Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser, Page, end

OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.port=0",
    "--ServerApp.port_retries=0",
    "--IdentityProvider.token=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.expose_app_in_browser=True",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
)
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells at once, seen or not
    "apputils-extension/notification": {"fetchNews": "false"},
}
READY = "window.jupyterapp && jupyterapp.restored.then(() => true)"
CURRENT = "jupyterapp.shell.currentWidget"
CELLS = f"{CURRENT}.content.widgets"


class Notebook:
    """One notebook, open in JupyterLab."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def until(self, script: str, patience: float = 600) -> object:
        """Return the value of a JavaScript expression as soon as it is true."""
        over, wrong = time.monotonic() + patience, None
        while time.monotonic() < over:
            try:
                if value := self.page.evaluate(script):
                    return value
            except RuntimeError as error:  # the page was loaded anew, or has no such place yet
                wrong = error
            time.sleep(0.05)
        raise TimeoutError(f"not within {patience:.0f} s: {script[:160]}") from wrong

    def command(self, name: str, **values: object) -> None:
        """Carry out one of JupyterLab's commands."""
        self.page.evaluate(f"jupyterapp.commands.execute({name!r}, {json.dumps(values)})")

    def run(self, patience: float = 600) -> None:
        """Run all cells and wait for the end of the last one."""
        self.until(f"{CURRENT}?.sessionContext?.session?.kernel?.status == 'idle'", patience)
        done = "jupyterapp.commands.execute('notebook:run-all-cells').then(() => (window.ran = 1))"
        self.page.evaluate(f"(window.ran = 0, {done}, 1)")
        self.until("window.ran", patience)

    def tell(self, code: str) -> None:
        """Let the kernel carry out a line of Python."""
        asked = f"session.kernel.requestExecute({{code: {json.dumps(code)}}}).done"
        done = f"{CURRENT}.sessionContext.{asked}.then(reply => reply.content.status)"
        status = self.page.evaluate(done)
        if status != "ok":
            raise AssertionError(code)


@contextmanager
def lab(folder: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Start JupyterLab in a folder and yield its address; stop it, and its kernels, at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        own = {f"JUPYTER_{kind}_DIR": f"{home}/{kind}" for kind in ("CONFIG", "RUNTIME", "DATA")}
        own |= {"JUPYTERLAB_SETTINGS_DIR": f"{home}/user", "IPYTHONDIR": f"{home}/ipython"}
        own |= {"JUPYTERLAB_WORKSPACES_DIR": f"{home}/spaces", **(environment or {})}
        for name, value in SETTINGS.items():
            page = Path(home, "user", "@jupyterlab", f"{name}.jupyterlab-settings")
            page.parent.mkdir(parents=True)
            page.write_text(json.dumps(value), "utf-8")
        command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={folder}"]
        with open(f"{home}/log", "w+", encoding="utf-8") as log:
            process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
            try:
                yield _address(Path(home, "RUNTIME"), process, Path(log.name))
            finally:
                end(process)


def _address(runtime: Path, process: subprocess.Popen, log: Path, patience: float = 600) -> str:
    over = time.monotonic() + patience
    while time.monotonic() < over:
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended at once: {log.read_text('utf-8')[-2000:]}")
        for page in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(page.read_text("utf-8"))["url"]
            except ValueError:  # half written
                pass
        time.sleep(0.1)
    raise TimeoutError(f"JupyterLab did not say where it listens: {log.read_text('utf-8')[-2000:]}")


def opened(browser: Browser, address: str, path: str, dark: bool = False) -> Notebook:
    """Open a notebook of the folder by its path, and wait until its cells are there."""
    page = browser.open()
    page.show(f"{address}lab/tree/{path}?reset", 1280, 1000, dark)
    book = Notebook(page)
    book.until(READY)
    if dark:
        book.command("apputils:change-theme", theme="JupyterLab Dark")
    book.until(f"{CURRENT}?.context?.isReady && {CELLS}.length")
    return book
