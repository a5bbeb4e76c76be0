"""Small configurations of a model type that together run the optional branches of its reference, found by watching which branches they run."""

import itertools
import json

from labkit.errors import InputError, LabError
from labkit.hf.cached_decoding import decode_with_cache
from labkit.hf.quiet import quiet_transformers
from labkit.hf.threads import one_thread
from labkit.hf.tiny import TRIAL, parse_tiny, tiny_configs, tiny_directory
from labkit.hf.variant_choices import choices

MAX_VARIANTS = 7
MAX_JOINT = 4  # of them the first one and three that flip as much as goes together
MAX_SINGLES = 24  # choices tried on their own


def record_variants(model_type: str) -> list[str]:
    """Up to 7 spellings `tiny:<model_type>?key=value&...` that `tiny_directory` can build, the plainest first.

    Together they flip the switches and take the other values of keys that the modeling file reads, and run every branch that some of them reaches.
    Runs instrumented copies in this process and leaves the chosen models in the scratch folder.
    Raises InputError for an unknown type, and when no small configuration of the type can be built.
    """
    from labkit.hf.instrumented import instrumented_models
    from labkit.hf.observer import Observer

    parse_tiny(f"tiny:{model_type}")
    observer = Observer()
    with one_thread(), quiet_transformers():
        with instrumented_models(observer):
            found = [_spell(model_type, overrides) for overrides in _Search(model_type, observer).run()]
        return [spelling for spelling in found if _can_be_built(spelling)]


def _can_be_built(spelling: str) -> bool:
    try:
        return bool(tiny_directory(spelling))
    except LabError:
        return False


class _Search:
    def __init__(self, model_type: str, observer):
        self.model_type, self.observer = model_type, observer
        self.known: dict[str, frozenset | None] = {}
        self.failure: LabError | None = None

    def branches(self, overrides: dict) -> frozenset | None:
        """(file, place, truth) of every test and (file, function) that a configuration runs; None when it cannot be built."""
        key = json.dumps(overrides, sort_keys=True)
        if key not in self.known:
            self.known[key] = self._branches(overrides)
        return self.known[key]

    def _branches(self, overrides: dict) -> frozenset | None:
        self.observer.forget()
        try:
            _exercise(_build(self.model_type, overrides))
        except LabError as error:
            self.failure = self.failure or error
            return None
        tables = self.observer.tables()
        tests = {(file, place, truth) for file, places in tables["tests"].items() for place, truths in places.items() for truth in truths}
        return frozenset(tests | {(file, name) for file, counts in tables["functions"].items() for name, count in counts.items() if count})

    def run(self) -> list[dict]:
        found = choices(self.model_type)
        base = next((overrides for overrides in ({}, *found) if self.branches(overrides) is not None), None)
        if base is None:
            raise self.failure
        alone = [(choice, self.branches({**base, **choice})) for choice in found[:MAX_SINGLES] if {**base, **choice} != base]
        plain = self.branches(base)
        # A switch may act without a branch, as a bias does; another value that changes no branch shows nothing new.
        rest = [choice for choice, ran in alone if ran is not None and (not ran <= plain or all(isinstance(value, bool) for value in choice.values()))]
        chosen = [base]
        while rest and len(chosen) < MAX_JOINT:
            joint = self._grow(base, rest)
            placed = [choice for choice in rest if {**joint, **choice} == joint]
            if not placed:
                break
            chosen.append(joint)
            rest = [choice for choice in rest if choice not in placed]
        covered = frozenset().union(*(self.branches(overrides) for overrides in chosen))
        pool = [({**base, **choice}, ran) for choice, ran in alone if ran is not None]
        while pool and len(chosen) < MAX_VARIANTS:
            best, ran = max(pool, key=lambda entry: len(entry[1] - covered))
            if ran <= covered:
                break
            chosen.append(best)
            covered |= ran
        return chosen

    def _grow(self, base: dict, group: list[dict], overrides: dict | None = None) -> dict:
        """As many choices of the group as can be built together, halving a group that cannot. The first choice of a key stays."""
        overrides = base if overrides is None else overrides
        merged, taken = dict(overrides), []
        for choice in group:
            if all(merged[key] == value for key, value in choice.items() if key in merged and merged[key] != base.get(key, ...)):
                merged |= choice
                taken.append(choice)
        if merged == overrides or self.branches(merged) is not None:
            return merged
        if len(taken) == 1:
            return overrides
        half = len(taken) // 2
        return self._grow(base, taken[half:], self._grow(base, taken[:half], overrides))


def _build(model_type: str, overrides: dict):
    """An untrained model of the first configuration that runs, among the first few that `tiny_directory` tries. Raises InputError when none does."""
    import torch
    from transformers import AutoModelForCausalLM

    where, failure = _spell(model_type, overrides), None
    for config in itertools.islice(tiny_configs(model_type, overrides, where), 40):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
            for module in model.modules():
                if hasattr(getattr(module, "config", None), "_experts_implementation"):
                    module.config._experts_implementation = "eager"
            with torch.no_grad():
                model(input_ids=torch.arange(TRIAL)[None] % config.get_text_config(decoder=True).vocab_size, use_cache=False)
            return model
        except Exception as error:
            failure = failure or InputError(f"The reference cannot run with these values: {type(error).__name__}: {str(error)[:300]}", where)
    raise failure


def _exercise(model):
    """Cached decoding and left padding, as a record runs them; what a model cannot do is left out."""
    import torch

    model.requires_grad_(False)
    tokens = (torch.arange(20) % model.get_input_embeddings().weight.shape[0]).reshape(2, 10)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    for run in (lambda: decode_with_cache(model, tokens), lambda: model(input_ids=tokens, attention_mask=mask, use_cache=False)):
        try:
            with torch.no_grad():
                run()
        except Exception:  # the record itself notes which runs the reference refuses
            continue


def _spell(model_type: str, overrides: dict) -> str:
    query = "&".join(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in overrides.items())
    return f"tiny:{model_type}" + (f"?{query}" if query else "")
