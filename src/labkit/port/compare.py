"""Two source trees, statement by statement: what the family has changed, added and left out."""

import ast
import dataclasses
import difflib
import re

from labkit.port.components import component_of, explain
from labkit.port.normal_form import Statement, config_methods, methods
from labkit.port.source_tree import Definition, SourceTree, short

ALIKE = 0.6  # statements this alike (difflib's ratio) are one statement changed rather than one left out and one added
LONGEST = 200  # characters of a statement as shown
_SOLE = ("attention", "norm", "mlp", "block", "rope", "router", "experts", "model", "head")


@dataclasses.dataclass(frozen=True)
class Delta:
    """One difference. kind: changed, added (the donor lacks it) or removed (the family lacks it). role, method: where it stands.

    line, donor_line: `file:line` ("" where that side has nothing). statement, donor_statement: short source. names: config keys and submodules that the
    family's side brings in.
    """

    component: str
    role: str
    method: str
    kind: str
    line: str
    donor_line: str
    statement: str
    donor_statement: str
    explanation: str
    names: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        if self.role == "config.json":
            return f"config.json: {self.method}"
        return f"{self.role}.{self.method}" if self.method else self.role


def compare(family: SourceTree, donor: SourceTree) -> list[Delta]:
    """Differences of the modeling files, in the family's file order within each component's class; whole classes come as one row."""
    rows: list[Delta] = []
    pairs = _pair_roles(family.definitions, donor.definitions)
    paired = {other for other in pairs.values() if other}
    for role, other in pairs.items():
        if other is None:
            rows += _whole(family, role, "added")
        else:
            mine, theirs = methods(family, family.definitions[role]), methods(donor, donor.definitions[other])
            rows += _compare_methods(family, donor, role, mine, theirs)
    for role in donor.definitions:
        if role not in paired:
            rows += _whole(donor, role, "removed")
    return rows


def compare_config_methods(family: SourceTree, donor: SourceTree) -> list[Delta]:
    """Differences in what the config classes compute."""
    return _compare_methods(family, donor, "Config", config_methods(family), config_methods(donor), component="config")


def _pair_roles(mine: dict[str, Definition], theirs: dict[str, Definition]) -> dict[str, str | None]:
    """By role; then, where each side has one class left of a component, those two."""
    pairs: dict[str, str | None] = {role: role if role in theirs else None for role in mine}
    open_mine = [r for r, other in pairs.items() if other is None and mine[r].is_class]
    open_theirs = [r for r in theirs if r not in mine and theirs[r].is_class]
    for component in _SOLE:
        left, right = ([r for r in side if component_of(r) == component] for side in (open_mine, open_theirs))
        if len(left) == len(right) == 1:
            pairs[left[0]] = right[0]
    return pairs


def _whole(tree: SourceTree, role: str, kind: str) -> list[Delta]:
    definition, found = tree.definitions[role], methods(tree, tree.definitions[role])
    if not found:
        return []
    what = "class" if definition.is_class else "table" if isinstance(definition.node, ast.Assign) else "function"
    head = f"{what} {definition.name}" + (f"({', '.join(definition.bases)})" if definition.bases else "")
    body = [s for statements in found.values() for s in statements]
    text = "\n".join(s.text for s in body)
    place = f"{short(tree.file)}:{definition.begin}-{definition.end}"
    said = explain(component_of(role), text, "") if kind == "added" else ""
    words = f"{'no counterpart in the donor' if kind == 'added' else 'the family has no such part'}, {len(body)} statements" + (f"; {said}" if said else "")
    names = _names_in(body) if kind == "added" else ()
    mine, theirs = (place, "") if kind == "added" else ("", place)
    return [Delta(component_of(role), role, "", kind, mine, theirs, head if mine else "", head if theirs else "", words, names)]


