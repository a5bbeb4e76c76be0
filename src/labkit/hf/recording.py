"""Record every module of a PyTorch reference during one forward, and the points inside attention that no module marks.

Names are the reference's module paths without the base model's prefix (`model.`). A module that fires again in the same forward is recorded as `name#1`,
`name#2`, and so on. Besides modules, the modeling file's own functions are wrapped while the recording lasts: rotary application gives `<attention>.q_rope` and
`.k_rope`, the attention function `<attention>.attn`, each `[batch, length, heads, head_dim]`. A file without such functions has no such record.
"""

import inspect
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Capture:
    """One forward of the reference.

    inputs: first array argument of each module (and queries, keys before rotation under `<attention>.q_rope`, `.k_rope`). outputs: what each module
    returned, a tuple by its first array; a router by its logits, its choice under `<router>.indices` and `<router>.weights`. fires: calls per module.
    classes: the class of each module. functions: the wrapped function behind each point. weighted: modules with parameters of their own. biases: module ->
    [features], of those that add one to a product with their `weight`. silent: modules with parameters that never ran. model_class: the class of the whole.
    """

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    fires: dict[str, int] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    functions: dict[str, object] = field(default_factory=dict)
    weighted: set[str] = field(default_factory=set)
    biases: dict[str, np.ndarray] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    model_class: type | None = None


def to_numpy(tensor) -> np.ndarray:
    """A copy of a tensor as numpy; bfloat16 and float16 widen to float32, which holds them exactly."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.to(torch.float32)
    return tensor.cpu().clone().numpy()


def short_name(name: str, prefix: str, layers: str = "") -> str:
    """A module path as the lab writes it: without the prefix of the model that runs the layers, which are called `layers` whatever the reference calls them."""
    if layers and (name == layers or name.startswith(layers + ".")):
        return "layers" + name[len(layers) :]
    parts = prefix.split(".") if prefix else []
    for end in range(len(parts), 0, -1):
        begin = ".".join(parts[:end]) + "."
        if name.startswith(begin):
            return name[len(begin) :]
    return name


def layers_path(model) -> str:
    """The path of the list that holds the decoder's layers, "" when no list is as long as the config says."""
    import torch

    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (sum(1 for _ in module.modules()), path) for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    return max(lists)[1] if lists else ""


