"""Forward and greedy decoding against PyTorch."""

import pytest
from inference import rows, table


@pytest.mark.benchmark
def test_forward_and_decoding_keep_up_with_pytorch():
    found = rows()
    print("\n" + table(found))
    assert all(row["holds"] for row in found), table(found)
