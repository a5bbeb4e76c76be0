"""The TPU compiler's view of a model, without a TPU: the job runs in a process of its own with a clean environment.

libtpu's compiler works for a described topology on any host. It wants its variables set before jax is imported, and jax must not take the described chips for
attached ones: hence the process, and JAX_PLATFORMS=cpu in it.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pydantic import BaseModel

from labkit.errors import BlockedError, BusyError, GateError, InputError, LabError
from labkit.layers.sharding import MESH_AXIS_NAMES
from labkit.scale.chips import Topology, parse_topology
from labkit.scale.programs import PHASES
from labkit.scale.report import CompileReport

_ERRORS = {cls.__name__: cls for cls in (LabError, InputError, BusyError, BlockedError, GateError)}
_DROPPED = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "PJRT_", "CLOUD_TPU_")


class CompileJob(BaseModel):
    """What to compile. described, defaults: of the config, as `HFConfig` has them. mesh: axis -> size, absent ones 1. length: tokens per row, and slots of the
    cache. keep: a folder that gets the compiled programs as text."""

    model: str
    model_type: str
    described: dict
    defaults: dict
    topology: str
    mesh: dict[str, int]
    phases: list[str] = list(PHASES)
    batch: int = 0
    length: int = 2048
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"
    remat: str | None = "full"
    keep: str | None = None


def has_compiler() -> bool:
    """Whether libtpu is installed. It is not loaded."""
    return importlib.util.find_spec("libtpu") is not None


def clean_environment(topology: Topology) -> dict[str, str]:
    """The environment of a compiling process: this one's, without anything that steers jax or the TPU, and with what the compiler needs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    source = str(Path(__file__).parents[2])
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": topology.chip.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so processes need not keep out of each other's way
        "TPU_LOG_DIR": "disabled",
        "PYTHONPATH": os.pathsep.join(filter(None, (source, kept.get("PYTHONPATH")))),
    }


def check_job(job: CompileJob) -> Topology:
    """The job's topology. Raises InputError for what could not be compiled, BlockedError where libtpu is absent."""
    topology = parse_topology(job.topology)
    devices = topology.chips * topology.chip.devices_per_chip
    if topology.slices > 1 and topology.chip.dcn_bandwidth is None:
        raise InputError(f"no figure is published for the network between slices of {topology.chip.name}", "--topology", "take one slice")
    unknown = sorted(set(job.mesh) - set(MESH_AXIS_NAMES))
    if unknown:
        raise InputError(f"no mesh axis is called {', '.join(unknown)}", "--mesh", f"axes: {', '.join(MESH_AXIS_NAMES)}")
    product = 1
    for size in job.mesh.values():
        product *= size
    if product != devices or min(job.mesh.values(), default=1) < 1:
        shown = ", ".join(f"{axis}={size}" for axis, size in job.mesh.items()) or "no axes"
        raise InputError(f"a mesh of {shown} needs {product} devices, and {topology.name} has {devices}", "--mesh", "choose sizes whose product is that")
    if wrong := sorted(set(job.phases) - set(PHASES)):
        raise InputError(f"no phase is called {', '.join(wrong)}", "--phase", f"some of {', '.join(PHASES)}")
    if job.batch < 0 or job.length < 1:
        raise InputError(f"batch {job.batch} and length {job.length}: both count from 1", "--batch, --length")
    if not has_compiler():
        raise BlockedError("the TPU compiler is not installed", "package libtpu", "pip install 'jax[tpu]==0.10.2', or labkit's extra `tpu`")
    return topology


def compile_model(job: CompileJob, *, say=None, timeout: float | None = 3600) -> CompileReport:
    """Compile in a process of its own. say(line): what it is at. Raises the process's own LabError, or LabError with its last words when it died or overran
    `timeout` seconds."""
    return CompileReport.model_validate(run_compiler("labkit.scale.aot_worker", job.model_dump(), check_job(job), say=say, timeout=timeout))


def compare_dispatch(job: CompileJob, *, say=None, timeout: float | None = 3600):
    """The job's mixture layer by the lab's dispatch and by a plain einsum -> `labkit.scale.dispatch.DispatchReport`. Raises InputError without a mixture."""
    from labkit.scale.dispatch import DispatchJob, DispatchReport

    topology, config = check_job(job), job.described
    first = lambda *names: next((config[name] for name in names if config.get(name)), None)
    sizes = {
        "hidden": first("hidden_size"),
        "intermediate": first("moe_intermediate_size", "intermediate_size"),
        "experts": first("num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": first("num_experts_per_tok", "experts_per_token", "moe_topk"),
    }
    if absent := [name for name, size in sizes.items() if size is None]:
        raise InputError(f"{job.model} has no mixture: its config does not tell {', '.join(absent)}", job.model_type, "give a mixture of experts")
    batch = job.batch or topology.chips * topology.chip.devices_per_chip // job.mesh.get("tensor", 1)
    given = DispatchJob(model=job.model, topology=job.topology, mesh=job.mesh, tokens=batch * job.length, dtype=job.dtype, **sizes)
    return DispatchReport.model_validate(run_compiler("labkit.scale.dispatch", given.model_dump(), topology, say=say, timeout=timeout))


def run_compiler(module: str, job: dict, topology: Topology, *, say=None, timeout: float | None = 3600) -> dict:
    """`python -m MODULE JOB.json RESULT.json` in a compiling environment -> what it wrote. say(line): for each line that it prints."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-compile-"))
    try:
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", module, str(folder / "job.json"), str(folder / "result.json")]
        with open(folder / "stderr", "wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=clean_environment(topology))
            try:
                _follow(process, say, timeout)
            except TimeoutError:
                what = f"compiling took longer than {timeout:g} seconds and was stopped"
                raise LabError(what, job.get("model"), "give it more time or fewer phases") from None
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                process.stdout.close()
        code = process.returncode
        if not (folder / "result.json").is_file():
            tail = (folder / "stderr").read_text(errors="replace").strip().splitlines()
            reason = "was killed, most likely for lack of memory" if code in (-9, 137) else f"ended with code {code}" + (f": {tail[-1]}" if tail else "")
            raise LabError(f"the compiling process {reason}", job.get("model"), "free memory" if code in (-9, 137) else f"run `python -m {module}` to see more")
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if "error" in result:
            error = result["error"]
            raise _ERRORS.get(error["type"], LabError)(error["what"], error["where"], error["next"])
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(process: subprocess.Popen, say, timeout: float | None) -> None:
    """Hand on what the process prints until it ends. Raises TimeoutError at the time limit, the process killed."""
    expired = threading.Event()
    timer = threading.Timer(timeout or 0, lambda: (expired.set(), process.kill()))
    timer.daemon = True
    if timeout:
        timer.start()
    try:
        for line in process.stdout:
            if say is not None and line.strip():
                say(line.rstrip())
        process.wait()
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError
