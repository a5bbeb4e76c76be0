"""The delta list: every place where a family's reference differs from its donor's, with file and line on both sides."""

import dataclasses
import functools
from pathlib import Path

import labkit
from labkit.hf import architectures
from labkit.models import refined_families
from labkit.port.answers import answer
from labkit.port.compare import Delta, compare, compare_config_methods
from labkit.port.components import COMPONENTS
from labkit.port.config_delta import checkpoint_rows, config_rows
from labkit.port.donor import nearest, similarity, statements_of
from labkit.port.source_tree import SourceTree, short, source_tree


@dataclasses.dataclass(frozen=True)
class Row:
    """A difference and what answers to it in the family's slice. ours: `file:line`, or "" for the reason in ours_reason."""

    delta: Delta
    ours: str = ""
    ours_reason: str = ""

    @property
    def answered(self) -> bool:
        """True when the slice has code for it, or when there is nothing to have (N/A: what the donor has and the family lacks)."""
        return bool(self.ours) or self.ours_reason.startswith("N/A")

    def as_dict(self) -> dict[str, str]:
        d = self.delta
        return {
            "component": d.component, "place": d.place, "kind": d.kind, "line": d.line, "donor_line": d.donor_line, "statement": d.statement,
            "donor_statement": d.donor_statement, "explanation": d.explanation, "ours": self.ours, "ours_reason": self.ours_reason,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeltaList:
    """similarity: share of statements in common, 0 to 1. files: the reference files compared. outside: names that the family's file takes from elsewhere."""

    family: str
    donor: str
    similarity: float
    rows: tuple[Row, ...]
    files: tuple[str, ...]
    outside: dict[str, str]
    transformers_version: str
    has_slice: bool

    @property
    def unanswered(self) -> tuple[Row, ...]:
        """Rows that no code of the family's slice answers to. All of them when there is no slice."""
        return tuple(row for row in self.rows if not row.answered)

    @property
    def counts(self) -> dict[str, int]:
        """component -> rows, in the order of COMPONENTS."""
        counted = {c: sum(row.delta.component == c for row in self.rows) for c in COMPONENTS}
        return {c: n for c, n in counted.items() if n}

    def as_rows(self) -> list[dict[str, str]]:
        return [row.as_dict() for row in self.rows]

    def as_dict(self) -> dict:
        """JSON-ready."""
        return {
            "family": self.family, "donor": self.donor, "similarity": round(self.similarity, 4), "transformers": self.transformers_version,
            "files": list(self.files), "rows": self.as_rows(), "unanswered": len(self.unanswered) if self.has_slice else None,
        }  # fmt: skip


def delta_list(source, donor: str | None = None, *, slice_folder: Path | None = None) -> DeltaList:
    """The delta list of a Source or of a model type, against `donor` or the nearest refined family. Reads source files only; takes well under 2 s.

    slice_folder: where the type's slice lies when it is not in the garden.
    Raises InputError when transformers has no causal LM of the type, or of the donor's.
    """
    model_type = source if isinstance(source, str) else source.config.model_type
    family = source_tree(model_type)
    if donor is None:
        donor, share = nearest(model_type)
    else:
        share = similarity(statements_of(model_type), statements_of(donor))
    file = slice_file(model_type, slice_folder)
    return delta_of(family, source_tree(donor), share, slice_file=file, config=None if isinstance(source, str) else source.config)


def delta_of(family: SourceTree, donor: SourceTree, share: float, *, slice_file: Path | None = None, config=None) -> DeltaList:
    """The same for two trees. config: an HFConfig whose values are compared too."""
    found = _compared(family, donor)
    if config is not None:
        found = [*found, *checkpoint_rows(config.raw_text, config.path, family, donor)]
    rows = [Row(d, *(answer(d, family.model_type, family.prefix, slice_file) if slice_file else ("", "the garden has no slice"))) for d in found]
    rows.sort(key=lambda row: COMPONENTS.index(row.delta.component))
    files = [f for tree in (family, donor) for f in (tree.file, tree.config_file) if f is not None]
    names = tuple(dict.fromkeys(short(f) for f in files))
    return DeltaList(family.model_type, donor.model_type, share, tuple(rows), names, family.outside, _version(), slice_file is not None)


def _compared(family: SourceTree, donor: SourceTree) -> list[Delta]:
    return [*compare(family, donor), *config_rows(family, donor), *compare_config_methods(family, donor)]


def slice_file(model_type: str, folder: Path | None = None) -> Path | None:
    """The modeling file of the type's slice: in `folder`, or in the garden."""
    if folder is not None:
        return next(iter(folder.glob("modeling_*.py")), None)
    return Path(labkit.__file__).parent / "models" / model_type / f"modeling_{model_type}.py" if model_type in refined_families() else None


@functools.cache
def _version() -> str:
    text = (architectures.transformers_folder() / "__init__.py").read_text(encoding="utf-8")
    return next((line.split("=")[1].strip().strip("\"'") for line in text.splitlines() if line.startswith("__version__")), "")
