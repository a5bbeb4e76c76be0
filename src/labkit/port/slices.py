"""Where translated slices live: found, made when there is none, and registered. Kept by the source they were read from and the translator that wrote them."""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

import labkit
from labkit.errors import BlockedError, InputError, LabError
from labkit.hf import architectures
from labkit.hf.scratch import scratch_dir
from labkit.models import registry
from labkit.models.outside import FOUND, folders_in, named_folders, put_into
from labkit.models.registry import PROVENANCE, folder_source, prefers_translated, refined_families

GARDEN = Path(labkit.__file__).parent / "models"
OUTSIDE = "labkit_slices"
SCHEMA = 1
KEPT_SECONDS = 7 * 86400
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class SliceInfo:
    """A slice that `get_family` knows. kind: "refined", "translated" or "edited". fresh: made by this call. provenance: `provenance.json`, {} when refined.

    refusals: dicts with construct, where, component, advice: what could not be translated.
    """

    family: str
    folder: Path
    kind: str
    fresh: bool = False
    refusals: list[dict] = field(default_factory=list)
    provenance: dict = field(default_factory=dict)

    @property
    def unproven(self) -> list[list[str]]:
        """[where, text] of branches that no configuration ran."""
        return self.provenance.get("unproven", [])

    @property
    def unusual(self) -> list[str]:
        return self.provenance.get("unusual", [])

    def require(self) -> "SliceInfo":
        """Raises BlockedError that lists what could not be translated."""
        if self.refusals:
            raise blocked(self.family, self.refusals, self.folder)
        return self

    def plain(self) -> str:
        """How the slice came about, in one sentence."""
        if self.kind == "refined":
            return f"The slice of {self.family} was written by hand{' and lies in the garden' if self.folder.parent == GARDEN else f': {self.folder}'}."
        p = self.provenance
        made = f"translated from transformers {p.get('transformers', '?')} on {p.get('date', '?')[:10]}, translator {p.get('translator', '?')}"
        return f"The slice of {self.family} was {made}{', and has been edited since' if self.kind == 'edited' else ''}: {self.folder}."


def blocked(family: str, refusals: list[dict], where) -> BlockedError:
    """The wall that refusals are: each construct with its line and component."""
    listed = "; ".join(f"{r['construct']} at {r['where']} ({r['component']})" for r in refusals)
    advice = "; ".join(dict.fromkeys(r["advice"] for r in refusals if r["advice"])) or "write these methods by hand"
    count = f"{len(refusals)} construct{'s' if len(refusals) > 1 else ''}"
    what = f"{count} of {family} cannot be translated: {listed}"
    return BlockedError(what, str(where), f"{advice}; `labkit port tiny:{family} --write` puts the rest into the garden")


def ensure_slice(source, progress: Progress | None = None, *, force: bool = False) -> SliceInfo:
    """The slice of a `Source` or of a model type: named by a person, in the garden, kept outside the package, cached, or translated now.

    Registers what is not in the garden, also for processes that are started. force: translate again even where the cache has it. Raises BlockedError when there
    is no source to translate, or when it came with the model and is not trusted; InputError when a named folder is no slice; refusals are returned, not raised.
    """
    model_type = source if isinstance(source, str) else source.config.model_type
    there = slice_there(model_type)
    if there is not None and not _makes_way(model_type):
        return there if there.folder.parent == GARDEN else _registered(there)
    return _registered(cached_slice(source, progress, force=force))


def cached_slice(source, progress: Progress | None = None, *, force: bool = False) -> SliceInfo:
    """What the translator writes now for a `Source` or a model type, from the cache or made; nothing is registered. Errors as for `ensure_slice`."""
    model_type = source if isinstance(source, str) else source.config.model_type
    _require_source(model_type, source)
    with _lock(model_type):
        folder = None if force else find_cached(model_type, source)
        fresh = folder is None
        if fresh:
            folder = write_cached(_translate(source, progress))
    provenance = read_provenance(folder)
    return SliceInfo(model_type, folder, "translated", fresh, provenance["refusals"], provenance)


