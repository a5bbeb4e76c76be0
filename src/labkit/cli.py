"""The command `labkit`. Nothing heavy is imported before a command runs.

Exit codes: 0 all gates hold, 1 a gate failed or the model is blocked, 2 bad input, 3 a kernel died, 130 interrupted.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import click

from labkit.errors import InputError, LabError

MODEL_HELP = "MODEL is a directory, a hub id, a .gguf file, smollm2-135m (built in) or tiny:<model_type>."
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout and nothing else.")
revision = click.option("--revision", default="", help="Branch, tag or commit; hub ids only.")
remote_code = click.option("--trust-remote-code", is_flag=True, help="Run Python files that come with the checkpoint. Read them first.")
handovers = click.option("--handovers", type=click.Path(path_type=Path), default=None, help="Folder of records and handovers (default: ./handovers).")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="labkit", message="%(version)s")
def cli() -> None:
    """Bring a Hugging Face causal LM up in JAX with Flax NNX, prove that it computes the same function, and hand it over."""


@cli.command(epilog=MODEL_HELP)
@click.argument("model", default="smollm2-135m")
@click.option("--phases", default="1,2,3,4", show_default=True, help="Phases to run, by number.")
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="A notebook parameter; at least one of the phases must know it.")
@click.option("--force", is_flag=True, help="Run phases again even when nothing they depend on has changed.")
@click.option("--keep", is_flag=True, help="Keep subset and checkpoints in the scratch folder when the verification fails.")
@click.option("--kernel", default=None, help="A Jupyter kernel by name (default: this very interpreter).")
@click.option("--cell-timeout", default=3600, show_default=True, help="Seconds that one cell may take.")
@click.option("--timeout", default=6 * 3600, show_default=True, help="Seconds that the run may take.")
@click.option("--html", is_flag=True, help="Also write the handover as one HTML page.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@revision
@remote_code
@handovers
def run(model, phases, parameters, force, keep, kernel, cell_timeout, timeout, html, quiet, revision, trust_remote_code, handovers) -> None:
    """Run the phase notebooks on MODEL; a handover after each."""
    from labkit.lab import handover, runner

    try:
        numbers = [int(part) for part in phases.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"--phases takes numbers separated by commas, not {phases!r}", "--phases", "for example --phases 1,2") from None
    given = dict(parameters)
    given |= {"revision": revision} if revision else {}
    given |= {"trust_remote_code": "true"} if trust_remote_code else {}
    given |= {"keep": "true"} if keep else {}
    runner.exit_on_signal()
    outcome = runner.run(
        model,
        phases=numbers,
        parameters=given,
        handovers=handovers,
        force=force,
        kernel=kernel,
        cell_timeout=cell_timeout,
        timeout=timeout,
        progress=not quiet and sys.stderr.isatty(),
        say=click.echo,
    )
    for record in outcome.records.values():
        for verdict in record.verdicts:
            from labkit.lab.show import number

            mark = "pass" if verdict.passed else "FAIL"
            click.echo(f"  {mark}  {verdict.name}, {verdict.on}: {number(verdict.value)} (limit {number(verdict.limit)}) {verdict.measure}")
    if outcome.handover.is_file():
        click.echo(f"handover: {outcome.handover}")
        if html:
            click.echo(f"page: {handover.render_html(outcome.handover.with_name(outcome.handover.name.removesuffix('_handover.md')))}")
    if outcome.error:
        click.echo(outcome.error.paragraph(), err=True)
    sys.exit(outcome.exit_code)


@cli.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option("--golden", default="", help="A .jsonl file of goldens to verify against as well.")
@as_json
@revision
@remote_code
def check(model, golden, as_json, revision, trust_remote_code) -> None:
    """The same gates and verdicts as `run`, without notebooks; nothing is left behind."""
    from labkit.lab.check import check

    with _only(as_json) as emit:
        result = check(model, revision=revision, trust_remote_code=trust_remote_code, golden=golden, say=(lambda line: click.echo(line, err=True)))
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@cli.command(epilog=MODEL_HELP)
@click.argument("model")
@as_json
@revision
@remote_code
def inspect(model, as_json, revision, trust_remote_code) -> None:
    """Facts and walls of MODEL, from config and headers only."""
    from labkit.lab.inspect import inspect

    with _only(as_json) as emit:
        result = inspect(model, revision=revision, trust_remote_code=trust_remote_code)
        plain = result.pop("plain")
        emit(result if as_json else plain)
    sys.exit(1 if result["status"] == "blocked" else 0)


@cli.command(epilog=MODEL_HELP)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype", default=None, type=click.Choice(["float32", "bfloat16", "float16", "float64"]), help="Store parameters in this type (default: as on disk)."
)
@click.option("--no-scan", is_flag=True, help="One entry per layer instead of stacked layers.")
@click.option("--force", is_flag=True, help="Replace a checkpoint of the same source at OUT.")
@revision
@remote_code
def convert(model, out, dtype, no_scan, force, revision, trust_remote_code) -> None:
    """Hugging Face MODEL to an Orbax checkpoint at OUT."""
    from labkit.converters import convert
    from labkit.hf import open_source
    from labkit.port.slices import ensure_slice

    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    ensure_slice(source).require()
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    with _bar("convert") as progress:
        done = convert(source, out, dtype=dtype, scan=not no_scan, force=force, progress=progress)
    click.echo(str(done))


@cli.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(ckpt, out) -> None:
    """An Orbax checkpoint CKPT of `labkit convert` back to a safetensors directory OUT, bit for bit."""
    from labkit.converters import export
    from labkit.converters.checkpoint import read_metadata
    from labkit.port.slices import ensure_slice

    ensure_slice(read_metadata(ckpt)["family"]).require()
    with _bar("export") as progress:
        done = export(ckpt, out, progress=progress)
    click.echo(str(done))


@cli.command(epilog=MODEL_HELP)
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
@click.option("--remat", default=None, type=click.Choice(["full", "dots", "attention"]), help="What the backward pass computes again.")
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
    with _only(emits_json) as emit:
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


@cli.command()
@click.argument("model")
@click.option("--html", is_flag=True, help="One self-contained page, figures inside.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Where the page goes (default: beside the Markdown).")
@handovers
def handover(model, html, out, handovers) -> None:
    """Render the handover of MODEL from its records; nothing is measured."""
    from labkit.lab import handover as page
    from labkit.lab.places import find_records

    folder = find_records(model, handovers)
    click.echo(page.render(folder))
    if html or out:
        click.echo(page.render_html(folder, out))


@cli.command()
@as_json
@click.option("--update", is_flag=True, help="In a checkout: take the list anew from the records in handovers.")
@handovers
def families(as_json, update, handovers) -> None:
    """What is proven: the models and the families that a recorded run backs."""
    from labkit.lab import families
    from labkit.lab.garden import Garden, recorded

    with _only(as_json) as emit:
        if update:
            families.update(handovers)
        proven, garden = families.proven(), Garden(recorded())
        emit({"families": proven, "garden": garden.rows} if as_json else f"{families.plain(proven)}\n\n{garden.plain()}")


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="TYPE...")
@click.option("--full", is_flag=True, help="Every parameter and config key, not a draw by seed.")
@click.option("--seed", default=0, show_default=True, help="Of the draw, and of the tokens.")
@as_json
def attack(models, full, seed, as_json) -> None:
    """Change parameters, config keys and inputs of tiny models on both sides, and plant faults that must be caught. TYPE is a model type or tiny:..."""
    from labkit.lab.attack import attack as run_attack

    with _only(as_json) as emit:
        result = run_attack(models, full=full, seed=seed, say=_say)
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@cli.command(epilog=MODEL_HELP)
@click.argument("model")
@as_json
@revision
@remote_code
def diagnose(model, as_json, revision, trust_remote_code) -> None:
    """Where the port of MODEL first leaves the reference, which components are at fault alone, and why."""
    from labkit.lab.diagnose import diagnose

    with _only(as_json) as emit:
        result = diagnose(model, revision=revision, trust_remote_code=trust_remote_code, say=_say)
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@cli.command(epilog=f"{MODEL_HELP} A bare model type means its tiny model.")
@click.argument("model")
@click.option("--write", is_flag=True, help="Put the slice into the garden for editing (./labkit_slices where the package cannot be written).")
@click.option("--diff", is_flag=True, help="What the translator would write now against the slice there is.")
@click.option("--force", is_flag=True, help="With --write: replace a slice that has been edited.")
@click.option("--no-verdict", is_flag=True, help="Translate only.")
@click.option("--code", is_flag=True, help="Show the files whole (the default on a terminal).")
@as_json
@revision
@remote_code
def port(model, write, diff, force, no_verdict, code, as_json, revision, trust_remote_code) -> None:
    """Translate the reference's source of MODEL into a slice, show it, and judge it."""
    from labkit.lab.port import port

    with _only(as_json) as emit:
        options = dict(revision=revision, trust_remote_code=trust_remote_code, write=write, diff=diff, force=force, judge=not no_verdict)
        result = port(model, **options, say=_say)
        if not as_json and not diff and (code or sys.stdout.isatty()):
            _show_code(result.files())
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


