"""With libtpu installed and no TPU attached, labkit's processes start no TPU and print nothing of it; a real TPU is left as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

SAYS = "import os; print(os.environ.get('JAX_PLATFORMS'), os.environ.get('TPU_SKIP_MDS_QUERY'))"


def run(code: str, tmp_path: Path, **environment) -> subprocess.CompletedProcess:
    """A fresh interpreter in which `libtpu` can be found (an empty stand-in), without any variable that steers jax."""
    (tmp_path / "libtpu").mkdir(exist_ok=True)
    lines = (
        "import os",
        "os.environ['TPU_LIBRARY_PATH'] = '/nowhere/libtpu.so'",
        "get_library_path = lambda: os.environ['TPU_LIBRARY_PATH']",
    )  # as libtpu does
    (tmp_path / "libtpu" / "__init__.py").write_text("\n".join(lines) + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_"))}
    path = os.pathsep.join((str(Path(labkit.__file__).parents[1]), str(tmp_path)))
    return subprocess.run([sys.executable, "-c", code], env=kept | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("first", ["import labkit", "import jax; import labkit"])
def test_jax_uses_the_cpu(tmp_path, first):
    done = run(f"{first}; import jax; print(jax.config.jax_platforms)", tmp_path)
    assert done.stdout.strip() == "cpu" and "libtpu.so may not" not in done.stderr, done.stderr


def test_what_somebody_has_said_stands(tmp_path):
    assert run(f"import labkit; {SAYS}", tmp_path).stdout.split() == ["cpu", "1"]
    assert run(f"import labkit; {SAYS}", tmp_path, TPU_WORKER_ID="0").stdout.split() == ["None", "None"]
    assert run(f"import labkit; {SAYS}", tmp_path, JAX_PLATFORMS="tpu,cpu").stdout.split() == ["tpu,cpu", "None"]


def machine(folder: Path, *cards: tuple[str, str], accelerators: int = 0) -> dict:
    for index, (vendor, device) in enumerate(cards):
        place = folder / "pci" / f"0000:00:{index:02}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{device}\n")
    (folder / "dev").mkdir(parents=True)
    for index in range(accelerators):
        (folder / "dev" / f"accel{index}").touch()
    return {"pci": str(folder / "pci"), "devices": str(folder / "dev")}


def test_which_machines_have_a_tpu(tmp_path):
    case = lambda name, *cards, **more: labkit.tpu_attached(**machine(tmp_path / name, *cards, **more))
    assert not case("a/none")
    assert not case("a/cloud", ("0x1ae0", "0x0042"), ("0x8086", "0x0063"))
    assert case("a/v5e", ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"))
    assert case("a/unheard-of", ("0x1ae0", "0xffff"))
    assert case("a/device-file", accelerators=1)


def test_a_tpu_is_left_alone(monkeypatch):
    for name in labkit._SAID:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(labkit, "tpu_attached", lambda: True)
    monkeypatch.setattr(labkit.importlib.util, "find_spec", lambda name: object())
    before = dict(os.environ)
    labkit.leave_absent_tpu_alone()
    assert dict(os.environ) == before