def slice_there(model_type: str) -> SliceInfo | None:
    """The slice that a person has of a type: named, in the garden, or kept outside the package; or None. What `ensure_slice` takes before it translates."""
    folder = named_folders().get(model_type) or (GARDEN / model_type if model_type in refined_families() else kept_outside(model_type))
    if folder is None:
        return None
    kind = folder_source(folder) or "refined"
    provenance = read_provenance(folder)
    return SliceInfo(model_type, folder, kind, False, _still_refused(folder, provenance), provenance)


def announce(model_type: str) -> None:
    """Tell the processes that are started from here, which may work in other folders, of the slice that a person has of a type."""
    there = slice_there(model_type)
    if there is not None and there.folder.parent != GARDEN:
        _registered(there)


def _makes_way(model_type: str) -> bool:
    """The garden's slice does, for the translated one, with LABKIT_PREFER=translated. A slice that a person names never does."""
    return prefers_translated() and model_type in refined_families() and model_type not in named_folders()


def slice_identity(source) -> str:
    """What a finished phase was run with: a digest of the files of a slice outside the garden, "" for one in it, "none" where there is none yet."""
    model_type = source if isinstance(source, str) else source.config.model_type
    there = slice_there(model_type)
    folder = find_cached(model_type, source) if there is None or _makes_way(model_type) else there.folder
    if folder is None:
        return "none"
    if folder.parent == GARDEN:
        return ""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _registered(info: SliceInfo) -> SliceInfo:
    """Registered in this process and for those that it starts; once, as long as its folder and its kind stay what they are."""
    named = named_folders().get(info.family) == info.folder
    if registry.registered_folder(info.family) != info.folder or registry.registered_source(info.family) != info.kind:
        (registry.register_folder if named else registry.register_found)(info.folder, info.kind)
    elif not named:
        put_into(FOUND, info.folder)
    return info


def kept_outside(model_type: str) -> Path | None:
    """A slice of the type that lies in `./labkit_slices`, where `labkit port --write` puts it when it cannot write the garden; or that a parent found there."""
    found = [folder for folder in folders_in(FOUND) if folder.name == model_type and not folder.is_relative_to(slices_dir())]
    for folder in (Path.cwd() / OUTSIDE / model_type, *found):
        if (folder / "__init__.py").is_file():
            return folder
    return None


def _still_refused(folder: Path, provenance: dict) -> list[dict]:
    """A person who edited a slice has taken its refusals in hand: the verdict judges the edit."""
    return provenance.get("refusals", []) if folder_source(folder) == "translated" else []


def _require_source(model_type: str, source) -> None:
    """Raises BlockedError where there is nothing to read, or nothing that may be read."""
    if model_type in architectures.causal_lm_classes():
        return
    config = None if isinstance(source, str) else source.config
    if config is not None and config.has_remote_code:
        if config.trust_remote_code:
            return
        raise BlockedError(
            f"the source of {model_type} came with the model, and is translated only when it may also be run",
            f"{config.path}, key auto_map",
            "read the Python files of the checkpoint; if you trust them, pass --trust-remote-code",
        )
    near = architectures.suggestion(model_type, architectures.causal_lm_classes())
    raise BlockedError(
        f"the garden has no slice for model type {model_type!r}, and the installed transformers no causal LM to translate",
        f"refined slices: {', '.join(refined_families())}",
        near or "install a transformers version that has it",
    )


# -- the cache -------------------------------------------------------------------------------------------------------------------------------------------


def slices_dir() -> Path:
    """`slices` in the scratch folder, created. Raises InputError when another user could write it: what lies there is run."""
    folder = scratch_dir() / "slices"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InputError(
            "the cache of slices can be written by other users, and what lies there would be run",
            folder,
            "remove it, or set LABKIT_SCRATCH to a folder of your own",
        )
    return folder


