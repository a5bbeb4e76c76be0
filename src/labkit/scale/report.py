"""What the TPU compiler said of a model, as typed data and as text."""

from pydantic import BaseModel, Field

from labkit.scale.roofline import Roofline


class MemoryUse(BaseModel):
    """Bytes on one device. arguments, by what they are; outputs that take no argument's memory over; temporaries; peak: as the compiler reports it."""

    arguments: int
    argument_kinds: dict[str, int]
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int
    available: int

    @property
    def share(self) -> float:
        return self.peak / self.available


class FlopsCheck(BaseModel):
    """Operations of one device in one step, counted in the compiled program, against the family's formula.

    compiled: by what and by part, e.g. "weights, forward". once: with every loop body counted once, which is what `cost_analysis` does; cost_analysis: what it
    said. ratio: compiled products with weights (without what is recomputed, grouped products at balanced load) over the formula's. worst_case: grouped products
    with every row that a device may be given.
    """

    compiled: dict[str, float]
    once: float
    cost_analysis: float
    formula_weights: float = 0.0
    formula_attention: float | None = None
    ratio: float | None = None
    worst_case: float
    explained: list[str] = Field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.compiled.values())


class CollectiveRow(BaseModel):
    """Collectives that move the same thing for the same reason. bytes: received by one device per step. weights: the parameters, where weights are moved."""

    kind: str
    moves: str
    part: str
    axes: str
    count: int
    executions: int
    bytes: int
    seconds: float
    weights: list[str] = Field(default_factory=list)
    sources: list[str] = Field(default_factory=list)


class TrafficRow(BaseModel):
    """What one instruction moves through HBM, bytes of one device per step."""

    shape: str
    executions: int
    bytes: int
    source: str


class Gate(BaseModel):
    """What must hold of a compiled program."""

    name: str
    passed: bool
    detail: str


class PhaseReport(BaseModel):
    """One compiled program. status: "compiled", or "does not fit" with the compiler's own words in `detail`."""

    phase: str
    batch: int
    length: int
    status: str
    detail: str = ""
    trace_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    memory: MemoryUse | None = None
    flops: FlopsCheck | None = None
    collectives: list[CollectiveRow] = Field(default_factory=list)
    traffic: list[TrafficRow] = Field(default_factory=list)
    roofline: Roofline | None = None
    gates: list[Gate] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def moved(self, moves: str) -> int:
        """Bytes that one device receives per step of weights, activations, gradients, ..."""
        return sum(row.bytes for row in self.collectives if row.moves == moves)


class CompileReport(BaseModel):
    """A model on a slice of TPU chips, seen by the TPU compiler."""

    model: str
    family: str
    slice_source: str
    layers: str
    parameters: int
    topology: str
    chips: int
    devices: int
    mesh: dict[str, int]
    dtype: str
    param_dtype: str
    remat: str | None
    versions: dict[str, str]
    phases: list[PhaseReport]

    @property
    def gates(self) -> list[tuple[str, Gate]]:
        return [(phase.phase, gate) for phase in self.phases for gate in phase.gates]

    @property
    def passed(self) -> bool:
        return all(phase.status == "compiled" for phase in self.phases) and all(gate.passed for _, gate in self.gates)

    def phase(self, name: str) -> PhaseReport:
        return next(phase for phase in self.phases if phase.phase == name)

    def plain(self) -> str:
        """Tables for a terminal."""
        from labkit.scale.report_text import plain

        return plain(self)
