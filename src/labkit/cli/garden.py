"""Commands on families: translated, proven, attacked, spread over meshes, and listed."""

import json
import sys
from pathlib import Path

import click

from labkit.cli.shared import MODEL_HELP, as_json, handovers, only, remote_code, revision, say
from labkit.errors import InputError


@click.command(epilog=f"{MODEL_HELP} A bare model type means its tiny model.")
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

    with only(as_json) as emit:
        options = dict(revision=revision, trust_remote_code=trust_remote_code, write=write, diff=diff, force=force, judge=not no_verdict)
        result = port(model, **options, say=say)
        if not as_json and not diff and (code or sys.stdout.isatty()):
            show_code(result.files())
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


def show_code(files: dict[str, str]) -> None:
    """Python files with line numbers and colours on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(soft_wrap=True)
    for name, text in files.items():
        console.rule(name) if console.is_terminal else click.echo(f"# {name}")
        console.print(Syntax(text, "python", line_numbers=True, word_wrap=False)) if console.is_terminal else click.echo(text)


@click.command()
@click.argument("types", nargs=-1)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Types at a time.")
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="A file that gets one JSON line per type.")
@click.option("--held-out/--others", "apart", default=None, help="Only the types that were kept apart, or only the others.")
@click.option("--resume", is_flag=True, help="Keep the lines that the file of --json holds; prove the rest.")
@click.option("--time-limit", default=180.0, show_default=True, help="Seconds that one type may take.")
@click.option("--steps", default=None, help="Only these steps, e.g. prefill,decode.")
def board(types, jobs, out, apart, resume, time_limit, steps) -> None:
    """Translate and prove every decoder-only type of the installed transformers (or TYPES), and print the table."""
    from labkit.lab.board import board, check_steps

    options = ["--steps", check_steps(steps)] if steps else []
    say = lambda line: click.echo(line, err=True)
    result = board(types, jobs=jobs, out=out, apart=apart, resume=resume, time_limit=time_limit, options=options, say=say)
    click.echo(result.plain())
    sys.exit(result.exit_code)


@click.command()
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
    from labkit.models.outside import named_folders

    options = Options(sources, chosen_checks(checks), specs, full)
    if record and (named := named_folders()):
        raise InputError("the records are of the garden's slices, and others are named", f"LABKIT_SLICES: {', '.join(map(str, named.values()))}", "unset it")
    result = attack(types, jobs=jobs, options=options, out=out, time_limit=time_limit, say=lambda line: click.echo(line, err=True))
    if record:
        for row in result.rows:
            garden.record(row)
    click.echo(result.plain())
    sys.exit(result.exit_code)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="TYPE...")
@click.option("--full", is_flag=True, help="Every parameter and config key, not a draw by seed.")
@click.option("--seed", default=0, show_default=True, help="Of the draw, and of the tokens.")
@as_json
def attack(models, full, seed, as_json) -> None:
    """Change parameters, config keys and inputs of tiny models on both sides, and plant faults that must be caught. TYPE is a model type or tiny:..."""
    from labkit.lab.attack import attack as run_attack

    with only(as_json) as emit:
        result = run_attack(models, full=full, seed=seed, say=say)
        emit(result.as_json() if as_json else result.plain())
    sys.exit(result.exit_code)


@click.command(epilog="TYPE is a model type, whose tiny model is taken, or a model as the other commands take it.")
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


@click.command()
@as_json
@click.option("--update", is_flag=True, help="In a checkout: take the list anew from the records in handovers.")
@handovers
def families(as_json, update, handovers) -> None:
    """What is proven: the models and the families that a recorded run backs."""
    from labkit.lab import families
    from labkit.lab.garden import Garden, listed

    with only(as_json) as emit:
        if update:
            families.update(handovers)
        (proven, own), (recorded, attacked) = families.listed(), listed()
        garden, said = Garden(recorded), "Runs on this machine, not committed"
        if as_json:
            emit({"families": proven, "garden": garden.rows, "uncommitted": {"families": own, "garden": attacked}})
            return
        parts = [families.plain(proven), garden.plain()]
        parts += [families.plain(own, said, "Not committed.")] if own else []
        parts += [f"{said}: conformance\n{Garden(attacked).plain()}"] if attacked else []
        emit("\n\n".join(parts))
