"""Conversion to Orbax and back against a copy of the same bytes with fsync in the same disk folder, and its peak anonymous memory.

`python tests/benchmarks/conversion.py [FOLDER]` prints the table. FOLDER must be on a disk, not in memory. Each side runs `ROUNDS` times, in turn; medians are
compared. Memory is counted above what the process holds before its first conversion, so it takes a process that has done nothing else.
"""

import gc
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROUNDS = 5
RATIO_LIMIT = 8.0
MEMORY_LIMIT = 2.0
COPY_BLOCK = 16 << 20
COPY = "copy with fsync"


class PeakAnonymous:
    """Peak anonymous memory of this process while the block runs, by sampling every 2 ms (Linux)."""

    def __enter__(self):
        self.peak, self._stop = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self):
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def copy_with_fsync(source: Path, out: Path) -> None:
    """The baseline: the checkpoint's files through a buffer, each brought to the disk."""
    out.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as reader, open(out / path.name, "wb") as writer:
            while block := reader.read(COPY_BLOCK):
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())
    descriptor = os.open(out, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def on_disk(folder: Path) -> bool:
    """False for tmpfs and its like."""
    device = os.stat(folder).st_dev
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kinds = [line[line.index("-") + 1] for line in lines if line[2] == f"{os.major(device)}:{os.minor(device)}"]
    return not any(kind in ("tmpfs", "ramfs") for kind in kinds)


def measure(folder: Path, rounds: int = ROUNDS, config=None) -> list[dict]:
    """One row per direction and layout: what, seconds, ratio to the copy, peak anonymous memory over the base, limit on it."""
    from qwen3_shapes import CONFIG, write_checkpoint

    from labkit.converters import compare_safetensors, convert, export
    from labkit.hf import open_source

    assert on_disk(folder), f"{folder} is in memory"
    source = open_source(write_checkpoint(folder / "hf", config or CONFIG))
    largest = largest_parameter(source.tensors)
    seconds, peaks = {}, {}
    base = anonymous_bytes()

    def timed(name, call):
        gc.collect()
        start = time.perf_counter()
        with PeakAnonymous() as memory:
            call()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        peaks[name] = max(peaks.get(name, 0), memory.peak - base)

    for _ in range(rounds):
        timed(COPY, lambda: copy_with_fsync(source.path, folder / "copy"))
        shutil.rmtree(folder / "copy")
        for scan, layout in ((True, "scanned"), (False, "unscanned")):
            timed(f"to Orbax, {layout}", lambda: convert(source, folder / "ckpt", scan=scan))
            timed(f"back, {layout}", lambda: export(folder / "ckpt", folder / "back"))
            assert compare_safetensors(source.path, folder / "back") == []
            shutil.rmtree(folder / "ckpt")
            shutil.rmtree(folder / "back")
    copy = statistics.median(seconds[COPY])
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [{"what": n, "seconds": t, "ratio": t / copy, "peak_bytes": peaks[n], "peak_limit_bytes": MEMORY_LIMIT * largest} for n, t in medians.items()]


def largest_parameter(tensors) -> int:
    """Bytes of the largest parameter of the scanned layout: a tensor, or one kind of tensor over all layers."""
    sizes = Counter()
    for name, info in tensors.items():
        sizes[re.sub(r"\.\d+\.", ".*.", name)] += info.nbytes
    return max(sizes.values())


def table(rows: list[dict]) -> str:
    lines = [f"{'what':<22}{'seconds':>9}{'x copy':>8}{'limit':>7}{'peak MB':>9}{'limit MB':>9}"]
    for r in rows:
        limits = (
            f"{RATIO_LIMIT:>7.1f}{r['peak_bytes'] / 1e6:>9.0f}{r['peak_limit_bytes'] / 1e6:>9.0f}"
            if r["what"] != COPY
            else f"{'':>7}{r['peak_bytes'] / 1e6:>9.0f}"
        )
        lines.append(f"{r['what']:<22}{r['seconds']:>9.2f}{r['ratio']:>8.2f}{limits}{'' if holds(r) else '  FAILS'}")
    return "\n".join(lines)


def holds(row: dict) -> bool:
    return row["what"] == COPY or (row["ratio"] <= RATIO_LIMIT and row["peak_bytes"] <= row["peak_limit_bytes"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else os.path.expanduser("~")) as folder:
        found = measure(Path(folder))
    print(table(found))
    sys.exit(0 if all(holds(row) for row in found) else 1)
