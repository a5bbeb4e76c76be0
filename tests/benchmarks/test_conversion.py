"""The conversion's limits, on a checkpoint with the shapes of Qwen3-0.6B."""

import os
import tempfile
from pathlib import Path

import pytest
from conversion import COPY, RATIO_LIMIT, measure, table


@pytest.mark.benchmark
def test_conversion_both_ways_stays_near_a_copy_and_small():
    with tempfile.TemporaryDirectory(dir=os.environ.get("LABKIT_BENCHMARK_DISK", os.path.expanduser("~"))) as folder:
        rows = measure(Path(folder))
    print("\n" + table(rows))
    for row in rows:
        if row["what"] != COPY:
            assert row["ratio"] <= RATIO_LIMIT and row["peak_bytes"] <= row["peak_limit_bytes"], row