def _show_code(files: dict[str, str]) -> None:
    """Python files with line numbers and colours on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(soft_wrap=True)
    for name, text in files.items():
        console.rule(name) if console.is_terminal else click.echo(f"# {name}")
        console.print(Syntax(text, "python", line_numbers=True, word_wrap=False)) if console.is_terminal else click.echo(text)


def _say(line: str) -> None:
    """A line about long work, for people who watch."""
    if sys.stderr.isatty():
        click.echo(line, err=True)


@cli.command()
@click.argument("types", nargs=-1)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Types at a time.")
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="A file that gets one JSON line per type.")
@click.option("--held-out/--others", "apart", default=None, help="Only the types that were kept apart, or only the others.")
@click.option("--resume", is_flag=True, help="Keep the lines that the file of --json holds; prove the rest.")
@click.option("--time-limit", default=180.0, show_default=True, help="Seconds that one type may take.")
@click.option("--steps", default=None, help="Only these steps, e.g. prefill,decode.")
def board(types, jobs, out, apart, resume, time_limit, steps) -> None:
    """Translate and prove every decoder-only type of the installed transformers (or TYPES), and print the table."""
    from labkit.lab.board import board

    options = ["--steps", steps] if steps else []
    say = lambda line: click.echo(line, err=True)
    result = board(types, jobs=jobs, out=out, apart=apart, resume=resume, time_limit=time_limit, options=options, say=say)
    click.echo(result.plain())
    sys.exit(result.exit_code)


@cli.command(name="compile", epilog=f"{MODEL_HELP} A config.json, or a folder that holds nothing else, is enough: no weight is read.")
@click.argument("model")
@click.option("--topology", required=True, help="Chips, for example v5p:4x4x8, v5e:16x16, v6e:8x8; v5e:16x16*2 for two slices.")
@click.option("--mesh", required=True, help="Mesh axes, for example fsdp=16,tensor=8; the product is the number of devices.")
@click.option("--phase", "phases", default="prefill,decode,train", show_default=True, help="Which programs.")
@click.option("--batch", default=0, help="Rows of the whole mesh (default: as many as the batch is cut into).")
@click.option("--length", default=2048, show_default=True, help="Tokens per row, and slots of the cache.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]), help="What is computed in.")
@click.option("--param-dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]), help="What weights are kept in.")
@click.option("--remat", default="full", show_default=True, type=click.Choice(["full", "dots", "attention", "none"]), help="What is computed anew.")
@click.option("--keep", default=None, type=click.Path(path_type=Path), help="A folder that gets the compiled programs as text.")
@click.option("--compare-dispatch", is_flag=True, help="Instead: one mixture layer by the lab's dispatch and by a plain einsum over all experts.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds that compiling may take.")
@as_json
@revision
@remote_code
def compile_command(model, phases, remat, keep, as_json, compare_dispatch, **options) -> None:
    """The TPU compiler's view of MODEL on a slice of chips: memory, operations, collectives, bounds on time. No TPU is needed."""
    from labkit.lab import compile as lab

    with _only(as_json) as emit:
        if compare_dispatch:
            table = lab.compare_dispatch(model, say=_say, **options)
            emit(table.model_dump() if as_json else table.plain())
            return
        chosen = [part.strip() for part in phases.split(",") if part.strip()]
        result = lab.compile_model(
            model, phases=chosen, remat=None if remat == "none" else remat, keep=None if keep is None else str(keep.resolve()), **options
        )
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@cli.command()
@click.argument("types", nargs=-1)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Types at a time.")
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="A file that gets one JSON line per type.")
@click.option("--configurations", "sources", default=2, show_default=True, type=click.IntRange(1, 2), help="Of each type.")
@click.option("--checks", default=None, help="Only these, e.g. 1,3,exact.")
@click.option("--specs/--no-specs", default=True, show_default=True, help="The perturbations too.")
@click.option("--full", is_flag=True, help="Every perturbation instead of a draw.")
@click.option("--time-limit", default=900.0, show_default=True, help="Seconds that one type may take.")
@click.option("--record", is_flag=True, help="In a checkout: write the records that `labkit families` shows.")
def conform(types, jobs, out, sources, checks, specs, full, time_limit, record) -> None:
    """Attack the named families (or TYPES): the conformance suite and the perturbations, and print the table."""
    from labkit.lab import garden
    from labkit.lab.conform import Options, chosen_checks
    from labkit.lab.conform import conform as attack

    options = Options(sources, chosen_checks(checks), specs, full)
    result = attack(types, jobs=jobs, options=options, out=out, time_limit=time_limit, say=lambda line: click.echo(line, err=True))
    if record:
        for row in result.rows:
            garden.record(row)
    click.echo(result.plain())
    sys.exit(result.exit_code)


