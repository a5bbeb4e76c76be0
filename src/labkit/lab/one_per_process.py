"""Types tried one per process, several at a time: forked where the imports are done, stopped with all they started, each a row whatever becomes of it."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labkit.hf.threads import PATIENT


def workers():
    """Where processes are forked from: a server that has imported what a proof needs, which takes longer than many proofs."""
    os.environ |= {name: value for name, value in PATIENT.items() if name not in os.environ}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labkit.port.proof_imports"])
    return context


def rows_of(
    names: Iterable[str], row_of: Callable[[str, set], dict], *, jobs: int, out: Path | None, say: Callable[[int, int, str, dict], None]
) -> dict[str, dict]:
    """name -> row, `jobs` at a time.

    row_of(name, running) is `row_apart` for one name; running: processes to stop when this ends early. out: gets one JSON line per row as it comes. say(index,
    how many, name, row).
    """
    names, rows, running = list(names), {}, set()
    try:
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            futures = {pool.submit(row_of, name, running): name for name in names}
            try:
                for index, future in enumerate(as_completed(futures), 1):
                    name, row = futures[future], future.result()
                    rows[name] = row
                    if out is not None:
                        with out.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row) + "\n")
                    say(index, len(names), name, row)
            except BaseException:
                for future in futures:
                    future.cancel()
                for process in list(running):
                    end(process)
                raise
    finally:
        for process in list(running):
            end(process)
    return rows


def row_apart(
    work: Callable[[list[str]], int], arguments: list[str], *, time_limit: float, running: set, lost: Callable[[str, str, float], dict], context=None
):
    """What `work(arguments + ["--json", FILE])` writes into FILE, in a process of its own; lost(what, its last words, seconds) where it wrote nothing."""
    with tempfile.TemporaryDirectory(prefix="labkit-apart-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        log.touch()
        process = (context or workers()).Process(target=_work, args=(work, [*arguments, "--json", str(result)], str(log)))
        process.start()
        running.add(process)
        try:
            process.join(time_limit)
            if process.is_alive():
                return lost(f"took longer than {time_limit:g} seconds and was stopped", _last(log), time_limit)
        finally:
            end(process)
            running.discard(process)
        if result.is_file():
            return json.loads(result.read_text(encoding="utf-8"))
        return lost(f"the worker ended with code {process.exitcode}", _last(log), 0.0)


def _work(work: Callable[[list[str]], int], arguments: list[str], log: str) -> None:
    """In the new process: a session of its own, its words in `log`."""
    os.setsid()
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    sys.exit(work(arguments))


def _last(log: Path) -> str:
    """The last line that tells of a step, else the last one."""
    lines = [" ".join(line.split()) for line in log.read_text(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if line.startswith(("pass", "FAIL"))]
    return (steps or lines or [""])[-1][:200]


def end(process) -> None:
    """Stop a process and whatever it started."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # not yet in a session of its own
            process.kill()
    process.join()
