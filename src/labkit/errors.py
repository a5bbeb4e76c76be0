"""One error family: what happened, where, what to do next.

Every error that a user can cause is a `LabError`. The command line prints it as one paragraph and exits with `exit_code`; a notebook cell shows the same
paragraph. Anything else that escapes is a bug of the lab and keeps its traceback.
"""


class LabError(Exception):
    """A failure that its reader can act on.

    what: what happened, in one sentence. where: the file, tensor, key, cell or line that shows it. next: what to do about it.
    """

    exit_code = 1
    status = "error"

    def __init__(self, what: str, where: str = "", next: str = ""):
        self.what, self.where, self.next = what.strip(), str(where).strip(), next.strip()
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        """The error as one paragraph of plain text."""
        parts = [self.what if self.what.endswith((".", "?", "!")) else self.what + "."]
        if self.where:
            parts.append(f"Where: {self.where}" + ("" if self.where.endswith(".") else "."))
        if self.next:
            parts.append(f"Next: {self.next}" + ("" if self.next.endswith((".", "?", "!")) else "."))
        return " ".join(" ".join(parts).split())

    def as_dict(self) -> dict[str, str]:
        """The `error` object of `--json` output."""
        return {"what": self.what, "where": self.where, "next": self.next}

    def _render_traceback_(self):
        """IPython calls this instead of printing a stack: a cell shows the paragraph alone."""
        return [f"{type(self).__name__}: {self.paragraph()}"]


class InputError(LabError):
    """What the user gave cannot be used: a path, a config, a shard, a parameter name. Exit 2."""

    exit_code = 2


class BusyError(InputError):
    """Another run holds the lock of this model. Exit 2."""


class BlockedError(LabError):
    """A wall: the lab understands the input and cannot bring it up. Exit 1."""

    status = "blocked"


class GateError(LabError):
    """A gate does not hold: the port is wrong, or unproven. Exit 1."""

    status = "fail"


class KernelDiedError(LabError):
    """A notebook kernel died (killed, out of memory). Exit 3."""

    exit_code = 3
