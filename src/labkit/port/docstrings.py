"""What a reference's docstring says first, where that is a sentence and not the description of an argument."""

import re

_ARGUMENT = re.compile(r"^\w+ ?\(`|^(Args?|Parameters|Returns?|Example)s?:")
_END = re.compile(r"(?<!e\.g)(?<!i\.e)\.(?=\s|$)")


def first_sentence(text: str) -> str:
    """The first sentence of a docstring on one line, with a full stop; empty when it has none."""
    lines = []
    for line in text.strip().splitlines():
        if not line.strip() or _ARGUMENT.match(line.strip()):
            break
        lines.append(line)
    line = " ".join(" ".join(lines).split())
    if not line:
        return ""
    end = _END.search(line)
    line = line[: end.start()] if end else line
    return f"{line.rstrip(' .')}." if line[-1].isalnum() or line[-1] in ")`'\"]" else ""
