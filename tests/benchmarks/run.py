"""Every benchmark, one after another: `python tests/benchmarks/run.py [FOLDER]`. FOLDER, on a disk, holds the conversion's files (default: the home folder).

Each runs in a process of its own, so that none finds the memory or the threads of the one before it. Exit 1 when a limit is not held.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> int:
    """The exit status of one script, its table on this process's output."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, str(HERE / script), *arguments], env=environment).returncode


def main(arguments: list[str]) -> int:
    failed = [script for script, given in (("inference.py", []), ("conversion.py", arguments), ("training.py", [])) if run(script, *given)]
    if failed:
        print(f"limits not held, or no result: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
