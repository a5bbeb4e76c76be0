"""What an instrumented modeling file reports to: kinds of values, truth of tests, what was called, and what was constant."""

import functools
import inspect
import types
from collections import defaultdict

from labkit.hf.instrument import CALLEE, ENTER, REPORT, TEST

_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "none", list: "list", tuple: "tuple", dict: "dict"}
_CONSTANT = (int, bool, str, type(None))
_VARIES, _UNSEEN = object(), object()


class Kinds:
    """kinds(value) -> one of the kind strings listed in `SourceRecord`. Made once per process: it needs torch and transformers."""

    def __init__(self):
        import torch
        from transformers import PreTrainedConfig
        from transformers.cache_utils import Cache
        from transformers.utils import ModelOutput

        self.output = ModelOutput
        self.tensor, self.buffer_class, self.parameter = torch.Tensor, torch.nn.Buffer, torch.nn.Parameter
        self.module = torch.nn.Module
        self.quiet = torch._C.DisableTorchFunction
        self.bases = ((torch.nn.ModuleList, "modulelist"), (torch.Size, "size"), (PreTrainedConfig, "config"), (Cache, "cache"), (torch.dtype, "dtype"))
        self.bases += ((torch.device, "device"), (dict, "dict"), (list, "list"), (tuple, "tuple"), (str, "str"), (bool, "bool"), (int, "int"), (float, "float"))
        self.by_type = dict(_PLAIN)
        self.buffers: set[int] = set()

    def __call__(self, value) -> str:
        kind = self.by_type.get(type(value))
        if kind is None:
            kind = self._find(value)
        return kind

    def _find(self, value) -> str:
        kind = type(value)
        if isinstance(value, self.tensor):
            # Exact mode would send these lookups through Python.
            with self.quiet():
                letter = _letter(value)
                what = "param" if isinstance(value, self.parameter) else "buffer" if id(value) in self.buffers else "array"
                if what == "array" and getattr(value, "_is_buffer", False):
                    what = "buffer"
                return f"{what}:{letter}:{value.dim()}"
        if isinstance(value, type):
            return f"class:{value.__name__}"
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial)):
            value = value.func if isinstance(value, functools.partial) else value
            return f"function:{getattr(value, '__qualname__', type(value).__name__)}"
        other = f"module:{kind.__name__}" if isinstance(value, self.module) else f"other:{kind.__name__}"
        name = other if isinstance(value, self.output) else next((name for base, name in self.bases if isinstance(value, base)), other)
        self.by_type[kind] = name
        return name

    def note_buffers(self, model):
        """Know the buffers of a model, which are plain tensors by themselves."""
        self.buffers = {id(buffer) for buffer in model.buffers()}


def _letter(value) -> str:
    dtype = value.dtype
    return "f" if dtype.is_floating_point else "c" if dtype.is_complex else "b" if str(dtype) == "torch.bool" else "i"


