"""The compiling process: `python -m labkit.scale.aot_worker JOB.json RESULT.json`. Started by `labkit.scale.aot` in the environment that libtpu needs."""

import json
import os
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

from labkit.errors import LabError


def topology_devices(topology):
    """The described devices, in the order the compiler numbers them."""
    from jax.experimental import topologies

    shape = "x".join(map(str, topology.shape))
    more = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.chip.name == "v4":
        more["chip_config_name"] = "megacore"  # its two cores as one device, as attached chips show themselves
    if topology.chips < 4:
        more["chips_per_host_bounds"] = tuple(topology.shape) + (1,) * (3 - len(topology.shape))
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{topology.chip.name}:{shape}", **more).devices


def compile_job(job) -> dict:
    """A `CompileJob` -> the contents of a `CompileReport`."""
    import jax.numpy as jnp

    from labkit.models.config import read_config
    from labkit.models.registry import get_family
    from labkit.scale.aot import check_job
    from labkit.scale.inspect_program import inspect_program
    from labkit.scale.mesh import build_mesh
    from labkit.scale.programs import ModelPrograms
    from labkit.scale.report import CompileReport

    topology = check_job(job)
    family = get_family(job.model_type)
    config, _ = read_config(family, job.described, job.defaults, dtype=jnp.dtype(job.dtype).type, param_dtype=jnp.dtype(job.param_dtype).type)
    mesh = build_mesh(**job.mesh, devices=topology_devices(topology))
    batch = job.batch or mesh.size // mesh.shape["tensor"]
    programs = ModelPrograms(family, config, mesh, batch=batch, length=job.length, remat=job.remat)
    reports = []
    for phase in job.phases:
        print(f"{job.model} on {topology.name}: {phase} is being compiled", flush=True)
        reports.append(inspect_program(programs, phase, topology, keep=job.keep))
    count = sum(leaf.size for name, leaf in programs.state.items() if name in programs.trained)
    return CompileReport(
        model=job.model,
        family=family.name,
        slice_source=family.source,
        layers=config.plan.describe(),
        parameters=count,
        topology=topology.name,
        chips=topology.chips,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        dtype=job.dtype,
        param_dtype=job.param_dtype,
        remat=job.remat,
        versions={name: metadata.version(name) for name in ("jax", "libtpu")},
        phases=reports,
    ).model_dump()


def main(argv: list[str], execute=None) -> int:
    """Run one job; every failure ends up in the result. execute: dict -> dict."""
    started = time.perf_counter()
    try:
        given = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
        if execute is None:
            from labkit.scale.aot import CompileJob

            execute = lambda given: compile_job(CompileJob.model_validate(given))
        result = execute(given)
    except LabError as error:
        result = {"error": error.as_dict() | {"type": type(error).__name__}}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        place = f"{last.filename}:{last.lineno} in {last.name}"
        result = {
            "error": {"type": "LabError", "what": f"{type(error).__name__}: {text}", "where": place, "next": "this is a fault of the lab or of the slice"}
        }
        traceback.print_exc()
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    temporary = f"{argv[1]}.part"
    Path(temporary).write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, argv[1])
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
