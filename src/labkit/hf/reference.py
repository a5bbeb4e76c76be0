"""The reference: the installed Hugging Face PyTorch model of a directory, in float64, float32 or bfloat16.

`transformers` does the loading, published tensor names included; the lab checks that it loaded what is stored, to the bit, and nothing else: a reference that
kept a random tensor would make a wrong port look right, or a right one wrong.
"""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from labkit.errors import BlockedError, InputError, LabError
from labkit.hf.exact import exact_mode
from labkit.hf.quiet import quiet_transformers
from labkit.hf.recording import Capture, recording, to_numpy
from labkit.hf.tensors import holds_non_finite

MODES = {"exact": "float64", "float32": "float32", "bfloat16": "bfloat16"}


class Reference:
    """A loaded reference. Build it with `Reference.load`.

    model: the torch module. mode: "exact", "float32" or "bfloat16". dtype: its name. findings: what the check of the weights has to report.
    """

    def __init__(self, model, mode: str, path: Path, findings: list[str]):
        self.model, self.mode, self.path, self.findings = model, mode, path, findings
        self.dtype = MODES[mode]

    @classmethod
    def load(cls, path, mode: str = "exact", *, attention: str = "eager", trust_remote_code: bool = False, verify: bool = True) -> "Reference":
        """Load the causal LM in directory `path` (or a `Source`).

        attention: "eager" (the file's own attention function, which captures need) or another implementation of transformers. verify: compare every
        parameter with the stored tensor. Raises InputError when the directory does not hold exactly the model's tensors, BlockedError when transformers
        has no causal LM for it.
        """
        if mode not in MODES:
            raise InputError(f"unknown reference mode {mode!r}", next=f"use one of {', '.join(MODES)}")
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = Path(getattr(path, "path", path))
        with quiet_transformers(), exact_mode() if mode == "exact" else nullcontext():
            try:
                config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
                model, info = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    dtype=getattr(torch, MODES[mode]),
                    attn_implementation=attention,
                    output_loading_info=True,
                    trust_remote_code=trust_remote_code,
                    use_safetensors=True,
                    local_files_only=True,
                    ignore_mismatched_sizes=True,
                )
            except (ValueError, KeyError, OSError, RuntimeError) as error:
                kind = BlockedError if "Unrecognized" in str(error) or "does not recognize" in str(error) else InputError
                raise kind(
                    f"transformers cannot load the reference: {str(error).splitlines()[0][:300]}",
                    str(path),
                    "open the directory with `labkit inspect`, which names what is missing",
                ) from error
        _refuse_incomplete(info, path)
        model.eval().requires_grad_(False)
        for module in model.modules():
            if getattr(module, "config", None) is not None and hasattr(module.config, "_experts_implementation"):
                module.config._experts_implementation = "eager"
        findings = _compare_with_disk(model, path) if verify else []
        head = model.get_output_embeddings()
        if getattr(config, "tie_word_embeddings", False) and head is not None and head.weight is not model.get_input_embeddings().weight:
            findings.append("the config ties the head to the embedding, the checkpoint stores a head that differs, and transformers runs with the stored head")
        if mode == "exact":
            _refuse_narrow(model, path)
        return cls(model, mode, path, findings)

    @contextmanager
    def _running(self):
        import torch

        with torch.no_grad(), exact_mode() if self.mode == "exact" else nullcontext():
            yield

    def _arguments(self, tokens, attention_mask):
        import inspect

        import torch

        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(f"tokens must be whole numbers [batch, length], not {tokens.dtype} {tokens.shape}")
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= vocab:
            raise InputError(
                f"token ids must lie in 0..{vocab - 1}", f"tokens {tokens.shape}, " + (f"range {tokens.min()}..{tokens.max()}" if tokens.size else "empty")
            )
        arguments = {"input_ids": torch.from_numpy(tokens.astype(np.int64))}
        if attention_mask is not None:
            mask = torch.from_numpy(np.asarray(attention_mask).astype(np.int64))
            if mask.shape != arguments["input_ids"].shape:
                raise InputError(f"attention_mask {tuple(mask.shape)} does not fit tokens {tokens.shape}")
            arguments["attention_mask"] = mask
            if "position_ids" in inspect.signature(self.model.forward).parameters:
                arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return arguments

    def logits(self, tokens, attention_mask=None) -> np.ndarray:
        """Logits [batch, length, vocab] of tokens [batch, length]; float64 in exact mode, else float32 (bfloat16 values widened). Teacher-forced, no cache."""
        with self._running():
            logits = to_numpy(self.model(**self._arguments(tokens, attention_mask), use_cache=False).logits)
        return _finite(logits, self)

    def cached_logits(self, tokens, pieces, attention_mask=None) -> list[np.ndarray]:
        """As `logits`, [batch, piece, vocab] for each of the pieces that tokens are given in through the reference's own cache. Raises what the
        model raises."""
        from labkit.hf.cached_decoding import decode_in_pieces

        arguments = self._arguments(tokens, attention_mask)
        with self._running():
            parts = decode_in_pieces(self.model, arguments["input_ids"], pieces, arguments.get("attention_mask"))
        return [_finite(to_numpy(part), self) for part in parts]

    def capture(self, tokens, attention_mask=None) -> Capture:
        """One forward with every module recorded; the logits are in `outputs["logits"]`."""
        with self._running(), recording(self.model) as capture:
            logits = self.model(**self._arguments(tokens, attention_mask), use_cache=False).logits
        capture.outputs["logits"] = _finite(to_numpy(logits), self)
        again = sorted(n for n, count in capture.fires.items() if count > 1 and n in capture.weighted)
        if not capture.fires:
            raise LabError("no module of the reference fired a hook", type(self.model).__name__, "this is a fault of the lab's recorder")
        if again:
            self.note(f"{len(again)} modules of the reference run more than once per forward, such as {again[0]}")
        if capture.silent:
            self.note(f"{len(capture.silent)} modules of the reference with weights never ran, such as {capture.silent[0]}")
        return capture

    def note(self, finding: str):
        """Add a finding once."""
        if finding not in self.findings:
            self.findings.append(finding)

    def greedy(self, tokens, steps: int) -> np.ndarray:
        """tokens [1, length] and `steps` greedy continuations [1, length + steps]: no sampling, no penalties, and the end token does not stop it."""
        return self.greedy_trace(tokens, steps)[0]

    def greedy_trace(self, tokens, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """`greedy`, and the logits [steps, vocab] that each choice was made from."""
        from transformers import GenerationConfig

        arguments = self._arguments(tokens, None)
        if arguments["input_ids"].shape[0] != 1 or steps < 1:
            raise InputError("greedy takes one row of tokens and at least one step", f"tokens {arguments['input_ids'].shape}, steps {steps}")
        import torch

        before = self.model.generation_config
        # The model's own generation config may hold penalties, stop tokens and sampling: generate falls back on it for every unset value.
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            with self._running(), quiet_transformers():
                result = self.model.generate(
                    **arguments,
                    attention_mask=torch.ones_like(arguments["input_ids"]),
                    max_new_tokens=steps,
                    do_sample=False,
                    use_cache=True,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
        finally:
            self.model.generation_config = before
        return to_numpy(result.sequences), np.concatenate([to_numpy(step) for step in result.logits])


def _refuse_incomplete(info: dict, path: Path):
    problems = {
        kind: sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(kind) or ())
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    for kind, names in problems.items():
        if names:
            text = {
                "missing_keys": "the reference needs tensors that the checkpoint lacks",
                "unexpected_keys": "the checkpoint holds tensors that the reference does not use",
                "mismatched_keys": "tensors have another shape than the reference's",
                "error_msgs": "the reference reports errors while loading",
            }[kind]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise InputError(
                f"{text}: {shown}", str(path), "a reference with unset or unread weights proves nothing; complete the checkpoint or correct its config"
            )


def _refuse_narrow(model, path: Path):
    """A scalar constant that the source itself rounds (`torch.tensor(x, dtype=torch.bfloat16)`, saved nowhere) is part of the model's definition and
    may stay."""
    import torch

    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        constant = name not in saved and tensor.numel() == 1
        if tensor.is_floating_point() and tensor.dtype is not torch.float64 and not constant:
            raise LabError(
                f"the exact reference keeps {name} in {str(tensor.dtype).removeprefix('torch.')}",
                str(path),
                "report this family: its exact mode needs another lift",
            )


def _compare_with_disk(model, path: Path) -> list[str]:
    """Every stored tensor against the loaded model under its published name. Returns findings; raises InputError at the first that differs, or that holds NaN
    or infinity: NaN equals nothing, itself included, and logits of either prove nothing."""
    import torch
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion

    # Read the state outside of exact mode: reverting only renames, splits and transposes.
    state = model.state_dict()
    try:
        published = revert_weight_conversion(model, dict(state))
    except Exception as error:
        raise LabError(f"transformers cannot name the loaded tensors as published: {error}", str(path), "report this family") from error
    findings, buffers = [], {name for name, _ in model.named_buffers()}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                loaded = published.get(name, state.get(name))
                if loaded is None:
                    findings.append(f"{name} is stored and the reference does not use it")
                    continue
                stored = file.get_tensor(name)
                # Buffers may hold infinity by design (masks); what was trained may not.
                if name not in buffers or not torch.equal(stored, stored):
                    _refuse_non_finite(name, stored, shard)
                if stored.shape != loaded.shape or not torch.equal(stored.to(loaded.dtype), loaded):
                    raise InputError(
                        f"the reference did not load {name} as it is stored",
                        str(shard),
                        "the file may store another layout than this version of transformers reads",
                    )
    return findings


def _refuse_non_finite(name: str, tensor, shard: Path):
    """Raises InputError at the first NaN or infinity of a stored tensor."""
    import torch

    if not tensor.is_floating_point():
        return
    finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
    if not finite.all():
        index = torch.nonzero(~finite)[0].tolist()
        raise holds_non_finite(name, tensor.shape, tensor[tuple(index)], index, shard)


def _finite(logits: np.ndarray, reference: Reference) -> np.ndarray:
    if not np.isfinite(logits).all():
        raise InputError("the reference's logits are not finite", f"{reference.path}, mode {reference.mode}", "check the weights for NaN and infinite values")
    return logits
