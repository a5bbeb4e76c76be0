"""Check 2 rejects a call that leaves something behind, in the model or in a layer that a runner throws away."""

from flax import nnx

from labkit.models.llama import modeling_llama
from labkit.parity.conformance import stillness


def planted(monkeypatch, llama, change):
    right = modeling_llama.LlamaMLP.__call__

    def call(self, x):
        out = right(self, x)
        change(self, out)
        return out

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", call)
    return stillness.check(llama).problems


def test_a_right_call_changes_nothing(llama):
    found = stillness.check(llama)
    assert not found.problems and found.value > 10


def test_a_sow_within_a_scanned_layer_is_noticed(llama, monkeypatch):
    problems = planted(monkeypatch, llama, lambda mlp, out: mlp.sow(nnx.Intermediate, "hidden", out))
    assert any("LlamaDecoderLayer has mlp.hidden after the call: sown or set in it (scan)" == problem for problem in problems), problems


def test_an_attribute_set_in_a_call_is_noticed(llama, monkeypatch):
    problems = planted(monkeypatch, llama, lambda mlp, out: setattr(mlp, "calls", 1))
    assert any("the graph definition of LlamaDecoderLayer" in problem for problem in problems)


def test_a_changed_parameter_is_noticed(llama, monkeypatch):
    def scale(mlp, out):
        mlp.up_proj.kernel[...] = mlp.up_proj.kernel[...] * 2

    assert any("mlp.up_proj.kernel is another value after the call" in problem for problem in planted(monkeypatch, llama, scale))


def test_merge_is_itself_again_after_the_block():
    before = nnx.merge
    with stillness.watched_merges():
        assert nnx.merge is not before
    assert nnx.merge is before
