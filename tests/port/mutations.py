"""One-token changes to translated slices, drawn by seed: an operand, an axis, a constant, a name. The exact verdict must reject each, or it has no effect.

`python tests/port/mutations.py` prints the table: family, line, change, relative error. A change that the verdict's two rows of tokens do not see is judged
again with five rows (a size may happen to be 2), and then shown to be without effect by probes that run with the slice (`mutation_evidence.py`).
"""

import ast
import dataclasses
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script

from tests.port.mutation_evidence import why_no_effect

FAMILIES = ("seed_oss", "mixtral", "bamba", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss", "falcon_mamba", "cohere2", "bloom")
PER_FAMILY = 3
SEED = 7
LIMIT = 1e-9
OTHER_ROWS = 5

SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """line: in the emitted file. kind: operand, axis, constant or name. text: before -> after. source: the changed file; begin, end: the place in
    the old one."""

    line: int
    kind: str
    text: str
    source: str
    begin: int
    end: int


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
    return Mutation(node.lineno, kind, f"{' '.join(old.split())} -> {new}", text[:begin] + new + text[end:], begin, end)


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


class Judge:
    """A family on a tiny checkpoint, and what the exact verdict says of any text of its modeling file."""

    def __init__(self, family: str, rows: int = 2):
        from labkit.parity.proof import _Subject
        from labkit.port.slices import ensure_slice

        info = ensure_slice(family)
        info.require()
        self.folder, self.file = info.folder, next(info.folder.glob("modeling_*.py"))
        self.text = self.file.read_text()
        self.subject = _Subject()
        self.subject.build([f"tiny:{family}"], rows)

    def errors(self, source: str) -> float:
        """The largest relative error of prefill and cached decoding. Raises what the changed slice raises."""
        from labkit.models.registry import register_folder

        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / self.folder.name
            folder.mkdir()
            for other in self.folder.glob("*.py"):
                (folder / other.name).write_text(source if other.name == self.file.name else other.read_text())
            register_folder(folder)
            try:
                self.subject.load()
                return max(self.subject.prefill(), self.subject.decode()[0])
            finally:
                register_folder(self.folder)

    def judge(self, source: str) -> tuple[float | str, bool]:
        """(error, or the exception's name; rejected)."""
        try:
            error = self.errors(source)
            return error, not error <= LIMIT
        except Exception as problem:
            return type(problem).__name__, True


def judged(judge: Judge, other: Judge, mutation: Mutation) -> dict:
    """One row: kind, text, line, error, rejected; for one that is not, evidence (a sentence, or None)."""
    error, rejected = judge.judge(mutation.source)
    row = {"line": mutation.line, "kind": mutation.kind, "text": mutation.text[:70], "error": error, "rejected": rejected, "evidence": None}
    if not rejected:
        error, row["rejected"] = other.judge(mutation.source)
        if row["rejected"]:
            return row | {"error": error, "evidence": f"seen with {OTHER_ROWS} rows of tokens: with 2, two sizes are equal by chance"}
        row["evidence"] = why_no_effect(judge.text, mutation.source, mutation.begin, mutation.end, judge.errors)
    return row


def run(families=FAMILIES, per_family: int = PER_FAMILY, seed: int = SEED, say=lambda row: None) -> list[dict]:
    """The rows of `judged` with their family. A family's draws are the same alone as among all. say is told each as it is found."""
    from labkit.port.proof import prepare

    os.environ["LABKIT_PREFER"] = "translated"
    prepare()
    import jax

    jax.config.update("jax_enable_x64", True)
    table = []
    for family in families:
        judge, other = Judge(family), Judge(family, OTHER_ROWS)
        right = judge.errors(judge.text)
        assert right <= LIMIT, f"{family}: {right}"
        for mutation in chosen(judge.text, per_family, seed + (FAMILIES.index(family) if family in FAMILIES else 0)):
            table.append({"family": family, **judged(judge, other, mutation)})
            say(table[-1])
        jax.clear_caches()
    return table


def show(row: dict) -> None:
    error = row["error"] if isinstance(row["error"], str) else f"{row['error']:.1e}"
    verdict = "rejected" if row["rejected"] else "no effect" if row["evidence"] else "NOT SEEN"
    print(f"{row['family']:14} {row['line']:4} {row['kind']:9} {row['text']:72} {error:18} {verdict}", flush=True)
    if row["evidence"]:
        print(f"{'':19} {row['evidence']}", flush=True)


def main(arguments=None) -> int:
    """0 when every change is rejected or shown to be without effect. arguments: families, all ten by default."""
    table = run(tuple(arguments) if arguments else FAMILIES, say=show)
    rejected, shown = (sum(map(test, table)) for test in (lambda r: r["rejected"], lambda r: not r["rejected"] and bool(r["evidence"])))
    print(f"{rejected + shown} of {len(table)}: rejected ({rejected}) or shown to be without effect ({shown})")
    return 0 if rejected + shown == len(table) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
