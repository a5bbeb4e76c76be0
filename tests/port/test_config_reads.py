import dataclasses

from labkit.hf.source import open_source
from labkit.models.config import read_config
from labkit.models.registry import get_family
from labkit.port.config_reads import traced_reads, unread_keys


def _llama():
    source = open_source("tiny:llama")
    family = get_family("llama")
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    return family, config, source.config.defaults


def test_what_a_slice_reads_is_seen():
    family, config, defaults = _llama()
    read = traced_reads(family, config)
    assert {"hidden_size", "rms_norm_eps", "rope", "num_key_value_heads", "tie_word_embeddings"} <= read
    assert unread_keys(family, config, defaults) == {}


def test_a_key_that_nothing_reads_is_reported():
    family, config, defaults = _llama()
    wider = dataclasses.make_dataclass("Wider", [("forgotten", int, 3)], bases=(type(config),), frozen=True, kw_only=True)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert unread_keys(family, wider(**values, forgotten=7), defaults) == {"forgotten": 7}
