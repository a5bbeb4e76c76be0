"""Draws the twelve types whose slices are read against the reference by fresh eyes (issue of the translator, acceptance 3)."""

import json
import random
from pathlib import Path

from labkit.hf.decoder_types import decoder_only_types

SEED = 424242

if __name__ == "__main__":
    held_out = set(json.loads((Path(__file__).parent / "held_out.json").read_text())["types"])
    print(*sorted(random.Random(SEED).sample([t for t in decoder_only_types()[0] if t not in held_out], 12)))
