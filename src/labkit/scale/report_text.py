"""A report of the TPU compiler as text: what `labkit compile` prints."""

import io

from rich.console import Console

from labkit.scale.report import CompileReport, FlopsCheck, MemoryUse, PhaseReport

GIB, WIDTH = 2**30, 160
_COLUMNS = ("moves", "part", "kind", "axes", "count", "executions", "MB", "on links", "what or why")


def plain(report: CompileReport) -> str:
    """All phases, one after the other."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, markup=False, color_system=None, soft_wrap=True)
    axes = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    kept = f"{report.parameters:,} parameters in {report.param_dtype}, computed in {report.dtype}"
    console.print(f"{report.model} ({report.family}, {report.slice_source} slice): {report.layers}; {kept}")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"on {report.topology}: {report.chips} chips, {report.devices} devices, mesh {axes}; {versions}")
    for phase in report.phases:
        _phase(console, phase, report)
    return console.file.getvalue().rstrip()


def _phase(console: Console, phase: PhaseReport, report: CompileReport) -> None:
    tokens = f"{phase.batch} rows of {phase.length} tokens"
    if phase.phase == "decode":
        tokens = f"1 token for each of {phase.batch} rows, cache of {phase.length} slots"
    settings = f", AdamW, remat {report.remat or 'none'}" if phase.phase == "train" else ""
    seconds = f"traced in {phase.trace_seconds:.1f} s, compiled in {phase.compile_seconds:.1f} s ({phase.compile_cpu_seconds:.1f} s of CPU)"
    console.print(f"\n{phase.phase.upper()}: {tokens}{settings}; {seconds}: {phase.status}")
    if phase.detail:
        console.print(phase.detail)
    if phase.memory is not None:
        _memory(console, phase.memory)
    if phase.flops is not None:
        _flops(console, phase.flops)
    if phase.collectives:
        _collectives(console, phase)
    if phase.roofline is not None:
        _roofline(console, phase)
    for gate in phase.gates:
        console.print(f"gate: {gate.name}: {'holds' if gate.passed else 'FAILS'} ({gate.detail})")
    for note in phase.notes:
        console.print(f"note: {note}")


def _gib(count: float) -> str:
    return f"{count / GIB:.3f} GiB" if count < 10 * GIB else f"{count / GIB:.1f} GiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _memory(console: Console, memory: MemoryUse) -> None:
    kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in memory.argument_kinds.items() if size)
    rest = f"outputs {_gib(memory.outputs)} beside {_gib(memory.aliased)} in place, temporaries {_gib(memory.temporaries)}, code {_gib(memory.code)}"
    console.print(f"HBM per device: arguments {_gib(memory.arguments)} ({kinds}), {rest}")
    console.print(f"  peak {_gib(memory.peak)} of {_gib(memory.available)} ({memory.share:.0%})")


def _flops(console: Console, flops: FlopsCheck) -> None:
    tera = lambda count: f"{count / 1e12:.4f}"
    parts = ", ".join(f"{what} {tera(count)}" for what, count in flops.compiled.items())
    console.print(f"TFLOP per device and step, as compiled: {tera(flops.total)} ({parts})")
    console.print(f"  with loop bodies once {tera(flops.once)}; cost_analysis says {tera(flops.cost_analysis)}")
    formula = f"weights {tera(flops.formula_weights)}" + ("" if flops.formula_attention is None else f", attention {tera(flops.formula_attention)}")
    console.print(f"  the family's formula: {formula}" + ("" if flops.ratio is None else f"; weights as compiled over formula {flops.ratio:.4f}"))
    for line in flops.explained:
        console.print(f"  {line}")


def _collectives(console: Console, phase: PhaseReport) -> None:
    rows = [_COLUMNS]
    for row in phase.collectives:
        what = ", ".join(filter(None, dict.fromkeys(row.weights or row.sources)))
        numbers = (str(row.count), str(row.executions), f"{row.bytes / 1e6:,.2f}", _time(row.seconds))
        rows.append((row.moves, row.part, row.kind, row.axes, *numbers, what if len(what) <= 60 else what[:57] + "..."))
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    console.print("collectives; MB as received by one device per step")
    for row in rows:
        aligned = (cell.rjust(width) if 4 <= index <= 7 else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths)))
        console.print("  " + "  ".join(aligned).rstrip())
    totals = {moves: phase.moved(moves) for moves in dict.fromkeys(row.moves for row in phase.collectives)}
    console.print("  in all: " + ", ".join(f"{moves} {total / 1e6:,.1f} MB" for moves, total in totals.items()))


def _roofline(console: Console, phase: PhaseReport) -> None:
    r = phase.roofline
    compute = f"compute {_time(r.compute)} ({r.flops / 1e12:.3f} TFLOP at {r.peak_flops / 1e12:.0f} TFLOP/s)"
    memory = f"memory {_time(r.memory)} ({r.hbm_bytes / 1e9:.3f} GB at {r.hbm_bandwidth / 1e9:.0f} GB/s)"
    links = f"links {_time(r.links)} ({r.link_bytes / 1e9:.3f} GB; {r.ici_bandwidth / 1e9:.0f} GB/s over {r.torus} torus dimensions)"
    console.print(f"roofline: {compute}, {memory}, {links}")
    produced = phase.batch * (1 if phase.phase == "decode" else phase.length)
    bound = f"at least {_time(r.overlapped)} per step, bound by {r.bound_by}; {_time(r.serial)} if nothing overlaps"
    for row in phase.traffic:
        console.print(f"  through HBM {row.bytes / 1e9:,.3f} GB in {row.executions} x {row.shape}: {row.source}")
    console.print(f"  {bound}; at most {produced / r.overlapped:,.0f} tokens/s. Figures: {r.source}")
