"""Goldens: ours and those made elsewhere; what is refused; and prompts."""

import json

import numpy as np
import pytest

from labkit.errors import InputError
from labkit.hf.goldens import Golden, make_goldens, read_goldens, write_goldens
from labkit.hf.prompts import make_prompts
from labkit.hf.reference import Reference
from labkit.hf.source import open_source


def test_goldens_of_a_reference_come_back_to_the_bit(tmp_path):
    source = open_source("tiny:llama?num_hidden_layers=2")
    reference = Reference.load(source.path, "float32")
    prompts = make_prompts(source, 131, (5, 40), seed=1)
    made = make_goldens(reference, prompts, steps=4, keep=6, fingerprint="f", model="m")
    back = read_goldens(write_goldens(tmp_path / "g.jsonl", made), vocab_size=131)
    for one, two, (text, tokens) in zip(made, back, prompts):
        assert one.prompt == two.prompt == text and np.array_equal(two.tokens, tokens) and two.dtype == "float32" and two.versions["transformers"]
        assert np.array_equal(one.logits, two.logits) and two.positions[-1] == len(tokens) - 1 and len(two.positions) <= 6
        assert np.array_equal(two.logits, reference.logits(tokens[None])[0][two.positions])
        assert np.array_equal(two.greedy, reference.greedy(tokens[None], 4)[0])
    assert list(tmp_path.iterdir()) == [tmp_path / "g.jsonl"]


def line(**changes):
    return json.dumps({"prompt": "a", "tokens": [1, 2], "logits": [[0.0, 1.0, 2.0], [1.0, 0.5, 0.0]]} | changes)


def test_a_golden_made_elsewhere_is_accepted(tmp_path):
    (tmp_path / "g.jsonl").write_text(line() + "\n\n" + line(tokens=[[1, 2]], logits=[[[0, 1, 2], [1, 2, 0]]]) + "\n")
    first, second = read_goldens(tmp_path / "g.jsonl")
    assert isinstance(first, Golden) and first.logits.dtype == second.logits.dtype == np.float32 and second.logits.shape == (2, 3)
    assert first.positions.tolist() == [0, 1] and first.greedy is None


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no goldens"),
        ("{", "not valid JSON"),
        ("[1]", "lacks tokens or logits"),
        ('{"tokens": [1]}', "lacks tokens or logits"),
        (line(logits=[[0, 1, 2]]), "not [2, vocab]"),
        (line(logits=[[0, 1], [1]]), "ragged"),
        (line(logits=[["a"], ["b"]]), "not numbers"),
        (line(logits=[[0, float("nan"), 1], [1, 2, 3]]), "not finite"),
        (line(logits=[[0, float("inf"), 1], [1, 2, 3]]), "not finite"),
        (line(tokens=[1.5, 2]), "whole numbers"),
        (line(tokens=[1, 9]), "outside its vocabulary"),
        (line(positions=[0, 2]), "0..1"),
        (line(greedy=[1, 2]), "does not continue"),
        (line(greedy=[2, 2, 1]), "does not continue"),
        (line(logits={"dtype": "float32", "shape": [2, 3], "base64": "AAAA"}), "do not fit their shape"),
        (line(logits={"dtype": "bfloat16", "shape": [2, 3], "base64": "AAAA"}), "not float32"),
    ],
)
def test_what_is_no_golden_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "g.jsonl").write_text(text)
    with pytest.raises(InputError) as caught:
        read_goldens(tmp_path / "g.jsonl")
    assert words in str(caught.value) and "g.jsonl" in str(caught.value)


def test_a_golden_of_another_vocabulary_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "g.jsonl").write_text(line())
    with pytest.raises(InputError, match="the model 5"):
        read_goldens(tmp_path / "g.jsonl", vocab_size=5)
    with pytest.raises(InputError, match="cannot be read"):
        read_goldens(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be written"):
        write_goldens(tmp_path / "none" / "g.jsonl", [])


def test_prompts_have_the_lengths_asked_for(tmp_path):
    for lengths in ((6, 64, 256), (1, 3)):
        prompts = make_prompts(tmp_path, 50, lengths, seed=3)
        assert [len(tokens) for _, tokens in prompts] == list(lengths) and all(3 <= t.min() and t.max() < 50 for _, t in prompts)
        assert all(np.array_equal(a[1], b[1]) for a, b in zip(prompts, make_prompts(tmp_path, 50, lengths, seed=3)))
    with pytest.raises(InputError, match="vocabulary of 8"):
        make_prompts(tmp_path, 5)
