"""Exact jobs in a process of their own: `python -m labkit.parity.worker JOB.json OUT`.

x64 is a switch of the whole process and TPUs only emulate float64, so exact parity runs beside the lab: on the CPU backend, with x64 and strict dtype promotion
on. A job is a JSON object with `kind` and its arguments; OUT gets `result.json` and `arrays.npz`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from labkit.errors import BlockedError, BusyError, GateError, InputError, LabError
from labkit.hf.threads import PATIENT
from labkit.parity.preparation import device_flags

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
_ERRORS = {cls.__name__: cls for cls in (LabError, InputError, BusyError, BlockedError, GateError)}


def run_job(job: dict, *, progress=None, timeout: float | None = 3600, devices: int | None = None) -> dict:
    """Run a job in a process of its own and return its result, arrays under `arrays`.

    devices: how many the host pretends to have (None: as the environment says). progress: called as progress(fraction, text). Raises the worker's own LabError,
    or LabError with the last words of a worker that died or overran `timeout` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="labkit-job-"))
    try:
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        source = str(Path(__file__).parents[2])
        environment = (
            PATIENT | _compilation_cache() | os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
        )
        if devices is not None:
            environment["XLA_FLAGS"] = device_flags(devices, environment.get("XLA_FLAGS", ""))
        # Files instead of pipes for the error stream: a chatty library cannot block the worker.
        with open(folder / "stderr", "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "labkit.parity.worker", str(folder / "job.json"), str(folder)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            try:
                _follow(process, progress, timeout)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return _result(folder, process.returncode, job)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compilation_cache() -> dict[str, str]:
    """Settings that let exact jobs share compiled operations through the scratch folder: they run op by op, and compiling is most of their time."""
    from labkit.hf.scratch import scratch_dir

    return {
        "JAX_COMPILATION_CACHE_DIR": str(scratch_dir() / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _follow(process, progress, timeout):
    """Read the worker's progress lines until it ends; kill it at the time limit."""
    import threading

    expired = []
    timer = threading.Timer(timeout, lambda: (expired.append(True), process.kill())) if timeout else None
    if timer:
        timer.daemon = True
        timer.start()
    try:
        for line in process.stdout:
            if progress is not None and line.startswith("{"):
                progress(**json.loads(line))
        process.wait()
    finally:
        if timer:
            timer.cancel()
    if expired:
        raise LabError(f"an exact job took longer than {timeout:g} seconds and was stopped", next="give it a smaller subset or shorter prompts")


def _result(folder: Path, code: int, job: dict) -> dict:
    where = f"exact job {job.get('kind')!r} on {job.get('source')}"
    if not (folder / "result.json").is_file():
        tail = (folder / "stderr").read_text(errors="replace").strip().splitlines()
        reason = "was killed, most likely for lack of memory" if code in (-9, 137) else f"ended with code {code}" + (f": {tail[-1]}" if tail else "")
        raise LabError(
            f"the worker {reason}",
            where,
            "free memory or use a smaller subset" if code in (-9, 137) else "run the job by `python -m labkit.parity.worker` to see more",
        )
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if "error" in result:
        error = result["error"]
        raise _ERRORS.get(error["type"], LabError)(error["what"], error["where"] or where, error["next"])
    import numpy as np

    with np.load(folder / "arrays.npz") as arrays:
        return result | {"arrays": dict(arrays)}


def main(argv: list[str]) -> int:
    """Run one job file; every failure ends up in `result.json`."""
    job_file, out = Path(argv[0]), Path(argv[1])
    try:
        job = json.loads(job_file.read_text(encoding="utf-8"))

        def progress(fraction, text):
            print(json.dumps({"fraction": fraction, "text": text}), flush=True)

        from labkit.parity.jobs import execute

        result = execute(job, progress=progress)
        import numpy as np

        np.savez(out / "arrays.npz", **result.pop("arrays"))
    except LabError as error:
        result = {"error": error.as_dict() | {"type": type(error).__name__}}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        result = {
            "error": {
                "type": "LabError",
                "what": f"{type(error).__name__}: {text}",
                "where": f"{last.filename}:{last.lineno} in {last.name}",
                "next": "this is a fault of the lab or of the slice; the line above is where it stopped",
            }
        }
        traceback.print_exc()
    temporary = out / "result.json.part"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, out / "result.json")
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