@cli.command(epilog="TYPE is a model type, whose tiny model is taken, or a model as the other commands take it.")
@click.argument("types", nargs=-1)
@click.option("--mode", type=click.Choice(["exact", "float32"]), default="exact", show_default=True)
@click.option("--mesh", "sizes", multiple=True, metavar="D,F,T,E", help="Sizes of data, fsdp, tensor and expert; may be repeated (default: five meshes).")
@click.option("--no-decode", is_flag=True, help="Leave cached decoding out.")
@as_json
def meshes(types, mode, sizes, no_decode, as_json) -> None:
    """Logits, gradients, decoding and bytes of each TYPE on meshes of eight devices against one device (default: every family the suite names)."""
    from labkit.lab.meshes import meshes, named_families
    from labkit.parity.meshes import MESHES

    try:
        chosen = [tuple(int(size) for size in text.split(",")) for text in sizes] or MESHES
    except ValueError:
        raise InputError(f"--mesh takes four sizes separated by commas, not {', '.join(sizes)!r}", "--mesh", "for example --mesh 1,2,2,2") from None
    found = meshes(types or named_families(), mode=mode, sizes=chosen, decode=not no_decode, say=(lambda line: None) if as_json else click.echo)
    if as_json:
        click.echo(json.dumps([each.as_dict() for each in found]))
    sys.exit(0 if all(each.passed for each in found) else 1)