@contextlib.contextmanager
def _lock(model_type: str) -> Iterator[None]:
    with FileLock(slices_dir() / f".{model_type}.lock"):
        yield


def translator_version() -> str:
    """The translator's version, and a digest of its code: a change to it makes slices anew."""
    from labkit.port.translate import TRANSLATOR_VERSION

    return f"{TRANSLATOR_VERSION}+{_code_digest()}"


@functools.cache
def _code_digest() -> str:
    here, hf = Path(__file__).parent, Path(labkit.__file__).parent / "hf"
    used = ("source_record.py", "instrument*.py", "observer.py", "cached_decoding.py", "variant*.py", "renames.py", "tiny*.py")
    files = [*here.rglob("*.py"), *here.rglob("*.j2"), *(f for pattern in used for f in hf.glob(pattern))]
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.parent != here or file.name not in ("slices.py", "proof.py", "show.py"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def transformers_version() -> str:
    """The installed version, without importing it."""
    from importlib.metadata import version

    return version("transformers")


def find_cached(model_type: str, source) -> Path | None:
    """The folder of a cached slice that this translator wrote from files that have not changed since, whole and as it was written."""
    for entry in sorted(slices_dir().glob(f"{model_type}-*")):
        folder = entry / model_type
        provenance = read_provenance(folder)
        current = provenance and (provenance["translator"], provenance["transformers"]) == (translator_version(), transformers_version())
        if current and provenance["sources"] == _hashes(provenance["sources"], source) and folder_source(folder) == "translated":
            return folder
    return None


def _hashes(files, source) -> dict[str, str]:
    """file -> sha256 now; files are relative to the package, or to the model's directory for source that came with it."""
    roots = [architectures.transformers_folder(), *([] if isinstance(source, str) else [source.path])]
    return {name: next((_sha(root / name) for root in roots if (root / name).is_file()), "") for name in files}


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_cached(translation) -> Path:
    """Write a translation into the cache, whole or not at all, and remove slices of the type that are a week old. Returns its folder."""
    root = slices_dir()
    for old in root.glob(f"{translation.family}-*"):
        if (old / translation.family).is_dir() and time.time() - old.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    key = hashlib.sha256(f"{translation.fingerprint} {translator_version()} {transformers_version()}".encode()).hexdigest()[:16]
    entry = root / f"{translation.family}-{key}"
    temporary = Path(tempfile.mkdtemp(prefix=f".{translation.family}.", dir=root))
    try:
        write_slice(translation, temporary / translation.family)
        shutil.rmtree(entry, ignore_errors=True)
        os.replace(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entry / translation.family


def write_slice(translation, folder: Path) -> None:
    """The files of a translation and their provenance into a new folder."""
    folder.mkdir(parents=True)
    for name, text in translation.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / PROVENANCE).write_text(json.dumps(provenance_of(translation), indent=1) + "\n", encoding="utf-8")


def provenance_of(translation) -> dict:
    """What a slice was made from and by."""
    return {
        "schema": SCHEMA,
        "family": translation.family,
        "fingerprint": translation.fingerprint,
        "sources": dict(translation.sources),
        "transformers": translation.transformers_version,
        "translator": translator_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in translation.files.items()},
        "unusual": list(translation.unusual),
        "refusals": [asdict(refusal) for refusal in translation.refusals],
        "unproven": [list(entry) for entry in translation.unproven],
    }


def read_provenance(folder: Path) -> dict:
    """`provenance.json` of a slice's folder, {} when it has none that can be read."""
    try:
        return json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _translate(source, progress: Progress | None):
    """A `Translation`. What fails inside the translator is a wall for this model, and says where it was."""
    try:
        from labkit.port.translate import translate

        return translate(source, progress=progress)
    except LabError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        name = source if isinstance(source, str) else source.config.model_type
        raise BlockedError(
            f"the translator failed on {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            f"{Path(last.filename).name}:{last.lineno} in {last.name}",
            "this is a fault of the translator; write the slice by hand, or report the model type",
        ) from error
