"""Commands on one model: from its facts to a verified checkpoint and a handover."""

import sys
from pathlib import Path

import click

from labkit.cli.shared import MODEL_HELP, as_json, bar, handovers, only, remote_code, revision, say
from labkit.errors import InputError


@click.command(epilog=MODEL_HELP)
@click.argument("model", default="smollm2-135m")
@click.option("--phases", default="1,2,3,4,5", show_default=True, help="Phases to run, by number; 1 to 4 are the proof, 5 is scale.")
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
        for words in record.outcome.get("unreached", ()):
            click.echo(f"  pitfall  {words}.")
    if outcome.handover.is_file():
        click.echo(f"handover: {outcome.handover}")
        if html:
            click.echo(f"page: {handover.render_html(outcome.handover.with_name(outcome.handover.name.removesuffix('_handover.md')))}")
    if outcome.error:
        click.echo(outcome.error.paragraph(), err=True)
    sys.exit(outcome.exit_code)


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option("--golden", default="", help="A .jsonl file of goldens to verify against as well.")
@as_json
@revision
@remote_code
def check(model, golden, as_json, revision, trust_remote_code) -> None:
    """The same gates and verdicts as `run`, without notebooks; nothing is left behind."""
    from labkit.lab.check import check

    with only(as_json) as emit:
        result = check(model, revision=revision, trust_remote_code=trust_remote_code, golden=golden, say=(lambda line: click.echo(line, err=True)))
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@as_json
@revision
@remote_code
def inspect(model, as_json, revision, trust_remote_code) -> None:
    """Facts and walls of MODEL, from config and headers only."""
    from labkit.lab.inspect import inspect

    with only(as_json) as emit:
        result = inspect(model, revision=revision, trust_remote_code=trust_remote_code)
        plain = result.pop("plain")
        emit(result if as_json else plain)
    sys.exit(1 if result["status"] == "blocked" else 0)


@click.command(epilog=MODEL_HELP)
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
    with bar("convert") as progress:
        done = convert(source, out, dtype=dtype, scan=not no_scan, force=force, progress=progress)
    click.echo(str(done))


@click.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(ckpt, out) -> None:
    """An Orbax checkpoint CKPT of `labkit convert` back to a safetensors directory OUT, bit for bit."""
    from labkit.converters import export
    from labkit.converters.checkpoint import read_metadata
    from labkit.port.slices import ensure_slice

    ensure_slice(read_metadata(ckpt)["family"]).require()
    with bar("export") as progress:
        done = export(ckpt, out, progress=progress)
    click.echo(str(done))


@click.command()
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


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@as_json
@revision
@remote_code
def diagnose(model, as_json, revision, trust_remote_code) -> None:
    """Where the port of MODEL first leaves the reference, which components are at fault alone, and why."""
    from labkit.lab.diagnose import diagnose

    with only(as_json) as emit:
        result = diagnose(model, revision=revision, trust_remote_code=trust_remote_code, say=say)
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@click.command()
@click.option(
    "--clear", is_flag=True, help="Remove from scratch what was not written to for a day: tiny checkpoints, runs; the lab makes them again. Slices stay."
)
@as_json
def doctor(clear, as_json) -> None:
    """This machine: packages, devices, memory, scratch."""
    from labkit.lab.doctor import doctor

    with only(as_json) as emit:
        report = doctor(clear)
        emit(report.as_json() if as_json else report.plain())
    sys.exit(0 if report.healthy else 1)
