"""The conversion's limits, on a checkpoint with the shapes of Qwen3-0.6B."""

import os

import pytest
from run import run


@pytest.mark.benchmark
def test_conversion_both_ways_stays_near_a_copy_and_small():
    assert run("conversion.py", os.environ.get("LABKIT_BENCHMARK_DISK", os.path.expanduser("~"))) == 0
