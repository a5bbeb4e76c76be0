"""Delete one multiplier, norm, bias, window, softcap or routing switch from a slice and see which check names it: `python -m tests.models.deletions`."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Deletion:
    """family and overrides: the tiny model. what: for the table. old, new: regular expression in the modeling file and what stands there instead; every match.

    by: the check that has to name it, "load", "exact" or "gradients", or a changed config key. named: a pattern of what it has to say; a key names itself.
    """

    family: str
    what: str
    old: str
    new: str
    by: str | dict
    named: str = ""
    overrides: str = ""

    @property
    def label(self) -> str:
        return f"{self.family}: {self.what}"


def key(family: str, what: str, old: str, new: str, overrides: str = "", **change) -> Deletion:
    """A deletion that a changed config key has to bring to light."""
    return Deletion(family, what, old, new, change, next(iter(change)), overrides)


FEW = "num_hidden_layers=3"
DELETIONS = (
    # multipliers
    key("granite", "residual multiplier", r"scaled\((\w+), self\.residual_multiplier\)", r"\1", FEW, residual_multiplier=0.9),
    key("granite", "embedding multiplier", r"scaled\((\w+), self\.embedding_multiplier\)", r"\1", FEW, embedding_multiplier=5.0),
    key("granite", "attention multiplier", r"= config\.attention_multiplier", "= 0.7", FEW, attention_multiplier=0.3),
    key("granite", "logits scaling", r"divided\((\w+), self\.config\.logits_scaling\)", r"\1", FEW, logits_scaling=4.0),
    key("cohere", "logit scale", r"scaled\((\w+), self\.logit_scale\)", r"\1", FEW, logit_scale=0.3),
    key("deepseek_v3", "routed scaling factor", r" \* self\.routed_scaling_factor", "", FEW, routed_scaling_factor=1.5),
    key("minicpm3", "embedding scale", r"embed_scale=config\.scale_emb", "embed_scale=1.0", FEW, scale_emb=7),
    Deletion("gemma2", "embedding normaliser", r" \* constant\(self\.features\*\*0\.5, embedded\.dtype\)", "", "exact", r"\bembed_tokens", FEW),
    # norms
    Deletion("gemma2", "norm before the MLP", r"self\.pre_feedforward_layernorm\(x\)", "x", "exact", "pre_feedforward_layernorm", FEW),
    Deletion("qwen3", "query norm", r"self\.q_norm\((self\.q_proj\(x\)\.reshape\(.*?\))\)", r"\1", "exact", "q_norm", FEW),
    Deletion("olmo2", "key norm", r"self\.k_norm\((self\.k_proj\(hidden_states\))\)", r"\1", "exact", "k_norm", FEW),
    Deletion("glm4", "norm after attention", r"self\.post_self_attn_layernorm\(hidden_states\)", "hidden_states", "exact", "post_self_attn_layernorm", FEW),
    Deletion("gemma3_text", "query norm", r"self\.q_norm\(query_states\)", "query_states", "exact", "q_norm", FEW),
    Deletion("llama", "final norm", r"x = self\.norm\(x\)", "x = x", "exact", r"\bnorm\b", FEW),
    # biases and other vectors
    Deletion("qwen2", "query bias", r"bias=True(?=, axes=\(.*?\), name=\"q_proj\")", "bias=False", "load", r"q_proj\.bias", FEW),
    Deletion("gpt_oss", "attention sinks", r", sinks=read\(self\.sinks\)", "", "gradients", r"self_attn\.sinks", FEW),
    Deletion("mamba2", "skip D", r"D=read\(self\.D\)", "D=jnp.zeros_like(read(self.D))", "gradients", r"\.D, layer", FEW),
    Deletion("mamba2", "bias of the time step", r"    dt = dt \+ dt_bias\.astype\(dt\.dtype\)\n", "", "gradients", r"dt_bias", FEW),
    Deletion("deepseek_v3", "correction bias", r"scores \+ read\(self\.e_score_correction_bias\)", "scores", "exact", r"mlp\.gate\.(indices|weights)", FEW),
    # windows
    key("gemma2", "window", r"causal_mask\(tokens, window\)", "causal_mask(tokens)", FEW, sliding_window=4),
    key("mistral", "window", r"create_sliding_window_causal_mask\(cache, self\.config\.sliding_window, ", "create_causal_mask(cache, ", FEW, sliding_window=4),
    # softcaps
    key("gemma2", "softcap on scores", r", softcap=config\.attn_logit_softcapping", "", FEW, attn_logit_softcapping=0.5),
    key("gemma2", "final softcap", r"logits = jnp\.tanh\(logits / cap\) \* cap", "pass", FEW, final_logit_softcapping=1.0),
    # routing switches
    key("deepseek_v3", "renormalised choice", r"if self\.norm_topk_prob:", "if False:", f"{FEW}&norm_topk_prob=false", norm_topk_prob=True),
    key("qwen3_moe", "renormalised choice", r"if self\.config\.norm_topk_prob:", "if True:", f"{FEW}&mlp_only_layers=[]", norm_topk_prob=False),
    key("deepseek_v3", "limit to groups", r"jnp\.where\(~score_mask\.astype\(bool\), .*?, scores_for_choice\)", "scores_for_choice", FEW, topk_group=1),
    Deletion("qwen2_moe", "gate of the shared expert", r"jax\.nn\.sigmoid\(self\.shared_expert_gate\(\w+\)\) \* ", "", "exact", "shared_expert_gate", FEW),
    key("gpt_neox", "parallel residual", r"if self\.use_parallel_residual:", "if True:", FEW, use_parallel_residual=False),
    key("smollm3", "layers without rotary", r"if self\.use_rope:", "if True:", "num_hidden_layers=4", no_rope_layers=[1, 0, 1, 0]),
)


@contextlib.contextmanager
def planted(deletion: Deletion) -> Iterator[Path]:
    """The family's slice without the thing, registered in its place. AssertionError where the text has no such thing."""
    from labkit.models import register_folder, registry
    from labkit.port.slices import ensure_slice

    origin = ensure_slice(deletion.family).require().folder
    before, named = dict(registry._registered), os.environ.get("LABKIT_SLICES")
    root = Path(tempfile.mkdtemp(prefix="labkit-deletion-"))
    folder = root / deletion.family
    try:
        shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("__pycache__"))
        modeling = folder / f"modeling_{deletion.family}.py"
        text, count = re.subn(deletion.old, deletion.new, modeling.read_text())
        assert count, f"{deletion.label}: nothing matches {deletion.old!r}"
        modeling.write_text(text)
        register_folder(folder, "edited")
        yield folder
    finally:
        registry._registered.clear(), registry._registered.update(before)
        os.environ.pop("LABKIT_SLICES", None) if named is None else os.environ.update(LABKIT_SLICES=named)
        shutil.rmtree(root, ignore_errors=True)


