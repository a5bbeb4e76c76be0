"""Config keys of a family against its donor's: which exist, which defaults differ, and which values of a checkpoint do."""

import ast
import json
from pathlib import Path

from labkit.port.compare import LONGEST, Delta
from labkit.port.components import explain
from labkit.port.source_tree import SourceTree, short

# Sizes differ from model to model without a line of code that differs; the rest concerns training, generation and files.
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
}
SIZES |= {"moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "original_max_position_embeddings"}
IRRELEVANT = {
    "model_type",
    "base_model_tp_plan",
    "base_model_pp_plan",
    "base_model_ep_plan",
    "base_model_fsdp_plan",
    "keys_to_ignore_at_inference",
    "initializer_range",
}
IRRELEVANT |= {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "pretraining_tp", "output_router_logits"}
IRRELEVANT |= {"architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map", "quantization_config", "has_no_defaults_at_init"}
IRRELEVANT |= {
    "sub_configs",
    "attribute_map",
    "base_config_key",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "is_composition",
    "use_mamba_kernels",
    "name_or_path",
    "attn_implementation",
}


def relevant(key: str) -> bool:
    """Whether a key may decide what is computed."""
    return not (key in IRRELEVANT or key.startswith("_") or "dropout" in key or "initializer" in key or key.endswith("_drop"))


def fields(tree: SourceTree) -> dict[str, tuple[str, int]]:
    """key -> (default as source, line), of the config class and of its bases in the same file."""
    if tree.config_class is None:
        return {}
    classes = {n.name: n for n in ast.parse(tree.config_file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)}
    found: dict[str, tuple[str, int]] = {}
    open_ = [tree.config_class]
    while open_:
        node = open_.pop(0)
        open_ += [classes[ast.unparse(b)] for b in node.bases if ast.unparse(b) in classes]
        for item in node.body:
            target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0] if isinstance(item, ast.Assign) else None
            if isinstance(target, ast.Name) and item.value is not None and relevant(target.id):
                found.setdefault(target.id, (_default(item.value), item.lineno))
    return found


def _default(value: ast.expr) -> str:
    """The default as source; of `field(default=x)` and `interval(...)(default=x)`, the x."""
    if isinstance(value, ast.Call):
        named = next((k.value for k in value.keywords if k.arg in ("default", "default_factory")), None)
        return ast.unparse(named) if named is not None else ast.unparse(value)
    return ast.unparse(value)


def config_rows(family: SourceTree, donor: SourceTree) -> list[Delta]:
    """Keys that only one class has, and defaults that differ (sizes left out)."""
    mine, theirs, rows = fields(family), fields(donor), []
    for key, (value, line) in mine.items():
        if key not in theirs:
            rows.append(_row(family, donor, key, "added", (value, line), None))
        elif key not in SIZES and theirs[key][0] != value:
            rows.append(_row(family, donor, key, "changed", (value, line), theirs[key]))
    return rows + [_row(family, donor, key, "removed", None, found) for key, found in theirs.items() if key not in mine]


def _row(family, donor, key, kind, mine, theirs) -> Delta:
    place = lambda tree, found: f"{short(tree.config_file)}:{found[1]}" if found else ""
    said = lambda found: f"{key} = {found[0]}"[:LONGEST] if found else ""
    words = {"added": "a key that the donor lacks", "removed": "a key that only the donor has", "changed": "another default"}[kind]
    known = explain("config", said(mine) or said(theirs), "") if kind != "changed" else ""
    return Delta(
        "config", "Config", key, kind, place(family, mine), place(donor, theirs), said(mine), said(theirs), f"{words}: {known}" if known else words,
        (f"config.{key}",) if mine else (),
    )  # fmt: skip


def checkpoint_rows(raw: dict, file: Path, family: SourceTree, donor: SourceTree) -> list[Delta]:
    """Values of a checkpoint's config.json that decide the computation and are neither the family's default (its rows tell that) nor the donor's."""
    mine, theirs, rows = fields(family), fields(donor), []
    lines = _lines(file)
    for key, value in raw.items():
        if not relevant(key) or key in SIZES or isinstance(value, dict) and key not in ("rope_scaling", "rope_parameters"):
            continue
        if isinstance(value, dict):
            kind_of_rope = value.get("rope_type", value.get("type", "default"))
            if kind_of_rope == "default":
                continue
        if any(key in known and _equal(known[key][0], value) for known in (mine, theirs)):
            continue
        if key not in theirs and key not in mine and value in (None, False):
            continue
        text = f"{key} = {json.dumps(value, default=str)}"
        donor_place = f"{short(donor.config_file)}:{theirs[key][1]}" if key in theirs else ""
        rows.append(
            Delta(
                "config",
                "config.json",
                key,
                "changed" if key in theirs else "added",
                f"config.json:{lines.get(key, 1)}",
                donor_place,
                text if len(text) <= LONGEST else text[: LONGEST - 1] + "…",
                f"{key} = {theirs[key][0]}" if key in theirs else "",
                "this checkpoint's value",
                (f"config.{key}",),
            )  # fmt: skip
        )
    return rows


def _equal(source: str, value) -> bool:
    try:
        return ast.literal_eval(source) == value
    except (ValueError, SyntaxError):
        return False


def _lines(file: Path) -> dict[str, int]:
    """key -> the first line of the file that has it."""
    found: dict[str, int] = {}
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith('"'):
            found.setdefault(line.split('"')[1], number)
    return found
