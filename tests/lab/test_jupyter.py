"""Notebook 01 opened and run in JupyterLab by a real browser."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import labkit

pytestmark = [pytest.mark.slow, pytest.mark.jupyter]
SRC = Path(labkit.__file__).parents[1]
TOKEN = "labkit-test"


@pytest.fixture
def server(tmp_path):
    """The address of a JupyterLab over a copy of the notebooks, and the copy's folder."""
    work = tmp_path / "work"
    shutil.copytree(SRC.parent / "notebooks", work / "notebooks", ignore=shutil.ignore_patterns(".*", "kernel-*"))
    (work / "handovers").mkdir()
    environment = os.environ | {"PYTHONPATH": str(SRC), "HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "LABKIT_HANDOVERS": ""}
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={work}"]
    log = open(tmp_path / "jupyter.log", "w+")
    process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options, "--LabApp.expose_app_in_browser=True"], env=environment, stdout=log, stderr=log)
    try:
        deadline, address = time.monotonic() + 90, None
        while address is None and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.5)
            lines = (tmp_path / "jupyter.log").read_text().split()
            address = next((word.split("/lab")[0] for word in lines if word.startswith("http://127.0.0.1:") and "/lab" in word), None)
        assert address, (tmp_path / "jupyter.log").read_text()
        yield address, work
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def test_notebook_01_runs_in_jupyterlab(server, tmp_path):
    from playwright.sync_api import sync_playwright

    address, work = server
    path = work / "notebooks" / "01_discover.ipynb"
    path.write_text(path.read_text().replace('smollm2-135m\\"', 'tiny:gemma2\\"', 1))
    chromium = shutil.which("chromium")
    assert chromium, "install chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.goto(f"{address}/lab/tree/notebooks/01_discover.ipynb?token={TOKEN}&reset")
        page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=90_000)
        page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=90_000)
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_function(
            "() => { const cells = window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.filter(c => c.cell_type === 'code');"
            " return cells.length > 3 && cells.every(c => c.execution_count) }",
            timeout=180_000,
        )
        page.wait_for_timeout(1500)
        outputs = page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.filter(c => c.cell_type === 'code').flatMap(c => c.getOutputs())"
        )
        page.screenshot(path=os.environ.get("LABKIT_SCREENSHOT", str(tmp_path / "01.png")))
        page.locator(".labkit figure img").first.scroll_into_view_if_needed()
        shown = page.locator(".labkit figure img").first.evaluate("image => image.complete && image.naturalWidth > 100")
        browser.close()
    assert not [o for o in outputs if o["output_type"] == "error"]
    html = "".join(str(o.get("data", {}).get("text/html", "")) for o in outputs)
    assert "<table" in html and "data:image/svg+xml" in html and "query_pre_attn_scalar" in html
    assert shown
    assert (work / "handovers" / "tiny-gemma2_handover.md").is_file()
