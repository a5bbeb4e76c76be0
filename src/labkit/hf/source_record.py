"""What every expression of a reference's modeling source holds: recorded by running instrumented copies of its files.

A text alone does not tell an array from a dictionary or a module, nor which branch a configuration takes. The record says both, by position.
`python -m labkit.hf.source_record OUT MODEL...` writes one as JSON; `record_sources` does so in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from labkit.errors import BlockedError, InputError, LabError
from labkit.hf.cached_decoding import decode_with_cache
from labkit.hf.threads import PATIENT, one_thread

_ERRORS = {"InputError": InputError, "BlockedError": BlockedError, "LabError": LabError}
MAX_VALUES = 8  # different values kept of a static attribute


@dataclass
class SourceRecord:
    """Observations of several models of one architecture, united. Files are named relative to the transformers package; only files whose functions ran appear.

    A node key is "line:col:endline:endcol" in the original file, as `ast` counts. Kinds: "array:<f|i|b|c>:<rank>", "param:<f>:<rank>", "buffer:<f>:<rank>",
    "module:<Class>", "modulelist", "dict", "list", "tuple", "size", "int", "float", "bool", "str", "none", "cache", "config", "dtype", "device",
    "function:<qualname>", "class:<name>", "other:<type name>".

    nodes[file][key]: sorted kinds of an expression. Besides expressions that are read: parameters (key of the `ast.arg`) at entry, names bound by a for, a
    with or by unpacking (key of the stored name), the target name of an augmented assignment before it. Constants and what is inside f-strings are left out.
    tests[file][key]: sorted truth values of the test of if, elif, while, assert, a conditional expression or comprehension, and of every operand of and, or
    and not. callees[file][key of the call]: sorted "file::qualname" of what runs, unwrapped from decorators: a module's forward, in the class that defines it;
    a class is "file::Class"; "external::module.qualname" outside of the instrumented files. functions[file][qualname]: calls, 0 for those that never ran.
    constants[file][key]: the value of an expression that was the same bool, int, str or None every time.

    attributes["file::Class"][name]: {"kinds": [...], "values": up to 8 different plain values (lists stand for tuples), "tensors": [[model index,
    "param" or "buffer", persistent, dtype, shape], ...] without repetition}; names of submodules are among them.

    One entry per model that loads: models (as given), modules {module path: "file::Class"}, state {state dict name: [dtype, shape]}, tied (groups of names of
    one tensor), config (`to_dict`). notes: models and runs that the reference refused.
    """

    models: list[str] = field(default_factory=list)
    nodes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    tests: dict[str, dict[str, list[bool]]] = field(default_factory=dict)
    callees: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    functions: dict[str, dict[str, int]] = field(default_factory=dict)
    constants: dict[str, dict[str, object]] = field(default_factory=dict)
    attributes: dict[str, dict[str, dict]] = field(default_factory=dict)
    modules: list[dict[str, str]] = field(default_factory=list)
    state: list[dict[str, list]] = field(default_factory=list)
    tied: list[list[list[str]]] = field(default_factory=list)
    config: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "SourceRecord":
        """The record of `to_json`. Raises the error that `main` wrote in its place."""
        found = json.loads(text)
        if "error" in found:
            raise _ERRORS.get(found["kind"], LabError)(**found["error"])
        return cls(**found)


def record_sources(paths: Sequence[str | os.PathLike]) -> SourceRecord:
    """Record models (tiny names, checkpoint directories, `variants:<type>`) in a process of its own. Raises what `Reference.load` does when none loads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        here = str(Path(__file__).parents[2])
        environment = {**os.environ, **{key: os.environ.get(key, value) for key, value in PATIENT.items()}}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "labkit.hf.source_record", str(out), *map(str, paths)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not out.is_file():
            tail = " ".join(done.stderr.split())[-600:]
            raise LabError(f"The process that records sources ended with {done.returncode}: {tail}", ", ".join(map(str, paths)), "Report this family")
        return SourceRecord.from_json(out.read_text())


def record_sources_here(paths: Sequence[str | os.PathLike]) -> SourceRecord:
    """`record_sources` in this process, whose modeling modules are put back afterwards. Models must not be built by other threads meanwhile."""
    from labkit.hf.instrumented import instrumented_models
    from labkit.hf.observer import Observer
    from labkit.hf.quiet import quiet_transformers
    from labkit.hf.reference import Reference
    from labkit.hf.tiny import tiny_directory

    if not paths:
        raise InputError("No model to record", next="Give at least one tiny name or directory")
    paths = [name for path in paths for name in _expanded(str(path))]
    observer, record, failure = Observer(), SourceRecord(), None
    with one_thread(), quiet_transformers():
        # Tiny models are built by the process's own modules: only loading and running counts as observation.
        directories: dict[str, Path] = {}
        configs = []
        for path in map(str, paths):
            try:
                directories[path] = tiny_directory(path) if path.startswith("tiny:") else Path(path)
            except LabError as error:
                failure = failure or error
                record.notes.append(f"{path}: {error.what}")
        with instrumented_models(observer):
            for path, directory in directories.items():
                try:
                    reference = Reference.load(directory, "exact", verify=False)
                except LabError as error:
                    failure = failure or error
                    record.notes.append(f"{path}: {error.what}")
                    continue
                observer.kinds.note_buffers(reference.model)
                record.models.append(path)
                configs.append(reference.model.config)
                _describe(reference.model, len(record.modules), observer, record)
                _run(reference, observer, record)
                observer.kinds.buffers = set()
        _note_narrow(record, observer, configs)
    if not record.models:
        raise failure
    for name, table in observer.tables().items():
        setattr(record, name, table)
    return record


