"""Random weights without neutral values: every norm, bias, router and multiplier changes the result."""


def fill_weights(network, seed: int) -> list[str]:
    """Overwrites the parameters and saved buffers of a freshly built reference model, deterministically in the order of their names.

    Returns the names of the buffers that it leaves because the constructor computes them.

    Embeddings: normal, narrower where they are also the head, so that logits stay moderate.
    Other matrices: normal, scaled by 1 / sqrt(fan in), so that every sublayer weighs as much as its residual.
    Vectors, and matrices that the reference initialises to a pattern (state-space decays and the like): what the reference chose, times and plus
    noise, so a norm weight is near 1 (or 0) and never equal to it.
    Buffers that the constructor computes (decays of a linear attention) stay as they are: they depend on each other.
    Other buffers are moved upwards only: a router adds them to scores and may put 0 where an expert is out; below 0 it would choose among those, a tie.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)

    def normal(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, torch.nn.Embedding)}
    head = getattr(network.get_output_embeddings(), "weight", None)
    saved = network.state_dict(keep_vars=True)
    buffers = {id(buffer) for buffer in network.buffers()}
    seen, computed = set(), []
    with torch.no_grad():
        for name in sorted(saved):
            value = saved[name]
            if not value.is_floating_point() or value.data_ptr() in seen or value.numel() == 0:
                continue
            seen.add(value.data_ptr())
            if id(value) in buffers and value.unique().numel() > 2:
                computed.append(name)
                continue
            if id(value) in embeddings:
                value.copy_(normal(value.shape) * (0.3 if value is head else 1.0))
            elif value.ndim >= 2 and _drawn_at_random(value):
                value.copy_(normal(value.shape) / _fan_in(name, value) ** 0.5)
            else:
                noise, shift = normal(value.shape), normal(value.shape)
                value.copy_(value * (1 + 0.2 * noise) + 0.25 * _unit(value) * (shift.abs() if id(value) in buffers else shift))
        _as_loading_leaves_them(network, saved)
    return computed


def widen_computed_buffers(network, names: list[str]) -> None:
    """These buffers in float64: a linear attention computes several decays from one slope, and if each were rounded alone, they would contradict each other."""
    import torch
    from transformers import AutoModelForCausalLM

    from labkit.hf.exact import exact_mode

    if not names:
        return
    with exact_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exact = AutoModelForCausalLM.from_config(network.config, dtype=torch.float64, attn_implementation="eager")
    for name in names:
        path, _, leaf = name.rpartition(".")
        network.get_submodule(path)._buffers[leaf] = exact.get_submodule(path)._buffers[leaf]


def _as_loading_leaves_them(network, saved) -> None:
    """Elements of saved buffers that the reference sets whenever it loads, whatever the file says (`module.biases[-1] = -1.0`), hold that value."""
    distinct = {id(value): value for value in saved.values()}.values()
    for value in distinct:
        value._is_hf_initialized = True
    for module in network.modules():
        if any(buffer is not None and name not in module._non_persistent_buffers_set for name, buffer in module._buffers.items()):
            network._init_weights(module)
    for value in distinct:
        del value._is_hf_initialized


def _unit(value) -> float:
    """1, and for a small constant that the reference divides by (a scaled parameter) that constant."""
    first = abs(float(value.flatten()[0]))
    return first if 0.005 < first < 0.25 and bool((value == value.flatten()[0]).all()) else 1.0


def _drawn_at_random(value) -> bool:
    """True for values with a mean near zero that are not all alike: what an initialiser draws, as against a ramp or a constant."""
    spread = float(value.std())
    return spread > 0 and abs(float(value.mean())) < 0.6 * spread


def _fan_in(name: str, value) -> int:
    """[out, in] for linears, [experts, ...] for fused experts, [out, in / groups, kernel] for convolutions."""
    if value.ndim == 3 and "conv" in name:
        return value.shape[1] * value.shape[2]
    return value.shape[-1]
