"""A translator that answers with the llama slice under another type's name, for what the cache, the commands and the lab do with a translation."""

import dataclasses
import hashlib
import sys
import types

from labkit.hf.architectures import transformers_folder
from labkit.models import get_family

FAMILY = "mistral"
SOURCE = "models/mistral/modeling_mistral.py"
MODEL = "tiny:mistral?sliding_window=4096"


@dataclasses.dataclass(frozen=True)
class Refusal:
    construct: str
    where: str
    component: str
    advice: str


@dataclasses.dataclass
class Translation:
    family: str
    files: dict
    refusals: list
    unproven: list
    sources: dict
    fingerprint: str
    transformers_version: str
    unusual: list


REFUSED = Refusal("a data-dependent shape", "modeling_mistral.py:77", "attention", "write a mask")


def slice_files() -> dict[str, str]:
    """The llama slice, renamed, and without biases, which the type does not have."""
    files = {}
    for path in get_family("llama").path.glob("*.py"):
        text = path.read_text().replace("_bias: bool", "_bias: bool = False")
        files[path.name.replace("llama", FAMILY)] = text.replace("llama", FAMILY).replace("Llama", FAMILY.capitalize())
    return files


def install(monkeypatch, *, refusals=(), fault=None, change=None, version="1"):
    """Put the fake in the translator's place; returns the list of calls. change: (file, old, new) to make the slice wrong."""
    calls = []

    def translate(source, *, record=None, progress=None):
        calls.append(source)
        if fault is not None:
            raise fault
        files = slice_files()
        if change:
            name, old, new = change
            assert old in files[name]
            files[name] = files[name].replace(old, new, 1)
        digest = hashlib.sha256((transformers_folder() / SOURCE).read_bytes()).hexdigest()
        return Translation(FAMILY, files, list(refusals), [("modeling_mistral.py:12", "if x:")], {SOURCE: digest}, "f" * 64, "5.24.0", ["nothing"])

    module = types.ModuleType("labkit.port.translate")
    module.translate, module.TRANSLATOR_VERSION = translate, version
    monkeypatch.setitem(sys.modules, "labkit.port.translate", module)
    monkeypatch.setattr(sys.modules["labkit.port"], "translate", module, raising=False)
    return calls


def isolate(monkeypatch, tmp_path):
    """A cache, an environment and a registry of the test's own; tiny models still come from the session's scratch folder."""
    from labkit.models import registry
    from labkit.port import slices

    monkeypatch.setenv("LABKIT_SLICES", "")
    monkeypatch.setenv("LABKIT_FOUND_SLICES", "")
    monkeypatch.delenv("LABKIT_PREFER", raising=False)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_folders", {})
    monkeypatch.setattr(slices, "scratch_dir", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
