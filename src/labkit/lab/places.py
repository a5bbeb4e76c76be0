"""Where the lab finds notebooks and puts handovers, and the lock that keeps two runs on one model apart."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.errors import BusyError, InputError

PACKAGE = Path(__file__).resolve().parents[1]


def notebooks_dir() -> Path:
    """The phase notebooks: $LABKIT_NOTEBOOKS, the checkout's `notebooks`, or the copy inside an installed package."""
    chosen = os.environ.get("LABKIT_NOTEBOOKS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    for folder in (PACKAGE.parents[1] / "notebooks", PACKAGE / "notebooks"):
        if any(folder.glob("0*.ipynb")):
            return folder
    raise InputError("the phase notebooks are not here", PACKAGE.parents[1] / "notebooks", "install labkit again, or run from a checkout")


def handovers_dir(chosen: str | os.PathLike | None = None) -> Path:
    """`chosen`, $LABKIT_HANDOVERS, the `handovers` folder here or above (a notebook runs one folder down), or `./handovers`."""
    chosen = chosen or os.environ.get("LABKIT_HANDOVERS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    here = Path.cwd()
    return next((folder / "handovers" for folder in (here, *here.parents) if (folder / "handovers").is_dir()), here / "handovers")


class ModelLock:
    """One run per model: a lock file in `handovers/.locks`, freed by the system when its process ends, however it ends."""

    def __init__(self, handovers: Path, slug: str):
        self.path = Path(handovers) / ".locks" / f"{slug}.lock"
        self.slug = slug
        self._lock: FileLock | None = None

    def acquire(self) -> "ModelLock":
        """Raises BusyError naming the process that holds the lock; InputError when the folder cannot be written."""
        owner = self.path.with_suffix(".pid")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path)
            self._lock.acquire(timeout=0)
            owner.write_text(str(os.getpid()))
        except Timeout:
            pid = owner.read_text().strip() if owner.is_file() else "unknown"
            raise BusyError(f"another run on {self.slug} is going on, process {pid}", self.path, "wait for it to end, or end it") from None
        except OSError as error:
            raise InputError(
                f"the handovers folder cannot be written: {error.strerror or error}", self.path.parent, "choose another folder with --handovers"
            ) from None
        return self

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "ModelLock":
        return self.acquire()

    def __exit__(self, *_) -> None:
        self.release()


def find_records(model: str, handovers: str | os.PathLike | None = None) -> Path:
    """The folder of a model's records, by slug or by the name it was run under; the model itself is not opened. InputError when there is none, or several."""
    from labkit.hf import slugify
    from labkit.lab.records import Records, model_claim

    root = handovers_dir(handovers)
    folders = sorted(p.parent for p in root.glob("*/model.json")) if root.is_dir() else []
    names = {model, slugify(model), slugify(Path(model).name)}
    found = [f for f in folders if f.name == model] or [f for f in folders if f.name in names or any(r.model == model for r in Records(f).all())]
    if len(found) > 1:
        path = Path(model).expanduser().resolve()
        claims = {model_claim(f"{origin}:{path if origin in ('directory', 'gguf') else model}") for origin in ("directory", "gguf", "hub", "builtin", "tiny")}
        found = [f for f in found if model_claim(folder=f) in claims] or found
    if len(found) != 1:
        listed = ", ".join(f.name for f in (found or folders)) or "none"
        what = f"there are no records of {model}" if not found else f"{model} names several records"
        raise InputError(what, root, f"records are here for: {listed}" if found or folders else f"run `labkit run {model}` first")
    return found[0]
