"""The papermill engine of the lab: nbclient, with a kernel that can be killed together with every process it started."""

import contextlib
import os
import signal
from typing import ClassVar

from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.log import logger


class LabEngine(NBClientEngine):
    """One kernel at a time. `kill()` ends it and its children; `death()` says by which signal it died."""

    client: ClassVar[PapermillNotebookClient | None] = None
    exit_status: ClassVar[int | None] = None

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, start_timeout=60, execution_timeout=None, **kwargs):
        cls.exit_status = None
        cls.client = PapermillNotebookClient(nb_man, timeout=execution_timeout, startup_timeout=start_timeout, kernel_name=kernel_name, log=logger)
        try:
            return cls.client.execute()
        finally:
            provisioner = getattr(cls.client.km, "provisioner", None) if cls.client.km else None
            process = getattr(provisioner, "process", None)
            cls.exit_status = process.poll() if process is not None else None

    @classmethod
    def kill(cls) -> None:
        """End the kernel's process group (the workers it started are in it). Nothing happens when there is none."""
        client, cls.client = cls.client, None
        provisioner = getattr(client.km, "provisioner", None) if client and client.km else None
        group = getattr(provisioner, "pgid", None)
        if group and group != os.getpgrp():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    @classmethod
    def death(cls) -> str:
        """` (signal 9)`, when the kernel's exit status tells."""
        return f" (signal {-cls.exit_status})" if cls.exit_status is not None and cls.exit_status < 0 else ""
