"""An instrumented source computes what the original computes and reports what its expressions held."""

import ast

import pytest

from labkit.hf.instrument import instrument
from labkit.hf.observer import Observer

SOURCE = '''
import functools

def twice(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs) + function(*args, **kwargs)
    return run

class Base:
    offset: int = 3
    def __init__(self, value=1 + 1):
        self.value = value

class Child(Base):
    names = [name for name in ("a", "b")]
    def __init__(self, *values, scale: float = 2.0, **more):
        """Keeps its docstring."""
        super().__init__(len(values))
        self.first, *self.rest = values
        self.__hidden = scale

    @property
    def hidden(self):
        return self.__hidden

    @twice
    def total(self, step):
        count = 0
        for index, value in enumerate(self.rest):
            if not value or (value > 2 and index):
                count += value
            elif (half := value // 2) is not None:
                count += half
        return count * step

    def match(self, what):
        match what:
            case {"kind": "x", "value": value} if value > 1:
                return value
            case [1, *others]:
                return sum(others)
            case _:
                return None

def run():
    child = Child(5, 4, 3, 0, 7)
    table = {key: [child.rest[1:], child.rest[::2]] for key in child.names if key != "b"}
    text = f"{child.total(2)} {child.hidden!r:>4}"
    picked = max(*child.rest, *[1], key=lambda item: -item)
    table["z"], left = (child.match({"kind": "x", "value": 6}), child.match([1, 2, 3])), child.match(0)
    list(value for value in child.rest)
    assert left is None, "left"
    while picked < 3 and (picked := picked + 1):
        pass
    return table, text, picked, left, Child.__init__.__doc__, 1 if child.rest else 2
'''


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("source") / "made.py")
    observer = Observer()
    observer.files[path] = "made.py"
    plain: dict = {"__name__": "made"}
    exec(compile(SOURCE, path, "exec"), plain)
    tree = instrument(ast.parse(SOURCE), lambda what, key: observer.allocate("made.py", what, key))
    copy = {"__name__": "made", **observer.names()}
    exec(compile(tree, path, "exec"), copy)
    return plain["run"](), copy["run"](), observer.tables()


def find(table: dict, text: str, number: int = 0):
    """What the record holds for the `number`-th occurrence of a text of one line."""
    lines = SOURCE.split("\n")
    places = [(row, column) for row, line in enumerate(lines, 1) for column in range(len(line)) if line.startswith(text, column)]
    row, column = places[number]
    return table["made.py"].get(f"{row}:{column}:{row}:{column + len(text)}")


def test_the_copy_computes_the_same(both):
    plain, copy, _ = both
    assert copy == plain
    assert plain[0]["a"] == [[3, 0, 7], [4, 0]] and plain[4] == "Keeps its docstring."


def test_kinds(both):
    tables = both[2]
    nodes = tables["nodes"]
    assert find(nodes, "len(values)") == ["int"]
    assert find(nodes, "*values") is None  # a starred is no value, and the parameter's own position is its name's
    assert find(nodes, "values") == ["tuple"]
    assert find(nodes, "child.rest[1:]") == ["list"]
    assert find(nodes, "index") == ["int"]
    assert find(nodes, "half := value // 2") == ["int"]
    assert find(nodes, "1 + 1") is None  # defaults are left alone
    assert find(nodes, "child.total(2)") is None  # inside an f-string


def test_tests_functions_callees_and_constants(both):
    tables = both[2]
    assert find(tables["tests"], "value > 2") == [True]
    assert find(tables["tests"], "not value or (value > 2 and index)") == [False, True]
    assert find(tables["tests"], "(value > 2 and index)"[1:-1]) == [False, True]
    assert find(tables["tests"], "left is None") == [True]
    assert find(tables["tests"], "child.rest", 4) == [True]
    assert find(tables["callees"], "child.match([1, 2, 3])") == ["made.py::Child.match"]
    assert find(tables["callees"], "len(values)") == ["external::builtins.len"]
    assert tables["functions"]["made.py"]["Child.total"] == 2
    assert tables["functions"]["made.py"]["twice.<locals>.run"] == 1
    assert tables["functions"]["made.py"]["Child.match"] == 3
    assert find(tables["constants"], "len(values)") == 5
    assert find(tables["nodes"], "child.match(0)") == ["none"] and None in tables["constants"]["made.py"].values()
    assert find(tables["constants"], "count * step") == 24
    assert find(tables["constants"], "value > 2") is True and find(tables["constants"], "enumerate(self.rest)") is None