def told(deletion: Deletion) -> tuple[str, str]:
    """(the check that fails, what it says) with the deletion planted; ("", "") when nothing fails."""
    from labkit.parity.conformance import conformance, exactly

    source = f"tiny:{deletion.family}" + (f"?{deletion.overrides}" if deletion.overrides else "")
    with planted(deletion):
        if isinstance(deletion.by, dict):
            from labkit.parity.perturb_config import check_config
            from labkit.parity.perturb_spec import TRACKS, PerturbSpec
            from labkit.parity.perturb_subject import Subject

            with exactly(), Subject(source) as subject:
                row = check_config(subject, PerturbSpec("config", deletion.named, deletion.by, TRACKS))
            return ("", "") if row.passed else (f"config key {deletion.named}", row.reason)
        check = conformance(source, checks=[1 if deletion.by == "gradients" else "exact"]).checks[0]
        return ("", "") if check.passed else (check.name, check.reason)


def caught(deletion: Deletion) -> tuple[bool, str, str]:
    """(whether a check fails and names what was deleted, the check, what it says)."""
    check, words = told(deletion)
    return bool(check) and re.search(deletion.named, words) is not None, check, words


def main(families: list[str]) -> int:
    """Print the table; 0 when every deletion is named."""
    from labkit.port.proof import prepare

    prepare()
    chosen = [d for d in DELETIONS if not families or d.family in families]
    missed = 0
    for deletion in chosen:
        start = time.perf_counter()
        try:
            named, check, words = caught(deletion)
        except Exception as error:
            named, check, words = False, "error", f"{type(error).__name__}: {error}"
        missed += not named
        print(f"{'named' if named else 'MISSED':6}  {deletion.label:40}  {check:32}  {time.perf_counter() - start:5.1f} s  {words[:150]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} deletions are named by a check that fails")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