def _tensors(value):
    """The tensors of a module's result, in order; dataclass-like outputs and nested tuples are flattened."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _first_input(args, kwargs):
    for value in (*args, *(kwargs[k] for k in ("hidden_states", "x", "input", "input_ids", "inputs_embeds") if k in kwargs), *kwargs.values()):
        tensors = _tensors(value) if not isinstance(value, (list, tuple, dict)) else []
        if tensors:
            return tensors[0]
    return None


def _is_router(tensors) -> bool:
    """A choice of experts: some integer tensor [tokens, k] and a float tensor of the same shape."""
    whole = [t for t in tensors if not t.is_floating_point() and t.ndim == 2]
    return bool(whole) and any(t.is_floating_point() and t.shape == whole[0].shape for t in tensors)


class _Recorder:
    def __init__(self, model):
        self.model, self.capture, self.stack = model, Capture(), []

    def before(self, name):
        def hook(module, args, kwargs):
            self.stack.append(name)
            tensor = _first_input(args, kwargs)
            if tensor is not None:
                self.capture.inputs[self.numbered(name)] = to_numpy(tensor)

        return hook

    def after(self, name):
        def hook(module, args, kwargs, result):
            self.stack.pop()
            key, tensors = self.numbered(name), _tensors(result)
            self.capture.fires[name] = self.capture.fires.get(name, 0) + 1
            if not tensors:
                return
            if isinstance(result, (list, tuple)) and _is_router(tensors):
                choice = next(t for t in tensors if not t.is_floating_point() and t.ndim == 2)
                floats = [t for t in tensors if t.is_floating_point()]
                logits = next((t for t in floats if t.shape != choice.shape), floats[0])
                weights = next(t for t in floats if t.shape == choice.shape)
                self.capture.outputs |= {key: to_numpy(logits), key + ".indices": to_numpy(choice), key + ".weights": to_numpy(weights)}
            else:
                self.capture.outputs[key] = to_numpy(tensors[0])

        return hook

    def numbered(self, name):
        count = self.capture.fires.get(name, 0)
        return f"{name}#{count}" if count else name

    def point(self, tag, value, before=None, function=None):
        """A value inside the module that is running now."""
        if not self.stack:
            return
        key = self.numbered(f"{self.numbered(self.stack[-1])}.{tag}")
        self.capture.fires[key] = self.capture.fires.get(key, 0) + 1
        self.capture.outputs[key] = value
        self.capture.functions[key] = function
        if before is not None:
            self.capture.inputs[key] = before

    def wrap_rotary(self, function):
        heads_first = _argument(function, "unsqueeze_dim", 1)

        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            axis = heads_first(args, kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            for position, output in enumerate(outputs[:2]):
                if output is None or output.ndim != 4:
                    continue
                tag = ("q_rope", "k_rope")[position] if len(outputs) > 1 else ("q_rope" if self._first_rotation() else "k_rope")
                layout = lambda t: to_numpy(t.transpose(1, 2) if axis == 1 else t)
                source = args[position] if len(args) > position and hasattr(args[position], "ndim") and args[position].ndim == 4 else None
                self.point(tag, layout(output), None if source is None else layout(source), function)
            return result

        return wrapped

    def _first_rotation(self):
        return bool(self.stack) and f"{self.stack[-1]}.q_rope" not in self.capture.outputs

    def wrap_attention(self, function):
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            if output.ndim == 4:
                self.point("attn", to_numpy(output), function=function)
            return result

        return wrapped


def _bias_of_product(module):
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return bias if getattr(weight, "ndim", 0) == 2 and getattr(bias, "ndim", 0) == 1 else None


def _argument(function, name, default):
    """A reader of one argument of a call of `function`, by keyword, by position, or by its default."""
    parameters = inspect.signature(function).parameters
    if name not in parameters:
        return lambda args, kwargs: default
    position, declared = list(parameters).index(name), parameters[name].default
    return lambda args, kwargs: kwargs.get(name, args[position] if len(args) > position else declared)


def modeling_modules(model) -> list:
    """The Python modules that define the classes of `model`, transformers' shared files and torch left out."""
    names = {type(m).__module__ for m in model.modules()}
    return [sys.modules[n] for n in sorted(names) if n.startswith(("transformers.models.", "transformers_modules."))]


@contextmanager
def recording(model):
    """Record one forward of `model` (a transformers causal LM) into the `Capture` that this yields; every hook and wrapper is gone afterwards."""
    recorder, layers = _Recorder(model), layers_path(model)
    prefix = layers.rpartition(".")[0] or getattr(model, "base_model_prefix", "")
    spine = {".".join(prefix.split(".")[:end]) for end in range(len(prefix.split(".")) + 1)}
    recorder.capture.model_class = type(model)
    handles, replaced = [], []
    try:
        for path, module in model.named_modules():
            if path in spine:
                continue
            name = short_name(path, prefix, layers)
            recorder.capture.classes[name] = type(module)
            if next(module.parameters(recurse=False), None) is not None:
                recorder.capture.weighted.add(name)
            if (bias := _bias_of_product(module)) is not None:
                recorder.capture.biases[name] = to_numpy(bias)
            handles.append(module.register_forward_pre_hook(recorder.before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.after(name), with_kwargs=True))
        for file in modeling_modules(model):
            for attribute, value in list(vars(file).items()):
                wrap = None
                if inspect.isfunction(value) and attribute.startswith(("apply_rotary", "apply_multimodal_rotary")):
                    wrap = recorder.wrap_rotary
                elif inspect.isfunction(value) and attribute.endswith("eager_attention_forward"):
                    wrap = recorder.wrap_attention
                if wrap is not None:
                    replaced.append((file, attribute, value))
                    setattr(file, attribute, wrap(value))
        yield recorder.capture
        recorder.capture.silent = sorted(n for n in recorder.capture.weighted if not recorder.capture.fires.get(n))
    finally:
        for handle in handles:
            handle.remove()
        for file, attribute, value in replaced:
            setattr(file, attribute, value)
