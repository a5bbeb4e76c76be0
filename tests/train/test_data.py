"""Documents, packing and order: every prediction once an epoch, batches a function of the step, and errors that name the place."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.train.data import PackedData, split_batch
from labkit.train.documents import read_documents


def documents(*sizes):
    """Documents whose tokens are all different, so that every prediction is one of a kind."""
    tokens = np.arange(1, sum(sizes) + 1)
    return np.split(tokens, np.cumsum(sizes)[:-1])


def predictions(batch):
    """(token, next token, position in its segment) of everything that a batch counts."""
    found = []
    for inputs, targets, segments, counted in zip(*(batch[n] for n in ("inputs", "targets", "inputs_segmentation", "targets_segmentation"))):
        assert np.array_equal(segments, counted)
        found += [(int(a), int(b)) for a, b, s in zip(inputs, targets, segments) if s]
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=8), st.integers(1, 17), st.integers(0, 3))
def test_every_token_but_a_documents_first_is_predicted_once_an_epoch(sizes, length, seed):
    data = PackedData.pack(documents(*sizes), length=length, batch=1, seed=seed)
    found = [pair for step in range(data.rows) for pair in predictions(data.at(step))]
    wanted = [(int(a), int(b)) for d in documents(*sizes) for a, b in zip(d, d[1:])]
    assert sorted(found) == sorted(wanted)
    assert len(found) == len(set(found))


def test_segments_of_a_row_are_its_documents_and_padding_is_zero():
    batch = PackedData.pack(documents(4, 3, 8), length=7, batch=2, seed=0).at(0)
    rows = {tuple(row) for row in batch["inputs_segmentation"].tolist()}
    assert rows == {(1, 1, 1, 2, 2, 0, 0), (1, 1, 1, 1, 1, 1, 1)}
    assert (batch["inputs"][batch["inputs_segmentation"] == 0] == 0).all()


def test_the_order_is_of_the_seed_and_the_epoch_and_nothing_else():
    make = lambda seed: PackedData.pack(documents(100), length=5, batch=3, seed=seed)
    data = make(7)
    steps = [data.at(step)["inputs"] for step in range(20)]
    again = make(7)
    for step in (19, 3, 11):  # in any order, from a fresh object
        assert np.array_equal(again.at(step)["inputs"], steps[step])
    assert not np.array_equal(make(8).at(0)["inputs"], steps[0])
    epoch = lambda number: np.concatenate([data.at(s)["inputs"] for s in range(20 * number // 3, 20 * (number + 1) // 3)])
    assert not np.array_equal(epoch(0)[:18], epoch(1)[:18])
    assert data.fingerprint == again.fingerprint != PackedData.pack(documents(101), length=5, batch=3, seed=7).fingerprint


def test_a_batch_goes_on_into_the_next_epoch():
    data = PackedData.pack(documents(11), length=5, batch=3, seed=0)
    assert data.rows == 2
    assert sorted(map(tuple, data.at(0)["inputs"].tolist()))[0] in {(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)}
    assert split_batch(data.at(1), 3)["inputs"].shape == (3, 1, 5)


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<end>", "a", "b", "c", "<unk>"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return SimpleNamespace(path=folder, name="words", config=SimpleNamespace(trust_remote_code=False))


def test_texts_and_arrays_as_documents(tmp_path):
    source = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "plain.txt").write_text("a b\nc", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in ("a b", "c a a")) + "\n", encoding="utf-8")
    np.save(tmp_path / "rows.npy", np.arange(6, dtype=np.uint16).reshape(2, 3))
    read = lambda name: [d.tolist() for d in read_documents(tmp_path / name, source)]
    assert read("plain.txt") == [[1, 2, 3, 0]]
    assert read("lines.jsonl") == [[1, 2, 0], [3, 1, 1, 0]]
    assert read("rows.npy") == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such data file"),
        ("empty.txt", b"", "nothing to predict"),
        ("latin.txt", b"a b \xff", "byte 4 is 0xff"),
        ("bad.jsonl", b'{"text": "a b"}\n{"txt": 1}\n', "line 2"),
        ("number.jsonl", b'{"text": 3}\n', "line 1"),
        ("broken.npy", b"\x93NUMPYxx", "cannot be read"),
        ("floats.npy", np.zeros(4), "float64 (4,)"),
        ("cube.npy", np.zeros((2, 2, 2), int), "(2, 2, 2)"),
        ("objects.npy", np.asarray([{}, {}], object), "cannot be read"),
        ("outside.npy", np.asarray([1, 2, 900]), "Token 900 is outside the vocabulary of 100"),
        ("negative.npy", np.asarray([1, -2, 9]), "Token -2"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, says):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(InputError) as told:
        read_documents(tmp_path / name, write_tokenizer(tmp_path / "tokenizer"), vocab_size=100)
    assert says in told.value.paragraph() and name in told.value.paragraph()
