"""The papermill engine of the lab: nbclient, with a kernel that can be killed together with every process it started."""

import contextlib
import os
import signal
import subprocess
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
    def execute_managed_notebook(cls, nb_man, kernel_name, start_timeout=60, execution_timeout=None, **kwargs):
        cls.process = cls.group = None
        transport = Config({"KernelManager": {"transport": "ipc"}})
        client = _Client(nb_man, timeout=execution_timeout, startup_timeout=start_timeout, kernel_name=kernel_name, log=logger, config=transport)
        return client.execute()

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
