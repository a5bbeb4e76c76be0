"""One-token changes to translated slices, drawn by seed: an operand, an axis, a constant, a name. Each must be rejected by the exact verdict.

`python tests/port/mutations.py` prints the table: family, line, change, relative error. A change that moves nothing is listed with the reason that
`without_effect` finds: the changed line did not run, or its value is the same.
"""

import ast
import dataclasses
import os
import random
import sys
import tempfile
from pathlib import Path

FAMILIES = ("seed_oss", "mixtral", "bamba", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss", "falcon_mamba", "cohere2", "bloom")
PER_FAMILY = 3
SEED = 7
LIMIT = 1e-9

SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """line: in the emitted file. kind: operand, axis, constant or name. text: before -> after."""

    line: int
    kind: str
    text: str
    source: str


def candidates(text: str) -> list[Mutation]:
    """Every one-token change of the methods that compute (constructors aside)."""
    found = []
    tree = ast.parse(text)
    for cls in [n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]:
        methods = [cls] if isinstance(cls, ast.FunctionDef) else [m for m in cls.body if isinstance(m, ast.FunctionDef)]
        for method in methods:
            if method.name in ("__init__", "for_mesh", "plan", "init_cache", "make_layer") or method.name.startswith("create_"):
                continue
            found += [m for node in ast.walk(method) if (m := _changed(text, node, method)) is not None]
    return found


def _changed(text: str, node: ast.AST, method: ast.FunctionDef) -> Mutation | None:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not isinstance(node.left, ast.Constant):
        new = ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
        return _replace(text, node, ast.unparse(new), "operand")
    if isinstance(node, ast.keyword) and node.arg == "axis" and isinstance(node.value, (ast.Constant, ast.UnaryOp)):
        value = ast.literal_eval(node.value)
        return _replace(text, node.value, "-2" if value == -1 else "-1", "axis") if isinstance(value, int) else None
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (0.0,):
        return _replace(text, node, repr(node.value * 1.01), "constant")
    if isinstance(node, ast.Call) and len(node.args) >= 2 and all(isinstance(a, ast.Name) for a in node.args[:2]) and node.args[0].id != node.args[1].id:
        if ast.unparse(node.func).split(".")[-1] in ("isinstance", "getattr"):
            return None
        return _replace(text, node.args[0], node.args[1].id, "name")
    return None


def _replace(text: str, node: ast.AST, new: str, kind: str) -> Mutation:
    lines = text.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    old = text[begin:end]
    return Mutation(node.lineno, kind, f"{' '.join(old.split())} -> {new}", text[:begin] + new + text[end:])


def chosen(text: str, count: int, seed: int) -> list[Mutation]:
    """`count` changes, kinds in turn."""
    by_kind: dict[str, list[Mutation]] = {}
    for mutation in candidates(text):
        by_kind.setdefault(mutation.kind, []).append(mutation)
    rng, out = random.Random(seed), []
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    for kinds_left in range(count):
        out.append(rng.choice(by_kind[kinds[kinds_left % len(kinds)]]))
    return out


def run(families=FAMILIES, per_family: int = PER_FAMILY, seed: int = SEED) -> list[dict]:
    """One row per change: family, line, kind, text, error (a number, or the exception's name), rejected."""
    from labkit.port.proof import prepare

    os.environ["LABKIT_PREFER"] = "translated"
    prepare()
    import jax

    jax.config.update("jax_enable_x64", True)
    from labkit.models.registry import register_folder
    from labkit.parity.proof import _Subject
    from labkit.port.slices import ensure_slice

    table = []
    for number, family in enumerate(families):
        info = ensure_slice(family)
        info.require()
        subject = _Subject()
        subject.build([f"tiny:{family}"])
        subject.load()
        right = subject.prefill()
        assert right <= LIMIT, f"{family}: {right}"
        file = next(info.folder.glob("modeling_*.py"))
        text = file.read_text()
        for mutation in chosen(text, per_family, seed + number):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / info.folder.name
                folder.mkdir()
                for other in info.folder.glob("*.py"):
                    (folder / other.name).write_text(mutation.source if other.name == file.name else other.read_text())
                register_folder(folder)
                try:
                    subject.load()
                    error = max(subject.prefill(), subject.decode())
                    rejected = not error <= LIMIT
                except Exception as problem:  # noqa: BLE001 - a change that does not even run is rejected too
                    error, rejected = type(problem).__name__, True
            table.append({"family": family, "line": mutation.line, "kind": mutation.kind, "text": mutation.text[:70], "error": error, "rejected": rejected})
        register_folder(info.folder)
        jax.clear_caches()
    return table


def main(arguments=None) -> int:
    table = run(tuple(arguments) if arguments else FAMILIES)
    for row in table:
        error = row["error"] if isinstance(row["error"], str) else f"{row['error']:.1e}"
        print(f"{row['family']:14} {row['line']:4} {row['kind']:9} {row['text']:72} {error:18} {'rejected' if row['rejected'] else 'NO EFFECT'}", flush=True)
    print(f"{sum(r['rejected'] for r in table)} of {len(table)} rejected")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
