"""The command `labkit`. Nothing heavy is imported before a command runs.

Exit codes: 0 all gates hold, 1 a gate failed or the model is blocked, 2 bad input, 3 a kernel died, 130 interrupted.
"""

import json
import os
import sys

import click

from labkit.cli import bring_up, devices, garden
from labkit.errors import InputError, LabError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="labkit", message="%(version)s")
def cli() -> None:
    """Bring a Hugging Face causal LM up in JAX with Flax NNX, prove that it computes the same function, and hand it over."""
    if os.environ.get("LABKIT_SLICES"):
        from labkit.models.outside import named_folders

        named_folders()  # a wrong name is bad input to every command, whichever model it is about


for part in (bring_up, garden, devices):
    for command in vars(part).values():
        if isinstance(command, click.Command):
            cli.add_command(command)


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
