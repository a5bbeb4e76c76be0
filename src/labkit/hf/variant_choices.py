"""Which other values of which config keys are worth trying: read from the config class and from the conditions in the modeling file."""

import ast
import typing

from labkit.hf import architectures
from labkit.hf.tiny_rules import LAYERS, ROPE_THETA, SIZES

# Switches that choose what is returned or which kernel runs, not what is computed.
_ASIDE = frozenset(
    "use_sliding_window use_cache output_hidden_states output_attentions output_router_logits return_dict torchscript is_encoder_decoder is_decoder "
    "add_cross_attention use_mamba_kernels use_mambapy use_associative_scan use_bidirectional_attention slow_but_exact reorder_and_upcast_attn "
    "problem_type dtype gradient_checkpointing hidden_act hidden_activation activation_function pad_token_id bos_token_id eos_token_id "
    "sep_token_id decoder_start_token_id".split()
)
_READ_ELSEWHERE = ("tie_word_embeddings", "rope_parameters")
_LAYERS = ("layer_types", "layers_block_type")
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80, "mscale": 1.2, "mscale_all_dim": 0.8}


def choices(model_type: str) -> list[dict]:
    """Small sets of overrides, each another value than the tiny model's of one key and of those that go with it; kinds of layers first.

    Imports the config class. Raises InputError when it accepts no tiny values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from labkit.hf.tiny import tiny_configs

    file = architectures.modeling_file(model_type)
    if file is None:
        return []
    tree = ast.parse(file.read_text())
    config_class = CONFIG_MAPPING[model_type]
    values = next(iter(tiny_configs(model_type, {}))).to_dict()
    annotations, conditions = _annotations(config_class), _conditions(tree)
    strings = _strings(tree)
    reads = strings | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    aliases: dict[str, set] = {}
    for alias, key in (getattr(config_class, "attribute_map", None) or {}).items():
        aliases.setdefault(key, set()).add(alias)
    found = _layer_choices(values, strings)
    for key, value in values.items():
        names = {key} | aliases.get(key, set())
        if key not in _ASIDE and not key.startswith(("_", "summary_")) and (names & reads or key in _READ_ELSEWHERE):
            compared = [conditions[name] for name in names if name in conditions]
            found += [{key: other} for other in _others(key, value, annotations.get(key, ""), bool(compared), set().union(*compared))]
    if values.get("use_sliding_window") is False:
        # Layers from `max_window_layers` on are the sliding ones.
        later = {"max_window_layers": 2} if "max_window_layers" in values else {}
        found.append({"use_sliding_window": True, "sliding_window": 7, **later})
    if "n_group" in values and "topk_group" in values:
        found.append({"n_group": 1, "topk_group": 1})
    for key, default in _optional_switches(tree).items():
        if key not in values and key in architectures.optional_keys(model_type) and key not in _ASIDE:
            found.append({key: not default})
    return found


def layer_kinds(model_type: str) -> list[dict]:
    """The choices that say which kind each layer is, in the order of `choices`; raises as it does."""
    return [choice for choice in choices(model_type) if any(key in choice for key in _LAYERS)]


def _others(key: str, value, annotation: str, tested: bool, compared: set[str]) -> list:
    """Other values of one key. tested: a condition of the file mentions it; compared: the strings that it is compared with there."""
    if isinstance(value, bool):
        return [not value]
    if key == "rope_parameters":
        return _ropes(value)
    if value is None:
        return [True] if "bool" in annotation else [0.5] if "float" in annotation else [SIZES.get(key, 4)] if "int" in annotation and tested else []
    if not tested or key in _LAYERS or any(word in key for word in ("drop", "jitter")):
        return []
    if isinstance(value, str):
        return sorted(compared - {value})
    if value == list(range(LAYERS)):
        return [value[1::2]]  # a list of the layers that are of a kind, and they all are
    if isinstance(value, list):
        return [[]] if value and not isinstance(value[0], list) and len(value) != LAYERS else []
    others = [None] if "None" in annotation else []
    if isinstance(value, int) and key.endswith(("step", "freq", "period", "interval")):
        others += [2] if value == 1 else []
    elif isinstance(value, (int, float)) and (key not in SIZES or any(word in key for word in ("shared", "dense"))):
        others += [0] if value else [1, 2]
    return others


def _layer_choices(values: dict, strings: set[str]) -> list[dict]:
    """The kinds of layers that the file names, in turn, where the tiny stack does not show them so; with and without layers that share keys and values."""
    from transformers import configuration_utils

    found = []
    for key in _LAYERS:
        value = values.get(key)
        if key not in values or not (value is None or isinstance(value, list)):
            continue
        shown = list(dict.fromkeys(value or ()))
        named = [kind for kind in getattr(configuration_utils, "ALLOWED_LAYER_TYPES", ()) if kind in strings]
        for kinds in (shown, list(dict.fromkeys([*shown, *named]))):
            pattern = [kinds[layer % len(kinds)] for layer in range(LAYERS)] if kinds else value
            shared = {"num_kv_shared_layers": 2} if "num_kv_shared_layers" in values else {}
            if (pattern != value or shared) and {**shared, key: pattern} not in found:
                found.append({**shared, key: pattern})
    return found + ([{"num_kv_shared_layers": 0}] if "num_kv_shared_layers" in values else [])


def _ropes(value) -> list[dict]:
    if not isinstance(value, dict):
        return []
    if any(isinstance(table, dict) for table in value.values()):
        nested = {kind: {**table, **_YARN} if isinstance(table, dict) and "full" in kind else table for kind, table in value.items()}
        return [nested] if nested != value else []
    theta = value.get("rope_theta", ROPE_THETA)
    return [{**value, **_YARN, "rope_theta": theta}] if value.get("rope_type", "default") == "default" else [{**value, "rope_type": "default"}]


def _annotations(config_class) -> dict[str, str]:
    found: dict[str, str] = {}
    for parent in reversed(config_class.__mro__):
        found |= {
            key: str(annotation)
            for key, annotation in parent.__dict__.get("__annotations__", {}).items()
            if typing.get_origin(annotation) is not typing.ClassVar
        }
    return found


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _conditions(tree: ast.AST) -> dict[str, set[str]]:
    """Names that conditions mention -> strings that they are compared with there."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests = [node.test]
        else:
            tests = node.values if isinstance(node, ast.BoolOp) else [node] if isinstance(node, ast.Compare) else []
        for test in tests:
            strings = _strings(test)
            names = {inner.attr if isinstance(inner, ast.Attribute) else inner.id for inner in ast.walk(test) if isinstance(inner, (ast.Attribute, ast.Name))}
            for name in names | strings:
                found.setdefault(name, set()).update(strings if isinstance(test, ast.Compare) and name not in strings else ())
    return found


def _optional_switches(tree: ast.AST) -> dict[str, bool]:
    """Keys read as `getattr(config, "key", True or False)`."""
    return {
        node.args[1].value: node.args[2].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3
        if isinstance(node.args[1], ast.Constant) and isinstance(node.args[2], ast.Constant) and isinstance(node.args[2].value, bool)
    }