def _compare_methods(family, donor, role, mine, theirs, component=None) -> list[Delta]:
    rows = []
    for method in [*mine, *(m for m in theirs if m not in mine)]:
        a, b = mine.get(method, []), theirs.get(method, [])
        for left, right in match(a, b, ordered=method != "__init__"):
            rows.append(_row(family, donor, role, method, left, right, component))
    return rows


def match(a: list[Statement], b: list[Statement], *, ordered: bool = True) -> list[tuple[list[Statement], list[Statement]]]:
    """Groups of statements that differ: (the family's, the donor's), one of them possibly empty. A compound statement that is new takes its body along.

    ordered=False: only which statements there are counts, as in a constructor.
    """
    if ordered:
        blocks = [(a[i1:i2], b[j1:j2]) for tag, i1, i2, j1, j2 in _opcodes(a, b) if tag != "equal"]
    else:
        blocks = [(_minus(a, b), _minus(b, a))]
    found: list[tuple[list[Statement], list[Statement]]] = []
    for left, right in blocks:
        partner = _partners(left, right)
        used = set(partner.values())
        found += [([left[i]], [right[j]]) for i, j in partner.items()]
        found += [(group, []) for group in _groups([s for i, s in enumerate(left) if i not in partner])]
        found += [([], group) for group in _groups([s for j, s in enumerate(right) if j not in used])]
    return sorted(found, key=lambda pair: (pair[0] or pair[1])[0].line if pair[0] else 10**9)


def _opcodes(a, b):
    return difflib.SequenceMatcher(None, [s.key for s in a], [s.key for s in b], autojunk=False).get_opcodes()


def _minus(a: list[Statement], b: list[Statement]) -> list[Statement]:
    rest = [s.key for s in b]
    found = []
    for statement in a:
        if statement.key in rest:
            rest.remove(statement.key)
        else:
            found.append(statement)
    return found


def _partners(left: list[Statement], right: list[Statement]) -> dict[int, int]:
    """Which of two runs of differing statements are one statement changed: the most alike first, none crossing another."""
    scores = []
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            if type(a.node) is type(b.node):
                scores.append((_alike(a, b), i, j))
    found: dict[int, int] = {}
    for score, i, j in sorted(scores, key=lambda s: (-s[0], s[1], s[2])):
        if score >= ALIKE and i not in found and j not in found.values() and all((i < k) == (j < m) for k, m in found.items()):
            found[i] = j
    return found


def _alike(a: Statement, b: Statement) -> float:
    ratio = difflib.SequenceMatcher(None, a.text, b.text, autojunk=False).ratio()
    same_target = isinstance(a.node, ast.Assign) and a.text.split(" = ")[0] == b.text.split(" = ")[0]
    if same_target and a.text.startswith("self."):
        return max(ratio, ALIKE)
    return min(1.0, ratio + 0.2) if same_target else ratio


def _groups(statements: list[Statement]) -> list[list[Statement]]:
    """New statements one by one, but the body of a new `if` or `for` with it."""
    found: list[list[Statement]] = []
    for statement in statements:
        follows = found and (statement.depth > found[-1][0].depth or (statement.text == "else:" and statement.depth == found[-1][0].depth))
        if follows and found[-1][0].text.endswith(":"):
            found[-1].append(statement)
        else:
            found.append([statement])
    return found


def _row(family, donor, role, method, left, right, component) -> Delta:
    kind = "changed" if left and right else "added" if left else "removed"
    mine, theirs = "\n".join(s.text for s in left), "\n".join(s.text for s in right)
    component = component or component_of(role, mine or theirs)
    line, donor_line = (s[0].line if s else 0 for s in (left, right))
    if kind == "changed":
        line, donor_line = first_difference(left[0].node, right[0].node) or (line, donor_line)
    place = lambda side, number: f"{short(side[0].file)}:{number}" if side else ""
    words = _keywords_explained(component, left, right) or explain(component, mine, theirs)
    names = tuple(n for n in _names_in(left) if n not in _names_in(right)) if left else ()
    return Delta(component, role, method, kind, place(left, line), place(right, donor_line), _shown(family, left), _shown(donor, right), words, names)


