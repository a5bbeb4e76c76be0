"""Eight CPU devices before jax is first imported, no other platform, and scratch, caches and handovers in a folder of the test session."""

import os
import signal
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest


def pytest_configure(config):
    """One scratch folder for the whole session and for every process it starts, so that tiny checkpoints and the built-in model are made once."""
    # A shell that starts the tests in the background has them ignore Ctrl-C, and those that send it to themselves would wait in vain.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "LABKIT_SCRATCH" not in os.environ or not hasattr(config, "workerinput"):
        config.labkit_scratch = tempfile.TemporaryDirectory(prefix="labkit-tests-")
        os.environ["LABKIT_SCRATCH"] = config.labkit_scratch.name
    # Compiling is most of the tests' time: workers and the processes that they start share it.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.environ["LABKIT_SCRATCH"], "jax-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Workers take tests by group: those of one group share what they have made and compiled."""
    if getattr(config.option, "numprocesses", None) and getattr(config.option, "dist", None) == "no":
        config.option.dist = "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A file is a group, where its tests do not name smaller ones."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name + item.path.parent.name))


def pytest_unconfigure(config):
    scratch = getattr(config, "labkit_scratch", None)
    if scratch is not None:
        os.environ.pop("LABKIT_SCRATCH", None)
        scratch.cleanup()


@pytest.fixture(autouse=True)
def _own_handovers(tmp_path, monkeypatch):
    """No test writes into the checkout's handovers."""
    monkeypatch.setenv("LABKIT_HANDOVERS", str(tmp_path / "handovers"))


@pytest.fixture(autouse=True)
def _own_named_slices(monkeypatch):
    """A slice that one test registers is not named in the next."""
    monkeypatch.setenv("LABKIT_SLICES", os.environ.get("LABKIT_SLICES", ""))
