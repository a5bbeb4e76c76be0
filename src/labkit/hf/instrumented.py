"""Modeling files of transformers replaced by instrumented copies while a block runs."""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Iterator

from labkit.hf.architectures import transformers_folder
from labkit.hf.instrument import instrument
from labkit.hf.observer import Observer

_MODELING = re.compile(r"transformers\.models\.(?!auto\.)\w+(\.\w+)*\.modeling_\w+")


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, observer: Observer):
        super().__init__(fullname, path)
        self.observer = observer

    def get_code(self, fullname):
        file = self.path.removeprefix(str(transformers_folder())).lstrip("/\\").replace("\\", "/")
        self.observer.files[self.path] = file
        tree = instrument(ast.parse(self.get_data(self.path)), lambda what, key: self.observer.allocate(file, what, key))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        vars(module).update(self.observer.names())
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, observer: Observer):
        self.observer = observer

    def find_spec(self, fullname, path=None, target=None):
        if not _MODELING.fullmatch(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin, self.observer)
        return spec


@contextlib.contextmanager
def instrumented_models(observer: Observer) -> Iterator[None]:
    """Inside the block every modeling file that is imported reports to `observer`; afterwards the process has its own modules back.

    Models that were built before keep their classes, so a process that holds some should leave this to a fresh one.
    """
    finder = _Finder(observer)
    own = _remove()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _remove()
        for holder, name, value in own:
            if isinstance(holder, dict):
                holder[name] = value
            else:
                setattr(holder, name, value)


def _remove() -> list[tuple]:
    """Forget every modeling module, and what the lazy packages of transformers kept from them. Returns how to undo it."""
    modules = {name: module for name, module in sys.modules.items() if _MODELING.fullmatch(name)}
    undo: list[tuple] = [(sys.modules, name, module) for name, module in modules.items()]
    for name in modules:
        del sys.modules[name]
    for name, package in list(sys.modules.items()):
        if name != "transformers" and not re.fullmatch(r"transformers\.models(\.\w+)*", name):
            continue
        for attribute, value in list(vars(package).items()):
            known = getattr(value, "__name__", None) if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            if isinstance(known, str) and _MODELING.fullmatch(known):
                undo.append((package, attribute, value))
                delattr(package, attribute)
    return undo
