"""The papermill engine of the lab: nbclient, with a kernel that can be killed together with every process it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import ClassVar

from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.log import logger
from traitlets.config import Config


class _Client(PapermillNotebookClient):
    """Tells the engine of the kernel's process as soon as it runs: nbclient forgets it when the kernel dies."""

    def papermill_execute_cells(self):
        provisioner = self.km.provisioner
        LabEngine.process, LabEngine.group = provisioner.process, provisioner.pgid
        super().papermill_execute_cells()


class LabEngine(NBClientEngine):
    """One kernel at a time, reached over local sockets only. `kill()` ends it and its children; `death()` says by which signal it died."""

    process: ClassVar[subprocess.Popen | None] = None
    group: ClassVar[int | None] = None

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, start_timeout=60, execution_timeout=None, kernel_log=os.devnull, **kwargs):
        """kernel_log: the file that gets what the kernel writes to stderr outside of cells, such as the last words of a native crash."""
        cls.process = cls.group = None
        with tempfile.TemporaryDirectory(prefix="lk-") as folder, open(kernel_log, "wb") as stderr:
            # A socket's path has at most 107 bytes; where temporary folders lie deeper, the kernel is reached over the loopback.
            local = {"transport": "ipc", "ip": f"{folder}/k"} if len(folder) < 90 else {}
            options = {"timeout": execution_timeout, "startup_timeout": start_timeout, "kernel_name": kernel_name, "log": logger}
            return _Client(nb_man, config=Config({"KernelManager": local}), **options).execute(stderr=stderr)

    @classmethod
    def kill(cls) -> None:
        """End the kernel's process group (the workers it started are in it). Nothing happens when there is none."""
        if cls.group and cls.group != os.getpgrp():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(cls.group, signal.SIGKILL)

    @classmethod
    def death(cls) -> str:
        """` (signal 9)`, when the kernel's exit status tells."""
        status = cls.process.poll() if cls.process is not None else None
        return f" (signal {-status})" if status is not None and status < 0 else ""
