"""What has no translation: the construct, its line in the reference, and what to do about it."""

import ast


class CannotTranslate(Exception):
    """construct, where ("file:line") and what to do about it."""

    def __init__(self, construct: str, node: ast.AST | None = None, advice: str = ""):
        super().__init__(construct)
        origin = getattr(node, "origin", None)
        self.construct, self.advice = construct, advice
        self.where = f"{origin[0]}:{origin[1].split(':')[0]}" if origin else ""
