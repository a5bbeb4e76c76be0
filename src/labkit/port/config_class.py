"""The config of a translated slice: one field for each attribute that its code reads, with the default and the computed properties of the reference's class."""

import ast
import builtins

from labkit.port.program import SourceFile

_INTERNAL = {"dtype", "param_dtype", "plan"}


class ConfigClass:
    """Reads the reference's configuration class from source: defaults, aliases, properties, inherited from classes of the same or another
    configuration file."""

    def __init__(self, program, path: str, name: str):
        self.program, self.path, self.name = program, path, name
        self.defaults: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.properties: dict[str, tuple[SourceFile, ast.FunctionDef]] = {}
        self._read(path, name)

    def _read(self, path, name):
        source = self.program.file(path)
        node = source.definitions.get(name)
        if not isinstance(node, ast.ClassDef):
            return
        for base in node.bases:
            if isinstance(base, ast.Name):
                if isinstance(source.definitions.get(base.id), ast.ClassDef):
                    self._read(path, base.id)
                elif base.id in source.imports and source.imports[base.id][0].startswith("models/"):
                    self._read(f"{source.imports[base.id][0]}.py", source.imports[base.id][1])
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                if item.target.id == "attribute_map":
                    self.aliases |= _literal(item.value) or {}
                else:
                    self.defaults[item.target.id] = item.value
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                if item.targets[0].id == "attribute_map":
                    self.aliases |= _literal(item.value) or {}
                else:
                    self.defaults[item.targets[0].id] = item.value
            elif isinstance(item, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in item.decorator_list):
                self.properties[item.name] = (source, item)
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                args = item.args
                for arg, default in zip(args.args[len(args.args) - len(args.defaults) :], args.defaults):
                    self.defaults[arg.arg] = default

    def lines(self, name: str, attributes: dict[str, object], recorded: list[dict]) -> list[str]:
        """The body of the emitted class: fields and properties. attributes: name -> the default that `getattr` gave (an expression), or None."""
        fields, properties, wanted, done = {}, [], list(attributes), set()
        while wanted:
            attribute = wanted.pop(0)
            if attribute in done or attribute in _INTERNAL:
                continue
            done.add(attribute)
            known = any(attribute in c or self.aliases.get(attribute) in c for c in recorded)
            if attribute in self.properties and not known:
                source, node = self.properties[attribute]
                body = [ast.unparse(s) for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
                properties += ["    @property", f"    def {attribute}(self):", *("        " + line for text in body for line in text.splitlines()), ""]
                wanted += [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"]
                continue
            default = attributes.get(attribute)
            own = self.defaults.get(self.aliases.get(attribute, attribute))
            fields[attribute] = _default_text(default if default is not None else own)
        kinds = {a: _type_of([c.get(a, c.get(self.aliases.get(a))) for c in recorded]) for a in fields}
        self.fields = set(fields) | {self.aliases.get(a, a) for a in fields}
        out = [f"    {a}: {kinds[a]} = {text}" for a, text in sorted(fields.items())]
        used = {a: self.aliases[a] for a in fields if a in self.aliases}
        if used:
            out += ["", f"    ALIASES: ClassVar = {used!r}"]
        return out + ([""] + properties if properties else [])

    def irrelevant(self, reads: dict[str, list[str]], recorded: list[dict]) -> list[str]:
        """The IRRELEVANT table: keys of the recorded configs that the slice does not read, each with the reason. reads: where the reference reads an
        attribute."""
        from labkit.models.config import IRRELEVANT_KEYS

        keys = sorted({k for c in recorded for k in c} - self.fields - set(IRRELEVANT_KEYS) - {"model_type", "dtype"})
        inner = {n.attr for source, node in self.properties.values() for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        table = {}
        for key in keys:
            spelled = {key} | {a for a, k in self.aliases.items() if k == key}
            places = list(dict.fromkeys(place for name in sorted(spelled) for place in reads.get(name, ())))
            if places:
                more = f" and {len(places) - 1} more" if len(places) > 1 else ""
                table[key] = f"read at {places[0]}{more}: no logit of a prompt or of a decoded token comes of it"
            elif key in inner:
                table[key] = "read only by the config class"
            else:
                table[key] = "the reference's code never reads it"
        if not table:
            return []
        return ["", "    IRRELEVANT: ClassVar = {", *(f"        {k!r}: {v!r}," for k, v in table.items()), "    }"]


def _literal(node):
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None


def _default_text(node) -> str:
    if isinstance(node, str):
        return node
    value = _literal(node) if node is not None else None
    if isinstance(value, (list, tuple)):
        return repr(tuple(value)) if all(not isinstance(v, (list, dict)) for v in value) else "None"
    return repr(value) if isinstance(value, (bool, int, float, str)) else "None"


def _type_of(values) -> str:
    names = {type(v).__name__ for v in values if v is not None}
    optional = any(v is None for v in values)
    if names == {"int", "float"}:
        names = {"float"}
    if len(names) != 1:
        return "object"
    (name,) = names
    name = {"list": "tuple", "dict": "Mapping"}.get(name, name)
    if name not in ("Mapping",) and not hasattr(builtins, name):
        return "object"
    return f"{name} | None" if optional else name
