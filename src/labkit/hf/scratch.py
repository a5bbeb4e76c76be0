"""Where checkpoints and subsets go, and whether they fit."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from labkit.errors import InputError

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 4 << 30
OWN = "labkit"
"""The name of a scratch folder that holds nothing but the lab's files."""


def user_name() -> str:
    """The user's name from the environment, or the numeric id where a container sets none."""
    return os.environ.get("USER") or str(os.getuid())


def scratch_dir(override: str | os.PathLike | None = None) -> Path:
    """The scratch folder, created: `override`, $LABKIT_SCRATCH, /dev/shm/$USER/labkit when it has 4 GiB free, or ~/.cache/labkit.

    Raises InputError when the folder cannot be created or written.
    """
    chosen = override or os.environ.get("LABKIT_SCRATCH")
    if chosen:
        path = Path(chosen).expanduser()
    elif _shared_memory_serves():
        path = SHARED_MEMORY / user_name() / OWN
    else:
        path = Path("~/.cache/labkit").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The scratch folder cannot be created: {error.strerror}", path, "Set LABKIT_SCRATCH to a folder that you can write") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError("The scratch folder is read-only", path, "Set LABKIT_SCRATCH to a folder that you can write")
    return path.resolve()


def _shared_memory_serves() -> bool:
    """A folder that exists is kept in use (its caches count as used space); a new one needs room."""
    own = SHARED_MEMORY / user_name() / "labkit"
    if not SHARED_MEMORY.is_dir() or not os.access(own if own.is_dir() else SHARED_MEMORY, os.W_OK):
        return False
    return own.is_dir() or shutil.disk_usage(SHARED_MEMORY).free >= ENOUGH_SHARED_MEMORY


def held(scratch: Path) -> dict[str, int]:
    """Folder of the scratch folder -> bytes of its files, largest first."""
    sizes = {
        folder.name: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink()) for folder in scratch.iterdir() if folder.is_dir()
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def clear(scratch: Path, *, untouched: float) -> int:
    """Remove what lies two levels down (a checkpoint, a run) and was not written to for `untouched` seconds. Returns the bytes freed.

    The lab makes all of it again when it is asked for; what a run is writing now is younger than that. Slices stay: someone may have edited one.
    Raises InputError for a folder that is not the lab's own by its name: one that $LABKIT_SCRATCH names may hold other people's files.
    """
    if scratch.name != OWN:
        raise InputError(
            "This scratch folder was chosen by LABKIT_SCRATCH and may hold files that are not the lab's", scratch, "Remove by hand what you no longer need"
        )
    freed, before = 0, time.time() - untouched
    for item in (item for folder in scratch.iterdir() if folder.is_dir() and folder.name != "slices" for item in folder.iterdir()):
        files = [item, *item.rglob("*")] if item.is_dir() else [item]
        if max(f.lstat().st_mtime for f in files) < before:
            freed += sum(f.lstat().st_size for f in files if f.is_file())
            shutil.rmtree(item, ignore_errors=True) if item.is_dir() else item.unlink(missing_ok=True)
    return freed


def ensure_free(path: str | os.PathLike, nbytes: int) -> None:
    """Raises InputError naming both numbers when the file system that holds `path` (or its nearest existing parent) has less than `nbytes` free."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise InputError(
            f"Not enough space: {nbytes:,} bytes are needed and {free:,} are free", place, "Free some space, or set LABKIT_SCRATCH to a larger disk"
        )


@contextlib.contextmanager
def atomic_directory(out: str | os.PathLike) -> Iterator[Path]:
    """A new folder beside `out` that takes its name when the block ends well and disappears when it does not.

    Raises InputError when `out` exists and holds anything, or when its parent cannot be written.
    """
    out = Path(out).absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError("The output exists already", out, "Choose a new folder, or remove this one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"The output folder cannot be written: {error.strerror}", out, "Choose a folder that you can write") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, out)
    except OSError as error:
        raise InputError(f"Writing failed: {error.strerror or error}", out, "Check the free space and the permissions of this folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
