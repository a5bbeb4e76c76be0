"""Tokenizer facts against the config, and text to tokens as the reference does it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from labkit.hf import open_source
from labkit.hf.tokenizer import decode, encode, has_tokenizer, tokenizer_facts

from .conftest import write_config


@pytest.fixture
def worded(tmp_path):
    """A checkpoint with a word-level tokenizer of 9 tokens that puts <s> before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<unk>", "<s>", "</s>", "the", "capital", "of", "France", "is", "Paris"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages }}"}
        )
    )

    def make(vocab_size=9, **changes):
        arrays = {"model.embed_tokens.weight": np.zeros((9, 4), np.float32), "lm_head.weight": np.zeros((9, 4), np.float32)}
        save_file(arrays, write_config(tmp_path, vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, **changes) / "model.safetensors")
        return open_source(tmp_path)

    return make


def test_facts(worded):
    facts = tokenizer_facts(worded())
    assert (facts.present, facts.size, facts.vocab_size, facts.rows, facts.template, facts.adds_bos, facts.adds_eos, facts.findings) == (
        True,
        9,
        9,
        9,
        True,
        True,
        False,
        (),
    )
    assert facts.special["bos"] == 1 and facts.special["eos"] == 2 and facts.special["pad"] is None


def test_round_trip_with_bos(worded):
    source = worded()
    tokens = encode(source, "the capital of France")
    assert tokens.tolist() == [[1, 3, 4, 5, 6]] and tokens.dtype == np.int32
    assert decode(source, tokens) == "<s> the capital of France"


FINDINGS = {
    "tokenizer larger": ({"vocab_size": 8}, "ids from 8 on have no embedding"),
    "tokenizer smaller": ({"vocab_size": 12}, "3 rows are never used"),
    "rows": ({"vocab_size": 12}, "has 9 rows and vocab_size is 12"),
    "eos": ({"pad_token_id": None, "eos_token_id": 5}, "eos_token_id is 5 in the config and 2 in the tokenizer"),
}


@pytest.mark.parametrize("changes, finding", FINDINGS.values(), ids=FINDINGS.keys())
def test_findings(worded, tmp_path, changes, finding):
    worded()
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    assert any(finding in text for text in tokenizer_facts(open_source(tmp_path)).findings)


def test_several_eos_ids_are_no_finding(worded):
    assert tokenizer_facts(worded(**{"pad_token_id": None})).findings == ()


def test_no_tokenizer(refused):
    source = open_source("tiny:llama")
    assert not has_tokenizer(source) and tokenizer_facts(source).kind == "no tokenizer" and tokenizer_facts(source).vocab_size == 131
    refused(lambda: encode(source, "hello"), "no tokenizer", "token ids")


def test_a_broken_tokenizer(worded, tmp_path, refused):
    source = worded()
    (tmp_path / "tokenizer.json").write_text("{")
    refused(lambda: encode(source, "hello"), "tokenizer cannot be loaded", str(tmp_path))


def test_the_built_in_tokenizer():
    source = open_source("smollm2-135m")
    facts = tokenizer_facts(source)
    assert (facts.size, facts.vocab_size, facts.rows, facts.template, facts.adds_bos) == (49152, 49152, 49152, True, False)
    assert encode(source, "The capital of France is").tolist() == [[504, 3575, 282, 4649, 314]]


def test_an_empty_prompt(refused):
    refused(lambda: encode(open_source("smollm2-135m"), ""), "no tokens")
