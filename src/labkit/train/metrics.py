"""What a training run reports of each update, and the file that keeps it: one JSON object per line."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np


def router_metrics(aux: dict) -> dict:
    """From a mixture's aux: expert_load [layers, experts], the share of a layer's choices that fell on each expert, and router_entropy [], nats per token,
    the mean over mixture layers. Empty for a dense model; each only where the slice reports what it takes."""
    found = {}
    if "tokens_per_expert" in aux:
        chosen = aux["tokens_per_expert"]
        found["expert_load"] = chosen / jnp.maximum(jnp.sum(chosen, -1, keepdims=True), jnp.finfo(chosen.dtype).tiny)
    if "router_entropy" in aux:
        found["router_entropy"] = jnp.mean(aux["router_entropy"])
    return found


def step_record(step: int, metrics: dict, seconds: float, *, tflops: float | None = None, peak_tflops: float | None = None) -> dict:
    """One line of the metrics file, plain data.

    metrics: of `train_step`, on the host. seconds: of this update. tflops: of one update on one device. peak_tflops: of one device, None where it is not known
    (CPU), and then there is no mfu. expert_load becomes its mean over layers, and max_expert_load, the largest share times the number of experts: 1 is even.
    """
    record = {"step": step}
    for name in ("loss", "gradient_norm", "learning_rate", "moe_lb_loss", "router_entropy"):
        if name in metrics:
            record[name] = float(metrics[name])
    record["tokens"] = int(metrics["tokens"])
    if "expert_load" in metrics:
        load = np.asarray(metrics["expert_load"], np.float64)
        record["expert_load"] = [round(float(share), 6) for share in load.mean(0)]
        record["max_expert_load"] = float(load.max() * load.shape[-1])
    record["seconds"] = seconds
    record["tokens_per_second"] = record["tokens"] / seconds
    if tflops is not None:
        record["tflops_per_second_and_device"] = tflops / seconds
        record["mfu"] = None if peak_tflops is None else tflops / seconds / peak_tflops
    return record


class MetricsFile:
    """The lines of a run. Opened at a step it drops the lines after it, and a last line that a kill cut short."""

    def __init__(self, path: str | os.PathLike, step: int = 0):
        self.path = Path(path)
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        temporary = self.path.with_name(f".{self.path.name}.part")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def add(self, record: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The whole lines of a metrics file, [] where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
