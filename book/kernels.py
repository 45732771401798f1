"""Kernels that start at once: forks of one process that has imported what notebooks import.

Each kernel of its own would spend three seconds of a core on the same imports. Elsewhere than on
Linux, where forks are not there or not safe, kernels start as they always do.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any
from uuid import uuid4

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

IMPORTS = ["ipykernel.kernelapp", "matplotlib.pyplot", "pandas", "torch", "fedlib.lab.show.chapter",
           "fedlib.lab.show.live", "fedlib.papers.vertical"]  # fmt: skip
FORKS = sys.platform == "linux"
context: Any = multiprocessing.get_context("forkserver" if FORKS else None)
if FORKS:
    context.set_forkserver_preload(IMPORTS)


class Kernel(context.Process):
    """The process of a kernel, with what its manager expects of a ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def __init__(self, options: list[str], environment: dict[str, str]) -> None:
        super().__init__()
        self.options, self.environment, self.folder = options, environment, os.getcwd()

    def run(self) -> None:
        """Be the kernel, in a group of processes of its own, until it is told to end."""
        from ipykernel.kernelapp import IPKernelApp

        gc.freeze()  # what is shared stays so: a collection would touch, and thus copy, all of it
        os.setsid()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        os.environ.pop("JPY_PARENT_PID", None)  # of a kernel that this was begun in
        threading.Thread(target=end_with_parent, daemon=True).start()
        IPKernelApp.launch_instance(self.options)

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        return self.exitcode

    def wait(self) -> int | None:
        """Wait for its end."""
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


def end_with_parent() -> None:
    """Wait for the end of the process that asked for this kernel, and end with all of its own."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os.killpg(0, signal.SIGKILL)


class Provisioner(LocalProvisioner):
    """Launches a kernel as a fork."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        """Start it, with the options that follow ``python -m ipykernel_launcher``."""
        self.process = Kernel(cmd[3:], kwargs["env"])
        self.process.start()
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class Manager(AsyncKernelManager):
    """A manager of such a kernel."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if FORKS:
            self.kernel_id = str(uuid4())
            names = dict(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec)
            self.provisioner = Provisioner(**names, parent=self)
