"""One row times a matrix on CPU, by a kernel that the machine's own C++ compiler makes (`row_product.cc`); where it has none, products stay XLA's.

XLA's product of one row reads float32 weights at two thirds of what this memory gives, and makes a float32 copy of bfloat16 ones at every token. Weights that
came as bfloat16 are read as such here and widened on the way, which is exact: half the bytes, the same function.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

from labkit.errors import LabError
from labkit.hf.scratch import scratch_dir

SOURCE = Path(__file__).with_name("row_product.cc")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
WIDE_VECTORS = "-mprefer-vector-width=512"
TARGETS = {"float32": "RowTimesFloat32", "bfloat16": "RowTimesBfloat16"}
COMPILE_SECONDS = 120


def row_times(x, w):
    """x [in] of float32 times w [out, in] of float32 or bfloat16 -> float32 [out]. The caller has seen `available`."""
    name = f"labkit.{TARGETS[jnp.dtype(w.dtype).name]}"
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(w.shape[:1], jnp.float32))(x, w)


@functools.cache
def available() -> bool:
    """Whether programs on this process's default device can call the kernel. The first call compiles it (seconds), unless the scratch folder has it."""
    if jax.default_backend() != "cpu":
        return False
    try:
        library = ctypes.CDLL(str(_built()))
        for target in TARGETS.values():
            jax.ffi.register_ffi_target(f"labkit.{target}", jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (LabError, OSError, AttributeError, subprocess.SubprocessError):
        return False
    return True


def compiler() -> str | None:
    """The C++ compiler: $CXX, c++, g++ or clang++."""
    return next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (found := shutil.which(name))), None)


def _built() -> Path:
    """The shared library, compiled at most once for a source, a compiler, a jaxlib and a processor. Raises OSError or SubprocessError."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    version = subprocess.run([command, "--version"], capture_output=True, check=True, timeout=COMPILE_SECONDS).stdout
    kind = hashlib.sha256(b"\0".join((SOURCE.read_bytes(), version, metadata.version("jaxlib").encode(), _processor().encode()))).hexdigest()[:16]
    path = scratch_dir() / "native" / f"row_product-{kind}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        try:
            base = [command, *FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", temporary]
            run = functools.partial(subprocess.run, capture_output=True, timeout=COMPILE_SECONDS)
            if run([*base, WIDE_VECTORS]).returncode:
                run(base, check=True)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


def _processor() -> str:
    """What `-march=native` depends on: a scratch folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
