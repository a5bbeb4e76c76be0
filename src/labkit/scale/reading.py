"""A program compiled and read: what any report starts from."""

import dataclasses
import re
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from labkit.scale.chips import Topology
from labkit.scale.collectives import Collective, find_collectives
from labkit.scale.hlo import parse_module
from labkit.scale.hlo_cost import Product, Traffic, hbm_traffic, products
from labkit.scale.hlo_flow import Origins, count_executions
from labkit.scale.programs import Program
from labkit.scale.report import MemoryUse
from labkit.scale.roofline import Roofline, roofline

_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory")


@dataclasses.dataclass(frozen=True)
class Reading:
    """compiled: jax's object, None where the program does not fit into memory, which `told` then says in the compiler's words. traffic: through HBM,
    the largest first. coordinates: of every device's chip, in the order the program numbers them. unknown: loops whose length depends on data, and how often
    they are counted."""

    program: Program
    trace_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    told: str = ""
    compiled: object = None
    products: tuple[Product, ...] = ()
    collectives: tuple[Collective, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    coordinates: tuple[tuple[int, ...], ...] = ()
    unknown: tuple[tuple[str, int], ...] = ()

    def memory(self, topology: Topology) -> MemoryUse:
        """The compiler's figures; what the arguments are comes from their shardings."""
        stats = self.compiled.memory_analysis()
        kinds: dict[str, int] = {}
        for role, leaf in zip(self.program.roles, jax.tree.leaves(self.program.arguments), strict=True):
            size = leaf.dtype.itemsize
            for dim in leaf.sharding.shard_shape(leaf.shape):
                size *= dim
            kinds[role.kind] = kinds.get(role.kind, 0) + size
        return MemoryUse(
            arguments=stats.argument_size_in_bytes,
            argument_kinds=kinds,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
            peak=stats.peak_memory_in_bytes,
            available=topology.chip.hbm_bytes // topology.chip.devices_per_chip,
        )

    def roofline(self, topology: Topology, flops: float) -> Roofline:
        """The bound on time, with these operations."""
        return roofline(
            flops=flops,
            hbm_bytes=sum(traffic.total for traffic in self.traffic),
            collectives=list(self.collectives),
            chip=topology.chip,
            coordinates=list(self.coordinates),
            devices_per_chip=topology.chip.devices_per_chip,
        )


def read_program(program: Program, mesh: Mesh, *, keep: Path | None = None) -> Reading:
    """Compile and read. keep: a file that gets the program as text. Raises ValueError when the compiler changed the program's parameters, and whatever the
    compiler raises other than lack of memory."""
    started = time.perf_counter()
    lowered = program.lower(mesh)
    traced, cpu = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not _NO_MEMORY.search(str(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Reading(program, traced - started, time.perf_counter() - traced, time.process_time() - cpu, told="\n".join(lines[:12])[:2000])
    seconds, cpu = time.perf_counter() - traced, time.process_time() - cpu
    text = compiled.as_text()
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(text, encoding="utf-8")
    module = parse_module(text)
    if len(module.entry.parameters) != len(program.roles):
        raise ValueError(f"the compiled program has {len(module.entry.parameters)} parameters, the traced one {len(program.roles)}: roles cannot be told")
    executions = count_executions(module)
    return Reading(
        program,
        traced - started,
        seconds,
        cpu,
        compiled=compiled,
        products=tuple(products(module, executions)),
        collectives=tuple(find_collectives(module, executions, Origins(module), list(program.roles), dict(mesh.shape))),
        traffic=tuple(hbm_traffic(module, executions)),
        coordinates=tuple((*device.coords, getattr(device, "slice_index", None) or 0) for device in mesh.devices.flat),
        unknown=executions.unknown,
    )
