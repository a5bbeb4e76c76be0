"""Every benchmark in one run: `PYTHONPATH=src python tests/benchmarks/run.py [FOLDER]`. FOLDER, on a disk, holds the conversion's files (default:
the home folder)."""

import sys
import tempfile
from pathlib import Path

import conversion
import inference
import training


def main(folder: str) -> int:
    found = inference.rows()
    print(inference.table(found), flush=True)
    trained = training.rows()
    print("\n" + training.table(trained), flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        converted = conversion.measure(Path(place))
    print("\n" + conversion.table(converted))
    limits = [row["ratio"] <= conversion.RATIO_LIMIT and row["peak_bytes"] <= row["peak_limit_bytes"] for row in converted if row["what"] != conversion.COPY]
    return 0 if all(limits) and all(row["holds"] for row in found + trained) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else str(Path.home())))
