"""Name patterns: literal text with placeholders for numbers. `{layer}` is Hugging Face's layer, `{expert}` counts tensors that one parameter stacks, and
`{i}`, `{j}`, `{k}` are further numbers that stand in a parameter's path as well. `{layer}` may be shifted: `{layer-1}`, `{layer*2+1}`.
"""

import functools
import re

NUMBERS = ("i", "j", "k")
_FIELD = re.compile(r"\{([a-z]+)(?:\*(\d+))?([+-]\d+)?\}")


def fields_of(pattern: str) -> tuple[str, ...]:
    """The placeholders of a name pattern, in order. ValueError for one that is none of the five."""
    found = tuple(match[1] for match in _FIELD.finditer(pattern))
    if set(found) - {"layer", "expert", *NUMBERS} or re.search(r"[{}]", _FIELD.sub("", pattern)):
        raise ValueError(f"{pattern}: only {{layer}}, {{expert}}, {{i}}, {{j}} and {{k}} may stand in a name pattern")
    return found


def fill(pattern: str, values: dict[str, int | None]) -> str:
    """The name that a pattern stands for; placeholders without a value stay."""

    def number(match):
        value = values.get(match[1])
        return match[0] if value is None else str(value * int(match[2] or 1) + int(match[3] or 0))

    return _FIELD.sub(number, pattern)


@functools.lru_cache(maxsize=4096)
def pattern_regex(pattern: str, layer: int | None = None) -> re.Pattern:
    """A name pattern as a regular expression, placeholders being numbers (the layer may be given)."""
    pattern = pattern if layer is None else fill(pattern, {"layer": layer})
    text, position, seen = "", 0, set()
    for match in _FIELD.finditer(pattern):
        text += re.escape(pattern[position : match.start()])
        shifted = match[2] is not None or match[3] is not None
        text += r"\d+" if shifted else f"(?P={match[1]})" if match[1] in seen else rf"(?P<{match[1]}>\d+)"
        seen |= set() if shifted else {match[1]}
        position = match.end()
    return re.compile(text + re.escape(pattern[position:]))
