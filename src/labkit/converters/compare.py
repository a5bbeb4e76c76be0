"""Two safetensors directories, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Collection

from labkit.converters.arrays import difference, same_bits
from labkit.hf.tensors import TensorTable, read_table


def compare_safetensors(a: str | os.PathLike | TensorTable, b: str | os.PathLike | TensorTable, *, ignore: Collection[str] = ()) -> list[str]:
    """One sentence per tensor that differs in dtype, shape or any bit, or that one side lacks; `ignore` names tensors that are left out of it.

    Raises InputError when either directory's index and headers disagree.
    """
    left, right = (side if isinstance(side, TensorTable) else read_table(side) for side in (a, b))
    found = [f"{name} is only in the {'first' if name in left else 'second'}" for name in sorted(set(left) ^ set(right)) if name not in ignore]
    for name in left:
        if name in right and name not in ignore and not same_bits(left.read(name), right.read(name)):
            found.append(f"{name}: {difference(left.read(name), right.read(name))}")
    return found
