"""`labkit meshes`: mesh parity of any families, each in a process of eight devices, after the slices that the garden lacks have been translated."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from labkit.errors import InputError, LabError
from labkit.parity.meshes import HEAD, MESHES, MeshParity, MeshRow


def named_families() -> list[str]:
    """The families that the suite names (tests/models/families.py lists them by what they cover): the default of the command."""
    return (
        "llama mistral qwen2 qwen3 qwen2_moe qwen3_moe mixtral gemma gemma2 gemma3_text phi3 granite granitemoe cohere cohere2 olmo2 olmoe smollm3 deepseek_v3 "
        "gpt_oss llama4_text hrm_text minicpm3 glm4 glm4_moe qwen3_next gpt2 gpt_neox mamba2"
    ).split()


def meshes(
    names: Iterable[str], *, mode: str = "exact", sizes: Iterable[tuple[int, ...]] = MESHES, decode: bool = True, say: Callable[[str], None] = print
) -> list[MeshParity]:
    """Mesh parity of model types (their tiny models) or of models. say is given the table as it grows, a failure to make a slice among it.

    Raises InputError for a mesh that is not four sizes.
    """
    sizes = [tuple(mesh) for mesh in sizes]
    if wrong := [mesh for mesh in sizes if len(mesh) != 4 or min(mesh) < 1]:
        raise InputError(f"a mesh is four sizes (data, fsdp, tensor, expert), not {wrong[0]}", next="for example 1,2,2,2")
    found = []
    say(HEAD)
    for name in names:
        try:
            found.append(_one(name, mode, sizes, decode))
            say(found[-1].plain())
        except LabError as error:
            row = MeshRow((), mode, reason=f"{error.what} {error.where or ''}".strip())
            found.append(MeshParity(name, name, "", [row]))
            say(f"FAIL  {name:16} {row.reason}")
    return found


def _one(name: str, mode: str, sizes, decode: bool) -> MeshParity:
    from labkit.hf.source import open_source
    from labkit.port.slices import ensure_slice

    for model in _candidates(name):
        try:
            source = open_source(model)
            break
        except InputError:
            if model == _candidates(name)[-1]:
                raise
    ensure_slice(source).require()
    with tempfile.TemporaryDirectory(prefix="labkit-meshes-") as folder:
        out = Path(folder) / "found.jsonl"
        chosen = [part for mesh in sizes for part in ("--mesh", ",".join(map(str, mesh)))]
        command = [sys.executable, "-m", "labkit.parity.meshes", model, "--mode", mode, *chosen, *([] if decode else ["--no-decode"]), "--json", str(out)]
        package = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not out.is_file():
            last = (process.stdout + process.stderr).strip().splitlines()
            raise LabError(f"the process of mesh parity ended with code {process.returncode}: {last[-1] if last else 'no word'}", model)
        told = json.loads(out.read_text())
    rows = [MeshRow(**{**row, "mesh": tuple(row["mesh"])}) for row in told["rows"]]
    return MeshParity(told["model"], told["model_type"], told["kind"], rows)


def _candidates(name: str) -> list[str]:
    """A model as it is given; of a type two layers where its class takes so few (every kind of layer costs a compiled body, forward and back), else all."""
    return [name] if set(name) & set(":/.") or Path(name).exists() else [f"tiny:{name}?num_hidden_layers=2", f"tiny:{name}"]
