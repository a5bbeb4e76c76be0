"""The garden's table says what suites and perturbations found, and nothing that no run has shown."""

import json

import pytest

from labkit.errors import InputError
from labkit.lab import conform, garden
from labkit.parity.conformance import Check, Conformance


def suite(model="tiny:x", **failed):
    checks = [Check(n, f"check {n}", True) for n in range(1, 9)]
    checks += [Check(0, "exact", True, 1e-15), Check(0, "decode", True, 2e-15), Check(0, "float32", True, 1e-12), Check(0, "round trip", True)]
    for check in checks:
        if check.name in failed:
            check.passed, check.reason = False, failed[check.name]
    return Conformance(model, "x", "refined", checks, 1.5).as_dict()


def attack(passed=True):
    rows = [{"spec": {"kind": "config", "target": "scale"}, "passed": passed, "reason": "" if passed else "the slice ignores it"}]
    return {"source": "tiny:x", "rows": rows, "controls": [{"caught_by": "scale"}, {"caught_by": ""}], "passed": int(passed), "total": 1, "seconds": 2.0}


def row(suites, attacks=(), error=None):
    base = {"family": "x", "source": "refined", "provenance": {}, "suites": list(suites), "perturbations": list(attacks), "error": error}
    return base | garden.summary(base)


def test_a_check_counts_when_it_holds_on_every_configuration():
    good, bad = suite(), suite("tiny:x?seed=1", exact="norm: relative error 1e-2")
    assert row([good])["checks"] == {"passed": 8, "total": 8} and row([good])["passed"]
    made = row([good, bad])
    assert made["beside"] == {"passed": 3, "total": 4} and not made["passed"]
    assert made["failures"] == ["tiny:x?seed=1: exact: norm: relative error 1e-2"]
    assert made["exact"] == 1e-15 and made["round_trip"] is True and made["seconds"] == 3.0


def test_specs_and_planted_faults_are_counted():
    made = row([suite()], [attack(), attack(False)])
    assert made["specs"] == {"passed": 1, "total": 2} and made["faults"] == {"passed": 2, "total": 4}
    assert made["failures"] == ["tiny:x: config scale the slice ignores it"]
    assert "1/2" in garden.Garden([made]).plain()


def test_nothing_measured_is_not_a_pass():
    empty = row([], error="the process ended with code 1")
    assert not empty["passed"] and empty["round_trip"] is None and garden.Garden([]).exit_code == 1
    assert "the process ended with code 1" in garden.Garden([empty]).lines()[0]


def test_a_record_keeps_what_the_table_shows(tmp_path):
    path = garden.record(row([suite()], [attack()]), tmp_path)
    (kept,) = garden.recorded(tmp_path)
    assert kept == json.loads(path.read_text()) and kept["models"][0]["checks"]["exact"]["value"] == 1e-15
    assert {"measured", "commit", "packages"} <= kept.keys()
    assert garden.Garden([kept]).lines() == garden.Garden([row([suite()], [attack()])]).lines()
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        garden.recorded(tmp_path)


def test_the_committed_records_say_that_everything_held():
    records = garden.recorded()
    assert len(records) == 29
    for kept in records:
        assert kept["checks"]["passed"] == kept["checks"]["total"] == 8, kept["family"]
        failed = [name for model in kept["models"] for name, check in model["checks"].items() if not check["passed"]]
        assert not failed and kept["passed"] and not kept["failures"], kept["family"]


def test_a_type_in_a_process_of_its_own(tmp_path):
    """A check that needs no compilation, on the smallest of models, and a type that is none."""
    options = conform.Options(sources=1, checks=(2,), specs=False)
    table = conform.conform(["llama", "no_such_type"], options=options, out=tmp_path / "out.jsonl", time_limit=240)
    first, second = table.rows
    assert first["passed"] and first["checks"] == {"passed": 1, "total": 1} and table.exit_code == 1
    assert not second["passed"] and "no_such_type" in second["failures"][0]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_process_that_takes_too_long_is_stopped():
    (made,) = conform.conform(["llama"], options=conform.Options(1, (2,), False), time_limit=0.5).rows
    assert not made["passed"] and "took longer than 0.5 seconds" in made["failures"][0]


def test_checks_are_read_from_text():
    assert conform.chosen_checks("1,3,exact") == (1, 3, "exact") and conform.chosen_checks(None) is None


def test_records_that_are_not_committed_are_shown_apart(monkeypatch, tmp_path):
    """Of a committed record that a run has changed since, the committed text counts; a new one does not count at all."""
    monkeypatch.setattr(garden, "FOLDER", tmp_path)
    for name in ("same", "changed", "new"):
        kept = json.loads(garden.record(row([suite()], [attack()]) | {"family": name}, tmp_path).read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    before = {"same": (tmp_path / "same.json").read_text(), "changed": json.dumps(kept | {"family": "changed", "seconds": 99}), "new": ""}
    monkeypatch.setattr(garden, "committed", lambda path: before[path.stem])
    known, since = garden.listed()
    assert [(r["family"], r["seconds"]) for r in known] == [("changed", 99), ("same", 3.5)]
    assert [r["family"] for r in since] == ["changed", "new"]
    monkeypatch.setattr(garden, "committed", lambda path: None)  # outside a checkout
    assert len(garden.listed()[0]) == 3 and garden.listed()[1] == []


def test_the_table_has_a_legend():
    assert all(f"{column}:" in garden.LEGEND for column in ("KL 32", "beside", "specs", "faults"))
    assert garden.Garden([row([suite()])]).plain().endswith(garden.LEGEND)