@cli.command()
@as_json
def doctor(as_json) -> None:
    """This machine: packages, devices, memory, scratch."""
    from labkit.lab.doctor import doctor

    with _only(as_json) as emit:
        report = doctor()
        emit(report.as_json() if as_json else report.plain())
    sys.exit(0 if report.healthy else 1)


@contextlib.contextmanager
def _only(enabled: bool):
    """Yield `emit`. When enabled, whatever libraries print goes to stderr, and stdout gets the one JSON object that is emitted, errors included."""
    if not enabled:
        yield lambda text: click.echo(text)
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    answer: list[dict] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield answer.append
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)
        if answer:
            click.echo(json.dumps(answer[0], indent=1, allow_nan=False, default=str))


@contextlib.contextmanager
def _bar(label: str):
    """A byte progress bar on a terminal; silent elsewhere."""
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def error_object(model: str | None, error: LabError) -> dict:
    """The `--json` object of a command that could not answer."""
    return {"model": model, "family": None, "status": error.status, "verdicts": {}, "gates": [], "findings": [], "error": error.as_dict()}


def main(arguments: list[str] | None = None) -> None:
    """The console script: every LabError is one paragraph (one JSON object with --json) and its exit code; no traceback for what a user can cause."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    wants_json = "--json" in arguments
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    model = next((a for a in arguments[1:] if not a.startswith("-")), None)
    try:
        cli.main(arguments, prog_name="labkit", standalone_mode=False)
        code = 0
    except LabError as error:
        code = error.exit_code
        click.echo(json.dumps(error_object(model, error), indent=1)) if wants_json else click.echo(f"labkit: {error.paragraph()}", err=True)
    except click.UsageError as error:
        code = 2
        told = InputError(error.format_message(), f"labkit {' '.join(arguments[:1])}", f"labkit {' '.join(arguments[:1])} --help")
        click.echo(json.dumps(error_object(model, told), indent=1)) if wants_json else error.show()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = 130
        click.echo("labkit: interrupted. What had finished is kept; run the same command again to go on.", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
