"""What is advised for a checkpoint whose model_type nobody knows."""

import json
import shutil

import pytest

from labkit.errors import InputError
from labkit.hf import open_source
from labkit.hf.facts import walls
from labkit.hf.resemblance import most_alike, resembling


def renamed(tmp_path, model, **changes):
    """The directory of a tiny model with other keys in its config.json; None removes a key."""
    source = open_source(model)
    shutil.copytree(source.path, tmp_path / "own")
    config = {key: value for key, value in (source.config.raw | changes).items() if value is not None}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "own")


def test_the_class_in_architectures_decides_and_its_own_family_goes_first(tmp_path):
    with pytest.raises(InputError) as caught:
        open_source(renamed(tmp_path, "tiny:llama", model_type="zzz"))
    assert "belongs to llama, exaone" in caught.value.what and "Set model_type to 'llama', or" in caught.value.next


def test_two_types_that_both_define_the_class_are_both_named(tmp_path):
    with pytest.raises(InputError) as caught:
        open_source(renamed(tmp_path, "tiny:llama", model_type="zzz", architectures=["Llama4ForCausalLM"]))
    assert "'llama4' or 'llama4_text'" in caught.value.next


@pytest.mark.parametrize(
    ("model", "like"), [("tiny:llama", "llama, seed_oss"), ("tiny:qwen3", "qwen3"), ("tiny:qwen3_moe", "qwen3_moe"), ("tiny:gemma2", "gemma2")]
)
def test_without_a_class_tensor_names_and_config_keys_decide(tmp_path, model, like):
    source = open_source(renamed(tmp_path, model, model_type="zzz", architectures=None))
    assert ", ".join(most_alike(source)) == like  # those that fit equally well, all of them
    (wall,) = walls(source)
    assert f"most like {like}. Otherwise install" in wall.next


def test_tensors_that_no_family_names_resemble_none(tmp_path):
    from labkit.hf.safetensors_io import Slot, write_safetensors

    source = open_source(renamed(tmp_path, "tiny:llama", model_type="zzz", architectures=None))
    odd = tmp_path / "odd"
    odd.mkdir()
    info = next(iter(source.tensors.values()))
    write_safetensors(odd, [Slot("model.quux_module.weight", info.dtype, info.shape)], [source.tensors.read(info.name)])
    (odd / "config.json").write_text(json.dumps({"model_type": "zzz"}))
    assert most_alike(open_source(str(odd))) == [] and resembling(open_source(str(odd))) == ""
