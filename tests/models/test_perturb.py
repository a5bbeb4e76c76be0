"""The attack on every named family: parameters, config keys and inputs changed on both sides, and planted faults that the same specs must catch.

`pytest tests/models -k <family>` runs a draw; with `-m slow` every parameter, every key, every layer, and the default-shaped configuration too.
"""

import pytest

from labkit.parity.perturb import perturb
from labkit.port.slices import ensure_slice

FAMILIES = (
    "llama mistral qwen2 qwen3 qwen2_moe qwen3_moe mixtral gemma gemma2 gemma3_text phi3 granite granitemoe cohere cohere2 olmo2 olmoe smollm3 deepseek_v3 "
    "gpt_oss llama4_text hrm_text minicpm3 glm4 glm4_moe qwen3_next gpt2 gpt_neox mamba2"
).split()


def attacked(family: str, source: str, **options):
    ensure_slice(family).require()
    result = perturb(source, **options)
    assert not result.failures, result.plain(failures_only=True)
    assert not result.missed, result.plain(failures_only=True)
    assert {control.kind for control in result.controls} == {row.spec.kind for row in result.rows} == {"parameter", "config", "input"}
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_attack(family):
    attacked(family, f"tiny:{family}")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_attack(family):
    result = attacked(family, f"tiny:{family}", full=True, seed=1)
    assert result.total >= 20


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_attack_on_the_default_shape(family):
    from labkit.hf.default_shaped import default_shaped

    attacked(family, next(iter(default_shaped(family))), seed=2)
