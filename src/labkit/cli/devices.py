"""Commands for accelerators: the TPU compiler's view, and training on one or several processes."""

import os
import sys
from pathlib import Path

import click

from labkit.cli.shared import MODEL_HELP, as_json, only, remote_code, revision, say
from labkit.errors import LabError


def _remat(default: str):
    """The option `--remat`; None for "none"."""
    return click.option(
        "--remat",
        default=default,
        show_default=True,
        type=click.Choice(["full", "dots", "attention", "none"]),
        callback=lambda context, option, value: None if value == "none" else value,
        help="What the backward pass computes again: all, all but products of matrices or attention, nothing.",
    )


@click.command(name="compile", epilog=f"{MODEL_HELP} A config.json, or a folder that holds nothing else, is enough: no weight is read.")
@click.argument("model")
@click.option("--topology", required=True, help="Chips, for example v5p:4x4x8, v5e:16x16, v6e:8x8; v5e:16x16*2 for two slices.")
@click.option("--mesh", required=True, help="Mesh axes, for example fsdp=16,tensor=8; the product is the number of devices.")
@click.option("--phase", "phases", default="prefill,decode,train", show_default=True, help="Which programs.")
@click.option("--batch", default=0, help="Rows of the whole mesh (default: as many as the batch is cut into).")
@click.option("--length", default=2048, show_default=True, help="Tokens per row, and slots of the cache.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]), help="What is computed in.")
@click.option("--param-dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]), help="What weights are kept in.")
@_remat("full")
@click.option("--keep", default=None, type=click.Path(path_type=Path), help="A folder that gets the compiled programs as text.")
@click.option("--compare-dispatch", is_flag=True, help="Instead: one mixture layer by the lab's dispatch and by a plain einsum over all experts.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds that compiling may take.")
@as_json
@revision
@remote_code
def compile_command(model, phases, keep, as_json, compare_dispatch, **options) -> None:
    """The TPU compiler's view of MODEL on a slice of chips: memory, operations, collectives, bounds on time. No TPU is needed."""
    from labkit.lab import compile as lab

    with only(as_json) as emit:
        if compare_dispatch:
            table = lab.compare_dispatch(model, say=say, **options)
            emit(table.model_dump() if as_json else table.plain())
            return
        chosen = [part.strip() for part in phases.split(",") if part.strip()]
        result = lab.compile_model(model, phases=chosen, keep=None if keep is None else str(keep.resolve()), **options)
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="A UTF-8 text, a .jsonl with one text per line, or a .npy of token ids.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder; the same command goes on in it.")
@click.option("--steps", required=True, type=int, help="Updates.")
@click.option("--batch", default=8, show_default=True, help="Sequences per update.")
@click.option("--length", default=256, show_default=True, help="Tokens per sequence.")
@click.option("--accumulate", default=1, show_default=True, help="Parts of a batch that run one after the other.")
@click.option("--learning-rate", default=3e-4, show_default=True, help="The peak; a cosine falls to a tenth of it.")
@click.option("--warmup", default=0, show_default=True, help="Updates until the peak.")
@click.option("--weight-decay", default=0.1, show_default=True, help="Acts on matrices only.")
@click.option("--clip", default=1.0, show_default=True, help="Largest global norm of the gradients; 0 for none.")
@click.option("--seed", default=0, show_default=True, help="Of the order of the data.")
@_remat("dots")
@click.option("--checkpoint-every", default=100, show_default=True, help="Updates between checkpoints.")
@click.option("--keep", default=2, show_default=True, help="Checkpoints that stay.")
@click.option("--mesh", default="", metavar="AXIS=N,...", help="Axes data, fsdp, tensor, expert (default: all devices on fsdp).")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float64"]), help="Of parameters and optimiser.")
@click.option("--compute-dtype", default=None, type=click.Choice(["float32", "bfloat16"]), help="Of forward and backward (default: as --dtype).")
@click.option("--peak-tflops", default=None, type=float, help="Of one device, for the MFU (default: published figures of TPUs).")
@click.option("--coordinator", default=None, metavar="HOST:PORT", help="Several processes: the address of process 0.")
@click.option("--processes", default=None, type=int, help="Several processes: how many.")
@click.option("--process", default=None, type=int, help="Several processes: which one this is, from 0.")
@click.option("--pod", is_flag=True, help="Several processes: find all three from the cluster (TPU pod, Slurm).")
@click.option("--join-timeout", default=300.0, show_default=True, help="Seconds for all processes to join.")
@as_json
@revision
@remote_code
def train(model, data, out, clip, mesh, dtype, compute_dtype, peak_tflops, coordinator, processes, process, pod, join_timeout, **options) -> None:
    """Fine-tune MODEL on a text or on tokens; stopped or killed, the same command goes on where it was."""
    from labkit.lab.train import StopOnSignal, parse_mesh
    from labkit.lab.train import train as run_training
    from labkit.scale.processes import find_place, finish, initialize, is_writer, leave, watched
    from labkit.train.settings import TrainSettings

    emits_json, kept = options.pop("as_json"), {name: options.pop(name) for name in ("revision", "trust_remote_code")}
    settings = TrainSettings(clip=clip or None, **options).check()
    axes = parse_mesh(mesh)
    with only(emits_json) as emit:
        if dtype == "float64":
            os.environ["JAX_ENABLE_X64"] = "1"
        place = initialize(find_place(coordinator, processes, process, detect=pod), join_timeout=join_timeout)
        say = lambda line: click.echo(line, err=emits_json) if is_writer() else None
        try:
            with StopOnSignal() as stop, watched():
                stopping = {} if place else {"stop": stop}
                more = dict(mesh=axes, dtype=dtype, compute_dtype=compute_dtype, peak_tflops=peak_tflops, say=say, **kept, **stopping)
                result = run_training(model, data, out, settings, **more)
            finish()
        except LabError as error:
            if place:
                click.echo(f"labkit: {error.paragraph()}", err=True)
                leave(error.exit_code)
            raise
        if is_writer():
            emit(result.as_json() if emits_json else result.plain())
    sys.exit(0 if result.checkpoint else 130)
