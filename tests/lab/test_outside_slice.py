"""A slice that lies outside the package, in processes of their own."""

import shutil

import pytest

from labkit.models import get_family
from tests.test_cli import command


@pytest.mark.slow
def test_a_folder_in_the_environment_is_a_family_for_every_process(tmp_path, monkeypatch):
    folder = tmp_path / "olmo2"
    shutil.copytree(get_family("llama").path, folder)
    (folder / "__init__.py").write_text("from labkit.models.llama import FAMILY\n")
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    after = command("inspect", "tiny:olmo2", "--json")
    assert '"slice": "translated"' in after.stdout and str(folder) in after.stdout