def _expanded(path: str) -> list[str]:
    """`variants:<type>` as the small configurations that together run the type's optional branches."""
    from labkit.hf.variants import record_variants

    return record_variants(path.removeprefix("variants:")) if path.startswith("variants:") else [path]


def _run(reference, observer, record: SourceRecord):
    import numpy as np
    import torch

    def decode(tokens):
        with reference._running():
            decode_with_cache(reference.model, torch.from_numpy(tokens))

    vocab = reference.model.get_input_embeddings().weight.shape[0]
    draw = np.random.default_rng(0).integers(0, vocab, (2, 40))
    mask = np.ones((2, 24), np.int64)
    mask[1, :5] = 0
    runs = {
        "40 tokens": lambda: reference.logits(draw),
        "cached decoding": lambda: decode(draw[:, :10]),
        "left padding": lambda: reference.logits(draw[:, :24], mask),
    }
    for name, run in runs.items():
        try:
            run()
        except Exception as error:  # whatever the reference cannot do is a note, not a fault of the record
            record.notes.append(f"{record.models[-1]}: {name} fails in the reference: {type(error).__name__}: {str(error)[:300]}")
        observer.kinds.note_buffers(reference.model)


def _note_narrow(record: SourceRecord, observer, configs) -> None:
    """Marks tensors that a constructor makes in torch's default dtype and saves nowhere, `narrow` in `attributes`: a model is built with its own
    dtype as default.

    Found by building each model for bfloat16 from the process's own modules.
    """
    import torch
    from transformers import AutoModelForCausalLM

    for config in configs:
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        except Exception:  # source that came with a model: nothing is known
            continue
        for module in model.modules():
            attributes = record.attributes.get(observer.class_name(type(module)), {})
            saved = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
            for name, value in {**vars(module), **module._buffers}.items():
                if isinstance(value, torch.Tensor) and name in attributes and name not in saved:
                    asked = any(about[3] == "bfloat16" for about in attributes[name]["tensors"])  # narrow in a model of float64 too
                    attributes[name]["narrow"] = attributes[name].get("narrow", True) and value.dtype is torch.bfloat16 and not asked


def _describe(model, index: int, observer, record: SourceRecord):
    """Classes, attributes, state and config of a model after construction."""
    import torch

    hidden = set(vars(torch.nn.Module())) | {"_is_hf_initialized", "name_or_path"}
    modules = {}
    for path, module in model.named_modules():
        modules[path] = name = observer.class_name(type(module))
        attributes = record.attributes.setdefault(name, {})
        tensors = {**{key: ("param", True) for key in module._parameters}}
        tensors |= {key: ("buffer", key not in module._non_persistent_buffers_set) for key in module._buffers}
        for key, value in {**vars(module), **module._parameters, **module._buffers, **module._modules}.items():
            if key in hidden:
                continue
            entry = attributes.setdefault(key, {"kinds": [], "values": [], "tensors": []})
            kind = observer.kinds(value)
            if kind not in entry["kinds"]:
                entry["kinds"] = sorted([*entry["kinds"], kind])
            if key in tensors and value is not None:
                about = [index, *tensors[key], _dtype(value), list(value.shape)]
                if about not in entry["tensors"]:
                    entry["tensors"].append(about)
            elif _plain(value):
                value = json.loads(json.dumps(value))
                if not any(type(value) is type(other) and value == other for other in entry["values"]) and len(entry["values"]) < MAX_VALUES:
                    entry["values"].append(value)
    from labkit.hf.config import as_held

    state, groups = model.state_dict(keep_vars=True), {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    record.modules.append(modules)
    record.state.append({name: [_dtype(tensor), list(tensor.shape)] for name, tensor in state.items() if hasattr(tensor, "shape")})
    record.tied.append([names for names in groups.values() if len(names) > 1])
    record.config.append(json.loads(json.dumps(as_held(model.config), default=str)))


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= 64 and all(_plain(element) for element in value)
    return value is None or isinstance(value, (bool, int, float, str))


def main(arguments: list[str]) -> int:
    """Write the record of arguments[1:] to the file arguments[0]; an error of the lab is written in its place."""
    out, *paths = arguments
    try:
        text = record_sources_here(paths).to_json()
    except LabError as error:
        text = json.dumps({"kind": type(error).__name__, "error": error.as_dict()})
    temporary = Path(f"{out}.tmp")
    temporary.write_text(text)
    os.replace(temporary, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
