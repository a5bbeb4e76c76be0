"""The longest prompt of phase 4 goes beyond every length at which the function changes, or the record says that it does not."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.hf import open_source
from labkit.hf.prompts import make_prompts
from labkit.lab import handover
from labkit.lab.phases.reach import LONGEST, reach
from labkit.lab.records import Records
from tests.lab import samples


@pytest.fixture
def records(tmp_path):
    store = Records(tmp_path / "tiny-qwen3")
    store.write(samples.record(2, parameters={"model": "m", "length": 24}))
    return store


def qwen3(tmp_path, **changes):
    """A directory of tiny Qwen3 with other config keys."""
    source = open_source("tiny:qwen3")
    folder = tmp_path / "own"
    folder.mkdir()
    for file in source.path.iterdir():
        if file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(source.config.raw | changes))
    return open_source(str(folder))


def windowed(tmp_path, window):
    layers = open_source("tiny:qwen3").config.raw["num_hidden_layers"]
    return qwen3(tmp_path, use_sliding_window=True, sliding_window=window, layer_types=["sliding_attention"] * layers, max_window_layers=0)


@pytest.mark.parametrize(("window", "longest"), [(7, 256), (250, 266), (300, 316), (LONGEST - 16, LONGEST)])
def test_a_prompt_goes_beyond_a_window_where_that_costs_little(window, longest, tmp_path, records):
    found = reach(windowed(tmp_path, window), 256, 16, records)
    assert (found.longest, found.left) == (longest, [])
    assert [each.length for each in found.reached] == [window]


def test_a_longer_window_is_told(tmp_path, records):
    source = windowed(tmp_path, 4096)
    (words,) = reach(source, 256, 16, records).left
    assert words.startswith("sliding_window is 4096 and the longest prompt has 256 tokens: beyond it")
    # Its tiny configuration has no window at all.
    assert "not proven by any phase; `labkit run -p longest 4112` reaches it" in words
    assert reach(source, 4112, 16, records).left == []


def test_what_the_tiny_configuration_reaches_is_told_as_such(records):
    gemma = open_source("tiny:gemma2?sliding_window=4096")
    (words,) = reach(gemma, 256, 16, records).left
    assert "proven on the tiny configuration of phase 2 only (sliding_window 7, 24 tokens)" in words
    short = Records(records.folder.parent / "short")
    short.write(samples.record(2, parameters={"model": "m", "length": 7}))
    assert "not proven by any phase" in reach(gemma, 256, 16, short).left[0]


def test_learned_positions_leave_room_for_what_is_decoded(records):
    config = SimpleNamespace(
        described={"num_hidden_layers": 2, "sliding_window": 300}, effective={"max_position_embeddings": 320}, model_type="nothing_of_the_kind"
    )
    assert reach(SimpleNamespace(config=config), 256, 16, records).longest == 256
    (words,) = reach(SimpleNamespace(config=config), 256, 16, records).left
    assert words.endswith("not proven by any phase")  # no prompt could: there are no positions for it
    config.effective = {"max_position_embeddings": 332}
    assert reach(SimpleNamespace(config=config), 256, 16, records).longest == 316


def test_the_longest_prompt_sees_the_window_and_the_one_before_did_not(tmp_path, records):
    """The control: dropping the window changes nothing within 256 tokens, and the logits of the longest prompt."""
    from labkit.hf.reference import Reference

    source = windowed(tmp_path, 300)
    found = reach(source, 256, 16, records)
    (_, tokens), *_ = make_prompts(source.path, source.config.effective["vocab_size"], (found.longest,))
    wanted = Reference.load(source.path, "exact").logits(tokens[None])
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {"sliding_window": 10_000}))
    other = Reference.load(source.path, "exact").logits(tokens[None])
    difference = np.abs(wanted - other).max(-1)[0]
    assert difference[:256].max() < 1e-12 and difference[300:].max() > 1e-6


def test_the_sentence_of_a_handover_says_what_was_left_out(tmp_path):
    store = samples.complete(tmp_path / "tiny-qwen3")
    assert "But" not in handover.collect(store.folder).sentence
    record = store.read(4)
    record.outcome["unreached"] = ["sliding_window is 4096 and the longest prompt has 256 tokens"]
    store.write(record)
    assert "But sliding_window is 4096 and the longest prompt has 256 tokens." in handover.collect(store.folder).sentence
