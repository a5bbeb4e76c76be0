"""`labkit compile`: a model on a slice of TPU chips, seen by the TPU compiler. Weights are not read: a config is enough."""

import dataclasses
import json
from pathlib import Path

from labkit.errors import InputError
from labkit.hf import open_source
from labkit.hf.config import HFConfig


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The report of one command."""

    report: object

    def plain(self) -> str:
        return self.report.plain()

    def as_json(self) -> dict:
        """The report; `status` "pass" or "fail", and the gates of every phase."""
        gates = [{"phase": phase, **gate.model_dump()} for phase, gate in self.report.gates]
        return {"model": self.report.model, "family": self.report.family, "status": "pass" if self.report.passed else "fail", "gates": gates} | {
            "report": self.report.model_dump()
        }

    @property
    def exit_code(self) -> int:
        return 0 if self.report.passed else 1


def read_model_config(model: str, *, revision: str = "", trust_remote_code: bool = False) -> tuple[str, HFConfig]:
    """(name, config) of a config.json under any name (also one that an object `{"name", "config"}` wraps), of a folder that holds one, or of anything that
    `open_source` takes."""
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        try:
            raw = json.loads(path.read_bytes().decode("utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise InputError(f"{path.name} is not valid JSON ({error})", path, "give a config.json") from None
        name = path.parent.name if path.stem == "config" else path.stem
        if isinstance(raw, dict) and "model_type" not in raw and isinstance(raw.get("config"), dict):
            name, raw = str(raw.get("name", name)), raw["config"]
        return name, HFConfig.from_raw(raw, path, trust_remote_code=trust_remote_code)
    if (path / "config.json").is_file():
        return path.name, HFConfig.read(path, trust_remote_code=trust_remote_code)
    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    return source.name, source.config


def parse_mesh(text: str) -> dict[str, int]:
    """`fsdp=16,tensor=8` -> sizes. Raises InputError for anything else."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if not size.strip().isdigit() or axis.strip() in sizes:
            raise InputError(f"a mesh is written like fsdp=16,tensor=8, not {text!r}", "--mesh")
        sizes[axis.strip()] = int(size)
    return sizes


def make_job(model: str, *, topology: str, mesh: str, revision: str = "", trust_remote_code: bool = False, **options):
    """The `CompileJob` of a command. options: its further fields."""
    from labkit.scale.aot import CompileJob

    name, config = read_model_config(model, revision=revision, trust_remote_code=trust_remote_code)
    given = dict(model=name, model_type=config.model_type, described=config.described, defaults=config.defaults)
    return CompileJob(**given, topology=topology, mesh=parse_mesh(mesh), **options)


def compile_model(model: str, *, say=None, timeout: float = 3600, **options) -> Compiled:
    """options: as for `make_job`. Raises InputError, BlockedError (no slice, no compiler) and LabError (the compiler died)."""
    from labkit.port.slices import ensure_slice
    from labkit.scale import aot

    job = make_job(model, **options)
    aot.check_job(job)
    ensure_slice(job.model_type).require()
    return Compiled(aot.compile_model(job, say=say, timeout=timeout))


def compare_dispatch(model: str, *, say=None, timeout: float = 3600, **options):
    """The mixture layer of MODEL by the lab's dispatch and by a plain einsum: a `DispatchReport`. options: as for `make_job`."""
    from labkit.scale import aot

    return aot.compare_dispatch(make_job(model, **options), say=say, timeout=timeout)
