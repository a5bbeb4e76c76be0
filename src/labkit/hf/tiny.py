"""`tiny:<model_type>[?key=value&...]`: a small random checkpoint, the same for the same text, saved by the reference itself."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from labkit.errors import InputError
from labkit.hf import architectures
from labkit.hf.quiet import quiet_transformers
from labkit.hf.scratch import ensure_free, scratch_dir
from labkit.hf.tiny_rules import candidates
from labkit.hf.tiny_weights import fill_weights, widen_computed_buffers

MAX_PARAMETERS = 200_000_000
TRIAL = 24  # tokens of the run that every new tiny model must survive; beyond its window
FORMS = "tiny:<model_type> or tiny:<model_type>?num_hidden_layers=5&norm_topk_prob=true&seed=1"


def parse_tiny(model: str) -> tuple[str, dict, int]:
    """(model_type, overrides, seed) of a tiny name; keys are checked when the config is built. Raises InputError for an unknown type or a bad override."""
    model_type, _, query = model.removeprefix("tiny:").partition("?")
    causal = architectures.causal_lm_classes()
    if model_type not in causal or model_type not in architectures.config_classes():
        raise InputError(
            f"{model_type!r} is no causal LM of the installed transformers",
            model,
            architectures.suggestion(model_type, causal) or "`tiny:llama` is a type that works",
        )
    overrides: dict = {}
    for pair in filter(None, query.split("&")):
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{pair!r} is not key=value", model, f"Write {FORMS}")
        if key in overrides:
            raise InputError(f"The key {key} is given twice", model, "Give it once")
        try:
            overrides[key] = json.loads(text)
        except ValueError:
            overrides[key] = text
    seed = overrides.pop("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}, not a whole number", model, "Write seed=1")
    return model_type, overrides, seed


def tiny_directory(model: str, scratch: str | os.PathLike | None = None) -> Path:
    """The checkpoint's directory in the scratch folder, generated when it is not there. Raises InputError for a bad name, key or value."""
    model_type, overrides, seed = parse_tiny(model)
    folder = scratch_dir(scratch) / "tiny"
    folder.mkdir(exist_ok=True)
    out = folder / f"{model_type}-{_cache_key(overrides, seed)}"
    if (out / "config.json").is_file():
        return out
    with FileLock(f"{out}.lock"):
        if not (out / "config.json").is_file():
            _build(model, model_type, overrides, seed, out)
    return out


def _cache_key(overrides: dict, seed: int) -> str:
    """Changes with the request, with the rules below and with the installed versions that turn them into numbers."""
    from importlib.metadata import version

    here = Path(__file__).parent
    rules = "".join((here / name).read_text() for name in ("tiny.py", "tiny_rules.py", "tiny_weights.py"))
    text = json.dumps([overrides, seed, rules, version("transformers"), version("torch")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tiny_configs(model_type: str, overrides: dict, where: str = "") -> Iterator:
    """transformers config objects of a tiny model, first choice first.

    Raises InputError naming a key that the class does not know, or saying why the class refuses the first choice.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    try:
        defaults = config_class().to_dict()
    except Exception as error:
        raise InputError(f"{config_class.__name__} has no defaults to start from: {' '.join(str(error).split())[:300]}", where, "Choose another type") from None
    optional = architectures.optional_keys(model_type)
    known = set(defaults) | set(config_class.attribute_map) | optional | {"rope_theta", "rope_scaling"}
    for key in overrides:
        if key not in known:
            raise InputError(
                f"{config_class.__name__} has no key {key!r}", where, architectures.suggestion(key, known) or "See the class's documentation for its keys"
            )
    overrides = {config_class.attribute_map.get(key, key): value for key, value in overrides.items()}
    refusal, accepted = None, False
    for values in candidates(defaults, optional):
        values = {**values, **overrides}
        if "rope_parameters" not in overrides and ("rope_theta" in overrides or "rope_scaling" in overrides):
            theta = overrides.get("rope_theta", (values.get("rope_parameters") or {}).get("rope_theta"))
            values["rope_parameters"] = {**(overrides.get("rope_scaling") or {}), "rope_theta": theta}
            values = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
        try:
            config = config_class(**values)
        except Exception as error:
            refusal = refusal or f"{config_class.__name__} refuses these values: {' '.join(str(error).split())[:300]}"
            continue
        accepted = True
        yield config
    if not accepted:
        raise InputError(refusal, where, "Change the keys that it names")


def build_tiny(model_type: str, overrides: dict, seed: int, where: str = ""):
    """The reference model of the first configuration that it can run, with weights filled. Raises InputError with the first choice's failure."""
    import torch
    from transformers import AutoModelForCausalLM

    failure = None
    with quiet_transformers():
        for config in tiny_configs(model_type, overrides, where):
            try:
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config, dtype=torch.float32).parameters())
                if size > MAX_PARAMETERS:
                    raise InputError(f"This is not tiny: {size:,} parameters, more than {MAX_PARAMETERS:,}", where, "Make its sizes smaller")
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
                computed = fill_weights(network, seed)
                with torch.no_grad():
                    logits = network(input_ids=torch.arange(TRIAL)[None] % config.get_text_config(decoder=True).vocab_size, use_cache=False).logits
                if not torch.isfinite(logits).all():
                    raise ValueError("the logits are not finite")
                widen_computed_buffers(network, computed)
                return network
            except InputError as error:
                failure = failure or error
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                failure = failure or InputError(f"The reference cannot run with these values: {reason}", where, "Change the overrides")
    raise failure


def _build(model: str, model_type: str, overrides: dict, seed: int, out: Path) -> None:
    network = build_tiny(model_type, overrides, seed, model)
    ensure_free(out.parent, 5 * sum(parameter.numel() for parameter in network.parameters()))
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with quiet_transformers():
            network.save_pretrained(temporary)
        (temporary / "generation_config.json").unlink(missing_ok=True)
        os.replace(temporary, out)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise InputError(f"The reference cannot save this model: {reason}", model, "Change the overrides, or choose another type") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