class Observer:
    """Collects the reports of all instrumented files. `allocate` hands out the numbers that the files report to, `names` the functions they call."""

    def __init__(self):
        self.kinds = Kinds()
        self.nodes: list[set] = []
        self.constants: list = []
        self.tests: list[set] = []
        self.callees: list[set] = []
        self.functions: list[int] = []
        self.parameters: list[list[int]] = []
        self.places: dict[str, list[tuple[str, str]]] = {what: [] for what in ("node", "test", "callee", "function")}
        self.files: dict[str, str] = {}  # path of the source -> its name in the record
        self._resolved: dict = {}

    def allocate(self, file: str, what: str, key: str) -> int:
        if what == "function":
            key, *positions = key.split(" ")
            self.parameters.append([self.allocate(file, "node", position) for position in positions])
            self.functions.append(0)
        elif what == "node":
            self.nodes.append(set())
            self.constants.append(_UNSEEN)
        else:
            (self.tests if what == "test" else self.callees).append(set())
        self.places[what].append((file, key))
        return len(self.places[what]) - 1

    def names(self) -> dict:
        return {REPORT: self.value, TEST: self.test, CALLEE: self.callee, ENTER: self.enter}

    def forget(self):
        """Drop what was observed so far; the files keep reporting."""
        for seen in (self.nodes, self.tests, self.callees):
            seen[:] = [set() for _ in seen]
        self.constants[:] = [_UNSEEN] * len(self.constants)
        self.functions[:] = [0] * len(self.functions)

    def value(self, number: int, value):
        self.nodes[number].add(self.kinds(value))
        known = self.constants[number]
        if known is not _VARIES:
            if type(value) not in _CONSTANT:
                self.constants[number] = _VARIES
            elif known is _UNSEEN:
                self.constants[number] = value
            elif type(known) is not type(value) or known != value:
                self.constants[number] = _VARIES
        return value

    def test(self, number: int, value):
        try:
            self.tests[number].add(bool(value))
        except (RuntimeError, ValueError, TypeError):  # the last operand of `a or b` may be a value without a truth
            pass
        return value

    def enter(self, number: int, *values):
        self.functions[number] += 1
        for place, value in zip(self.parameters[number], values):
            self.value(place, value)

    def callee(self, number: int, function):
        self.callees[number].add(self.resolve(function))
        return function

    def resolve(self, function) -> str:
        """ "file::qualname" of what a call runs, "external::module.qualname" when no instrumented file defines it; a class is itself."""
        if isinstance(function, types.MethodType):
            owner = function.__self__
            if isinstance(owner, type) and function.__func__.__qualname__ == "Function.apply" and hasattr(owner, "forward"):
                function = owner.forward  # an autograd function runs its forward
            else:
                function = function.__func__
        if isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return f"external::{getattr(function, '__module__', None) or 'builtins'}.{function.__qualname__}"
        if isinstance(function, self.kinds.module):
            function = function.__dict__.get("forward", type(function))
            key = ("forward", function)
        else:
            key = function
        try:
            found = self._resolved.get(key)
        except TypeError:
            return self._describe(key)
        if found is None:
            found = self._resolved[key] = self._describe(key)
        return found

    def _describe(self, function) -> str:
        if isinstance(function, tuple):
            function = function[1]
            function = function.forward if isinstance(function, type) else function
        elif isinstance(function, type):
            return self.class_name(function)
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename in self.files:
            return f"{self.files[code.co_filename]}::{code.co_qualname}"
        if not hasattr(function, "__qualname__"):
            kind = type(function)
            return f"external::{kind.__module__}.{kind.__qualname__}.__call__"
        return f"external::{getattr(function, '__module__', None) or 'builtins'}.{function.__qualname__}"

    def class_name(self, cls: type) -> str:
        """ "file::Class" or "external::module.Class"."""
        file = cls.__module__.removeprefix("transformers.").replace(".", "/") + ".py"
        return f"{file}::{cls.__qualname__}" if file in self.files.values() else f"external::{cls.__module__}.{cls.__qualname__}"

    def tables(self) -> dict[str, dict]:
        """nodes, tests, callees, functions and constants of every file whose functions ran, as `SourceRecord` holds them."""
        functions = defaultdict(dict)
        for (file, qualname), count in zip(self.places["function"], self.functions):
            functions[file][qualname] = functions[file].get(qualname, 0) + count
        functions = {file: counts for file, counts in functions.items() if any(counts.values())}
        tables: dict[str, dict] = {"functions": functions}
        for name, what, seen in (("nodes", "node", self.nodes), ("tests", "test", self.tests), ("callees", "callee", self.callees)):
            table: dict = {file: defaultdict(set) for file in functions}
            for (file, key), values in zip(self.places[what], seen):
                if values and file in table:
                    table[file][key] |= values
            tables[name] = {file: {key: sorted(values) for key, values in keys.items()} for file, keys in table.items()}
        constants: dict = {file: {} for file in functions}
        for (file, key), constant in zip(self.places["node"], self.constants):
            if file in constants and constant is not _UNSEEN:
                before = constants[file].setdefault(key, constant)
                if before is not constant and (type(before) is not type(constant) or before != constant):
                    constants[file][key] = _VARIES
        tables["constants"] = {file: {key: value for key, value in keys.items() if value is not _VARIES} for file, keys in constants.items()}
        return tables
