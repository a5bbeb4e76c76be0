"""The commands that run what the records hold again: phases, revision and parameters as they were given."""

import inspect
import shlex

from labkit.lab.records import Record
from labkit.lab.show import Scalar

SOURCE = {"revision": lambda value: f"--revision {quoted(str(value))}", "trust_remote_code": lambda value: "--trust-remote-code"}
"""Parameters that have an option of their own, the same for every command that opens a model."""


def quoted(word: str) -> str:
    """A word of a shell command, on one line."""
    return shlex.quote(word) if word.isprintable() else "$'" + word.encode("unicode_escape").decode().replace("'", "\\'") + "'"


def named(parameters: dict[str, Scalar]) -> str:
    """The model as a command takes it: its name, and revision and consent to remote code where given."""
    return " ".join([quoted(str(parameters["model"])), *(option(parameters[name]) for name, option in SOURCE.items() if parameters.get(name))])


def changed(phase: type, parameters: dict[str, Scalar]) -> dict[str, Scalar]:
    """The parameters that are not the defaults of the phase (which are its notebook's), model and source apart."""
    defaults = {name: p.default for name, p in inspect.signature(phase.__init__).parameters.items()}
    return {name: value for name, value in parameters.items() if name not in ("model", *SOURCE) and value != defaults.get(name)}


def run_commands(model: str, records: dict[int, Record]) -> list[tuple[str, str]]:
    """(command, phases) that give these records again. One command, unless a parameter that two phases know has another value in each: `-p` speaks to both."""
    groups: list[list[Record]] = []
    for _, record in sorted(records.items()):
        if groups and _agree([*groups[-1], record]):
            groups[-1].append(record)
        else:
            groups.append([record])
    found = []
    for group in groups:
        given = {name: value for record in group for name, value in record.changed.items()}
        source = named(group[0].parameters | {"model": model})
        phases = ",".join(str(record.phase) for record in group)
        found.append((" ".join(["labkit run", source, f"--phases {phases}", *(f"-p {name} {quoted(str(value))}" for name, value in given.items())]), phases))
    return found


def _agree(group: list[Record]) -> bool:
    """Whether one command gives these phases the parameters they ran with."""
    if len({named(r.parameters | {"model": ""}) for r in group}) > 1:
        return False
    given = {name for record in group for name in record.changed}
    return all(len({repr(r.parameters[name]) for r in group if name in r.parameters}) <= 1 for name in given)
