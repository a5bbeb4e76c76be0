"""Draws the 25 types that are kept apart while the translator is written (issue of the translator, "Generality"). Run once; the draw is held_out.json.

    python tests/port/draw_held_out.py TEXT [TEXT ...] > tests/port/held_out.json

A type is eligible when no TEXT (design, specifications, field notes, issues) names it and the garden has no refined slice of it.
"""

import json
import random
import re
import sys
from pathlib import Path

from labkit.hf.decoder_types import decoder_only_types
from labkit.models.registry import refined_families

SEED = 20261129

texts = "\n".join(Path(name).read_text() for name in sys.argv[1:]).lower()
words = set(re.findall(r"[a-z0-9_\-]+", texts))
types, _ = decoder_only_types()
eligible = [t for t in types if t not in refined_families() and t not in words]
print(json.dumps({"seed": SEED, "eligible": len(eligible), "types": sorted(random.Random(SEED).sample(eligible, 25))}, indent=1))
