"""One thing deleted from a slice's code: a multiplier, a norm, a bias, a window, a softcap, a routing switch. The attack alone must name its key or leaf."""

import os
import shutil

import jax
import pytest

from labkit.errors import InputError
from labkit.models import get_family, refined_families, registry
from labkit.parity.perturb_config import check_config
from labkit.parity.perturb_parameters import check_parameter, parameter_specs
from labkit.parity.perturb_spec import TRACKS, PerturbSpec
from labkit.parity.perturb_subject import Subject
from labkit.port.slices import ensure_slice

# family, the code, what is left of it, what must be named: a config key with another value, or the end of a parameter's path
DELETIONS = [
    ("gemma2", "softcap=config.attn_logit_softcapping, ", "", {"attn_logit_softcapping": 1.5}),
    ("gemma2", "causal_mask(tokens, window)", "causal_mask(tokens)", {"sliding_window": 5}),
    ("gemma2", "if config.final_logit_softcapping is not None:", "if False:", {"final_logit_softcapping": 3.0}),
    ("qwen3", "self.q_norm(self.q_proj(x)", "(self.q_proj(x)", "self_attn.q_norm.weight"),
    ("granite", "scaled(hidden_states, self.residual_multiplier)", "hidden_states", {"residual_multiplier": 0.9}),
    ("granite", "scaled(inputs_embeds, self.embedding_multiplier)", "inputs_embeds", {"embedding_multiplier": 5.0}),
    ("granite", "self.scaling = config.attention_multiplier", "self.scaling = 1.0", {"attention_multiplier": 0.2}),
    ("granite", "divided(logits, self.config.logits_scaling)", "logits", {"logits_scaling": 3.0}),
    ("cohere", "scaled(logits, self.logit_scale)", "logits", {"logit_scale": 0.5}),
    ("minicpm3", "config.scale_depth / math.sqrt", "1.0 / math.sqrt", {"scale_depth": 2.0}),
    ("minicpm3", "embed_scale=config.scale_emb", "embed_scale=1", {"scale_emb": 3}),
    ("minicpm3", "self.hidden_size / self.dim_model_base", "1.0", {"dim_model_base": 24}),
    ("deepseek_v3", "if self.norm_topk_prob:", "if True:", {"norm_topk_prob": False}),
    ("deepseek_v3", "topk_weights * self.routed_scaling_factor", "topk_weights", {"routed_scaling_factor": 1.2}),
    ("deepseek_v3", "(group_scores, self.topk_group)", "(group_scores, self.num_group)", {"topk_group": 1}),
    ("deepseek_v3", "scores + read(self.e_score_correction_bias)", "scores", "mlp.gate.e_score_correction_bias"),
    ("qwen2_moe", "jax.nn.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * ", "", "mlp.shared_expert_gate.kernel"),
    ("qwen2_moe", "if self.norm_topk_prob:", "if True:", {"norm_topk_prob": False}),
    ("gpt_oss", "sinks=read(self.sinks), ", "", "self_attn.sinks"),
    ("gpt_oss", "self.limit = config.swiglu_limit", "self.limit = 7.0", {"swiglu_limit": 0.5}),
    ("olmo2", "self.q_norm(self.q_proj(hidden_states))", "self.q_proj(hidden_states)", "self_attn.q_norm.weight"),
    ("glm4", "hidden_states = self.post_self_attn_layernorm(hidden_states)", "pass", "post_self_attn_layernorm.weight"),
    ("smollm3", "if self.use_rope:", "if True:", {"no_rope_layers": [0, 1, 1, 0, 1]}),
    ("llama4_text", "if self.attn_temperature_tuning and (not self.use_rope):", "if False:", {"attn_scale": 0.9, "floor_scale": 4}),
    ("llama4_text", "if self.config.use_qk_norm and self.use_rope:", "if False:", {"use_qk_norm": False}),
    ("gpt2", "position_embeds = self.wpe(position_ids)", "position_embeds = 0.0 * self.wpe(position_ids)", "wpe.embedding"),
    ("mamba2", "output = output + D_residual", "pass", "mixer.D"),
    ("gemma3_text", "config.query_pre_attn_scalar ** (-0.5)", "1.0", {"query_pre_attn_scalar": 5}),
    ("mistral", "create_sliding_window_causal_mask(cache, self.config.sliding_window, inputs", "create_causal_mask(cache, inputs", {"sliding_window": 5}),
    ("qwen2", 'bias=True, axes=("embed", "heads"), name="q_proj"', 'bias=False, axes=("embed", "heads"), name="q_proj"', "q_proj.bias"),
]  # fmt: skip
CASES = [
    pytest.param(*case, id=f"{case[0]}-{case[3] if isinstance(case[3], str) else '-'.join(case[3])}", marks=() if number < 2 else pytest.mark.slow)
    for number, case in enumerate(DELETIONS)
]


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """edited(family, code, left): the family's slice with `code` replaced wherever it stands, known to the registry while the test lasts."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_folders", dict(registry._folders))
    monkeypatch.setenv("LABKIT_SLICES", os.environ.get("LABKIT_SLICES", ""))

    def edit(family: str, code: str, left: str) -> None:
        if family in refined_families():
            folder = registry._GARDEN / family
        else:
            folder = ensure_slice(family).require().folder
        shutil.copytree(folder, tmp_path / family)
        file = tmp_path / family / f"modeling_{family}.py"
        text = file.read_text()
        assert code in text, "the slice is written otherwise now: change the test"
        file.write_text(text.replace(code, left))
        registry.register_folder(tmp_path / family, "edited")
        assert get_family(family).path == tmp_path / family

    return edit


@pytest.mark.parametrize("family, code, left, named", CASES)
def test_the_attack_names_what_is_gone(edited, family, code, left, named):
    edited(family, code, left)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        if isinstance(named, str) and named.endswith(".bias") and "bias=" in code:
            with pytest.raises(InputError, match=named.replace(".", r"\.")):
                Subject(f"tiny:{family}")
            return
        with Subject(f"tiny:{family}") as subject:
            if isinstance(named, dict):
                row = check_config(subject, PerturbSpec("config", "+".join(named), named, TRACKS))
            else:
                row = check_parameter(subject, next(spec for spec in parameter_specs(subject) if spec.target.endswith(named)))
            assert not row.passed and "the slice ignores it" in row.reason, row.plain()


def test_nothing_deleted_is_nothing_named(edited):
    """Control: the same copy of the slice, unedited."""
    edited("gemma2", "causal_mask(tokens, window)", "causal_mask(tokens, window)")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), Subject("tiny:gemma2") as subject:
        assert check_config(subject, PerturbSpec("config", "sliding_window", {"sliding_window": 5}, TRACKS)).passed
