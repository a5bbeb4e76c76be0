"""What commands share: options, where their words go, progress."""

import contextlib
import json
import os
import sys
from pathlib import Path

import click

MODEL_HELP = "MODEL is a directory, a hub id, a .gguf file, smollm2-135m (built in) or tiny:<model_type>."
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout and nothing else.")
revision = click.option("--revision", default="", help="Branch, tag or commit; hub ids only.")
remote_code = click.option("--trust-remote-code", is_flag=True, help="Run Python files that come with the checkpoint. Read them first.")
handovers = click.option("--handovers", type=click.Path(path_type=Path), default=None, help="Folder of records and handovers (default: ./handovers).")


def say(line: str) -> None:
    """A line about long work, for people who watch."""
    if sys.stderr.isatty():
        click.echo(line, err=True)


@contextlib.contextmanager
def only(enabled: bool):
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
def bar(label: str):
    """A byte progress bar on a terminal; silent elsewhere."""
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
