"""What is deleted from a slice is named by a check that fails: one deletion by default, all of them under `slow`."""

import pytest
from tests.models.deletions import DELETIONS, Deletion, caught, planted

QUICK = ("gemma2: window", "qwen3: query norm")


@pytest.mark.parametrize(
    ("family", "deletion"),
    [pytest.param(d.family, d, id=d.label.replace(": ", "-").replace(" ", "_"), marks=[] if d.label in QUICK else pytest.mark.slow) for d in DELETIONS],
)
def test_a_deletion_is_named(family, deletion):
    named, check, words = caught(deletion)
    assert named, f"{check}: {words}"


def test_there_are_enough_of_every_kind():
    assert len(DELETIONS) >= 20 and len({d.label for d in DELETIONS}) == len(DELETIONS)
    assert {"refined", "translated"} == {"refined" if d.family in ("llama", "qwen3", "qwen3_moe", "gemma2") else "translated" for d in DELETIONS}


def test_a_deletion_of_nothing_is_an_error():
    with pytest.raises(AssertionError, match="nothing matches"), planted(Deletion("llama", "nothing", "no such text", "", "exact")):
        pass


def test_an_edit_that_changes_nothing_is_not_caught():
    """Control: the tool does not call everything caught."""
    named, check, words = caught(Deletion("llama", "nothing", r"x = self\.norm\(x\)", "x = self.norm(x)", "exact", "norm", "num_hidden_layers=2"))
    assert not named and not check and not words
