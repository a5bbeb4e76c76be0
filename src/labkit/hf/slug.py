"""File-name-safe names for models. The name as typed is kept for display; renderers escape it."""

import hashlib
import re


def slugify(name: str, limit: int = 80) -> str:
    """Lower-case ASCII letters, digits, `.`, `_` and `-` only, never empty, never starting with a dot, at most `limit` characters.

    Names that differ may share a slug; the lab appends a piece of the source's fingerprint to the second.
    A slug that had to be cut ends in a hash of the whole name.
    """
    slug = re.sub(r"[^a-z0-9._-]+", "-", name.lower())
    slug = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", slug)).strip("-._")
    if not slug:
        return "model-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    if len(slug) > limit:
        slug = slug[: limit - 9].rstrip("-._") + "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return slug