def _keywords_explained(component: str, left: list[Statement], right: list[Statement]) -> str:
    """For one call on both sides whose keywords differ: what each of them is."""
    calls = [getattr(side[0].node, "value", None) if len(side) == 1 else None for side in (left, right)]
    if not all(isinstance(call, ast.Call) for call in calls) or ast.unparse(calls[0].func) != ast.unparse(calls[1].func):
        return ""
    mine, theirs = ({k.arg: ast.unparse(k) for k in call.keywords} for call in calls)
    differing = [key for key in [*mine, *(k for k in theirs if k not in mine)] if mine.get(key) != theirs.get(key)]
    said = [explain(component, mine.get(key, ""), theirs.get(key, "")) for key in differing]
    return "; ".join(dict.fromkeys(filter(None, said)))


def first_difference(a: ast.AST, b: ast.AST) -> tuple[int, int] | None:
    """The lines of both sides where two trees first differ; None when they do not."""
    here = (getattr(a, "lineno", 0), getattr(b, "lineno", 0))
    if type(a) is not type(b):
        return here
    for name in a._fields:
        if name in ("ctx", "body", "orelse", "finalbody"):
            continue
        x, y = getattr(a, name, None), getattr(b, name, None)
        x, y = (v if isinstance(v, list) else [v] for v in (x, y))
        texts = [[ast.dump(n) if isinstance(n, ast.AST) else repr(n) for n in side] for side in (x, y)]
        if texts[0] == texts[1]:
            continue
        i = next((i for i, (s, t) in enumerate(zip(*texts)) if s != t), min(len(x), len(y)))
        p, q = x[i] if i < len(x) else None, y[i] if i < len(y) else None
        if isinstance(p, ast.AST) and isinstance(q, ast.AST):
            inner = first_difference(p, q)
            return (inner[0] or here[0], inner[1] or here[1]) if inner else here
        return (getattr(p, "lineno", here[0]), getattr(q, "lineno", here[1]))
    return None


def _shown(tree: SourceTree, statements: list[Statement]) -> str:
    """Source as the file has it, in one line."""
    parts = []
    for s in statements:
        original = tree.originals.get((s.file, s.line, s.column))
        if s.text.startswith(("class (", "argument ")) or s.text in ("else:", "finally:") or original is None:
            parts.append(s.text)
        elif isinstance(original, (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef, ast.Try)):
            parts.append(ast.unparse(original).split("\n", 1)[0])
        else:
            parts.append(re.sub(r"\s+", " ", ast.unparse(_without_annotation(original))))
    text = "; ".join(parts).replace(":; ", ": ")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _without_annotation(node: ast.stmt) -> ast.stmt:
    return ast.Assign([node.target], node.value, lineno=node.lineno) if isinstance(node, ast.AnnAssign) and node.value is not None else node


def _names_in(statements: list[Statement]) -> tuple[str, ...]:
    """`config.<key>` for every key that is read, `self.<module>` for every submodule or parameter that is made."""
    found: list[str] = []
    for s in statements:
        parts = [s.node] if not hasattr(s.node, "body") else [getattr(s.node, "test", None) or getattr(s.node, "iter", None)]
        for part in (n for p in parts if p is not None for n in ast.walk(p)):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "config":
                found.append(f"config.{part.attr}")
        if isinstance(s.node, ast.Assign) and isinstance(s.node.value, ast.Call) and ast.unparse(s.node.targets[0]).startswith("self."):
            made = ast.unparse(s.node.value.func).rsplit(".", 1)[-1]
            if re.search(r"Linear|Embedding$|Parameter|Norm|MLP|Attention|Experts|Router|Block|Conv1d", made) and "Rotary" not in made:
                found.append(ast.unparse(s.node.targets[0]))
    return tuple(dict.fromkeys(found))
