"""`labkit compile`: the forms of MODEL, and what the command says and exits with. Compiling itself is tested in tests/scale."""

import json
from pathlib import Path

import pytest

from labkit import cli
from labkit.errors import InputError
from labkit.lab import compile as lab
from labkit.scale import aot
from labkit.scale.report import CompileReport, Gate, PhaseReport

LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ON = ("--topology", "v5e:2x2", "--mesh", "fsdp=4")


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "some-llama").mkdir()
    file = tmp_path / "some-llama" / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


def report(job: aot.CompileJob, passed: bool = True) -> CompileReport:
    gate = Gate(name="fits into HBM", passed=passed, detail="12% of it at the peak")
    phase = PhaseReport(
        phase="decode", batch=4, length=job.length, status="compiled", trace_seconds=0.1, compile_seconds=1.0, compile_cpu_seconds=0.9, gates=[gate]
    )
    given = dict(family="llama", slice_source="refined", layers="2 x full_attention", parameters=1, chips=4, devices=4, remat=None, versions={})
    return CompileReport(model=job.model, topology=job.topology, mesh=job.mesh, dtype=job.dtype, param_dtype=job.param_dtype, phases=[phase], **given)


def command(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["compile", *map(str, arguments)])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def test_a_config_is_enough(config, tmp_path):
    for model in (config, config.parent):
        name, read = lab.read_model_config(str(model))
        assert (name, read.model_type, read.described["hidden_size"]) == ("some-llama", "llama", 64)
    wrapped = tmp_path / "published.json"
    wrapped.write_text(json.dumps({"name": "someone/some-llama", "config": LLAMA, "parameters": 1}))
    assert lab.read_model_config(str(wrapped))[0] == "someone/some-llama"
    wrapped.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        lab.read_model_config(str(wrapped))


def test_meshes():
    assert lab.parse_mesh("fsdp=16, tensor=8") == {"fsdp": 16, "tensor": 8}
    for text in ("fsdp", "fsdp=x", "fsdp=2,fsdp=2", "fsdp=-1"):
        with pytest.raises(InputError, match="written like"):
            lab.parse_mesh(text)


def test_the_command(config, monkeypatch, capsys):
    jobs = []
    monkeypatch.setattr(aot, "compile_model", lambda job, **more: jobs.append(job) or report(job))
    code, out, _ = command(capsys, config, *ON, "--phase", "decode", "--length", "128")
    assert code == 0 and "DECODE: 1 token for each of 4 rows, cache of 128 slots" in out and "gate: fits into HBM: holds" in out
    assert (jobs[0].phases, jobs[0].mesh, jobs[0].remat) == (["decode"], {"fsdp": 4}, "full")
    monkeypatch.setattr(aot, "compile_model", lambda job, **more: report(job, passed=False))
    code, out, _ = command(capsys, config, *ON, "--json")
    answer = json.loads(out)
    assert (
        code == 1
        and answer["status"] == "fail"
        and answer["gates"][0] == {"phase": "decode", "name": "fits into HBM", "passed": False, "detail": "12% of it at the peak"}
    )


@pytest.mark.parametrize(("mesh", "said"), [("fsdp=3", "needs 3 devices"), ("model=4", "no mesh axis is called model"), ("4", "written like")])
def test_bad_requests_end_before_anything_is_compiled(config, capsys, mesh, said):
    code, out, err = command(capsys, config, "--topology", "v5e:2x2", "--mesh", mesh)
    assert code == 2 and said in err and out == ""


def test_a_dense_model_has_no_dispatch_to_compare(config, capsys):
    code, _, err = command(capsys, config, *ON, "--compare-dispatch")
    assert code == 2 and "has no mixture" in err
