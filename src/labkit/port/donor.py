"""The donor: the refined slice whose reference shares most statements with a family's."""

import functools
from collections import Counter

from labkit.errors import InputError
from labkit.models import refined_families
from labkit.port.normal_form import methods
from labkit.port.source_tree import SourceTree, source_tree


def statements(tree: SourceTree) -> Counter:
    """How often each normalised statement occurs, by (role, method, statement)."""
    return Counter(
        (role, method, s.text) for role, definition in tree.definitions.items() for method, found in methods(tree, definition).items() for s in found
    )


@functools.lru_cache(maxsize=64)
def statements_of(model_type: str) -> Counter:
    return statements(source_tree(model_type))


def similarity(mine: Counter, other: Counter) -> float:
    """Share of the statements of both that are common to both: 1 for the same code, 0 for nothing in common."""
    total = mine.total() + other.total()
    return 2 * (mine & other).total() / total if total else 1.0


def ranking(model_type: str) -> list[tuple[str, float]]:
    """Refined families other than the type itself, nearest first, with their similarity."""
    mine = statements_of(model_type)
    shares = [(other, similarity(mine, statements_of(other))) for other in refined_families() if other != model_type]
    return sorted(shares, key=lambda pair: (-pair[1], pair[0]))


def nearest(model_type: str) -> tuple[str, float]:
    """The donor and its similarity. Raises InputError when the garden has no other family."""
    ranked = ranking(model_type)
    if not ranked:
        raise InputError("The garden has no family to serve as donor", next="Name one: delta_list(model_type, donor=...)")
    return ranked[0]
