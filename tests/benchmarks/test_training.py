"""A training step against PyTorch's forward and backward."""

import pytest
from training import rows, table


@pytest.mark.benchmark
def test_a_training_step_keeps_up_with_pytorch():
    found = rows()
    print("\n" + table(found))
    assert all(row["holds"] for row in found), table(found)
