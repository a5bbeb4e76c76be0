"""From table to assignments, and the audit in both directions. Each gate is shown to close."""

import pytest

from labkit.converters.audit import audit_table
from labkit.converters.rules import expand, pattern_regex
from labkit.errors import InputError
from labkit.layers.plan import LayerPlan, Segment
from labkit.models.mapping import Ignored, Layout, Rule, RuleTable, Stack, Tied, Transpose

PUBLISHED = Layout(("model.layers.{layer}.e.{expert}.gate", "model.layers.{layer}.e.{expert}.up"), Transpose(0, 2, 1), Stack(2))
FUSED = Layout("model.layers.{layer}.e.gate_up", Transpose(0, 2, 3, 1))
KERNEL = Rule("layers.q.kernel", Layout("model.layers.{layer}.q.weight", Transpose(1, 0)))
EMBED = Rule("embed.embedding", "model.embed.weight")


def plan_of(kinds):
    return LayerPlan.from_kinds(kinds)


def dense(layers=3):
    tensors = {"model.embed.weight": (7, 5)} | {f"model.layers.{i}.q.weight": (4, 5) for i in range(layers)}
    return RuleTable(EMBED, KERNEL), plan_of(["dense"] * layers), {"embed.embedding": (7, 5), "layers.q.kernel": (layers, 5, 4)}, tensors


def test_eleven_layers_stay_in_order():
    table, plan, targets, tensors = dense(11)
    report = audit_table(table, plan, targets, tensors)
    assert report.passed
    kernel = [a for a in report.expansion.assignments if a.layer is not None]
    assert [(a.layer, a.sources[0][0], a.targets[0].index) for a in kernel] == [(i, f"model.layers.{i}.q.weight", i) for i in range(11)]


def test_cycles_and_remainders_go_through_the_plan():
    plan = LayerPlan((Segment(("local", "global"), 3, 0), Segment(("local",), 1, 6)), ("local", "global") * 3 + ("local",))
    table = RuleTable(KERNEL, Rule("layers.g.weight", "model.layers.{layer}.g", kinds="global"))
    targets = {f"layers.{p}.q.kernel": (n, 5, 4) for p, n in (("0.0", 3), ("0.1", 3), ("1.0", 1))} | {"layers.0.1.g.weight": (3, 2)}
    tensors = {f"model.layers.{i}.q.weight": (4, 5) for i in range(7)} | {f"model.layers.{i}.g": (2,) for i in (1, 3, 5)}
    report = audit_table(table, plan, targets, tensors)
    assert report.passed, report
    where = {a.layer: (a.targets[0].path, a.targets[0].index) for a in report.expansion.assignments if a.rule is KERNEL}
    assert where == {
        0: ("layers.0.0.q.kernel", 0), 1: ("layers.0.1.q.kernel", 0), 2: ("layers.0.0.q.kernel", 1), 3: ("layers.0.1.q.kernel", 1),
        4: ("layers.0.0.q.kernel", 2), 5: ("layers.0.1.q.kernel", 2), 6: ("layers.1.0.q.kernel", 0),
    }  # fmt: skip
    assert [a.layer for a in report.expansion.assignments if a.rule is not KERNEL] == [1, 3, 5]


def experts(layers=2, count=3):
    published = {f"model.layers.{i}.e.{e}.{part}": (4, 5) for i in range(layers) for e in range(count) for part in ("gate", "up")}
    fused = {f"model.layers.{i}.e.gate_up": (count, 2, 4, 5) for i in range(layers)}
    return RuleTable(Rule("layers.e.gate_up", PUBLISHED, FUSED)), plan_of(["moe"] * layers), {"layers.e.gate_up": (layers, count, 5, 2, 4)}, published, fused


def test_the_layout_is_the_one_that_the_names_show():
    table, plan, targets, published, fused = experts()
    assert audit_table(table, plan, targets, published).expansion.assignments[0].sources[0] == tuple(f"model.layers.0.e.{e}.gate" for e in range(3))
    assert {a.layout for a in expand(table, plan, targets, published).assignments} == {PUBLISHED}
    assert {a.layout for a in expand(table, plan, targets, fused).assignments} == {FUSED}


def test_mixed_layouts_are_refused_with_both_names():
    table, plan, targets, published, fused = experts()
    tensors = {n: s for n, s in published.items() if ".layers.0." in n} | {n: s for n, s in fused.items() if ".layers.1." in n}
    with pytest.raises(InputError, match=r"mixes two layouts of layers.e.gate_up: it holds model.layers.0.e.0.gate and model.layers.1.e.gate_up"):
        audit_table(table, plan, targets, tensors).require("here")


def test_a_missing_expert_and_one_too_many_are_named():
    table, plan, targets, published, _ = experts()
    gone = {n: s for n, s in published.items() if n != "model.layers.1.e.2.up"}
    assert audit_table(table, plan, targets, gone).missing[0].startswith("no tensor model.layers.1.e.2.up for layers.e.gate_up <- ")
    assert audit_table(table, plan, targets, published | {"model.layers.1.e.3.up": (4, 5)}).unread == ["model.layers.1.e.3.up (4, 5) is read by no rule"]


def without(tensors, name):
    return {n: s for n, s in tensors.items() if n != name}


CONTROLS = {
    "a rule is missing": (lambda t, p, g, s: (t.without("layers.q.kernel"), p, g, s), ["unread", "unfilled"], "model.layers.0.q.weight"),
    "a tensor is missing": (lambda t, p, g, s: (t, p, g, without(s, "model.layers.1.q.weight")), ["missing"], "model.layers.1.q.weight"),
    "a tensor is too many": (lambda t, p, g, s: (t, p, g, s | {"model.layers.1.q.bias": (4,)}), ["unread"], "model.layers.1.q.bias"),
    "a layer is too many": (lambda t, p, g, s: (t, p, g, s | {"model.layers.3.q.weight": (4, 5)}), ["unread"], "model.layers.3.q.weight"),
    "a parameter has no rule": (lambda t, p, g, s: (t, p, g | {"norm.weight": (5,)}, s), ["unfilled"], "norm.weight"),
    "a rule has no parameter": (lambda t, p, g, s: (t, p, without(g, "embed.embedding"), s), ["unfilled"], "embed.embedding"),
    "a shape is wrong": (lambda t, p, g, s: (t, p, g, s | {"model.layers.2.q.weight": (5, 4)}), ["mismatched"], "model.layers.2.q.weight"),
    "a rank is wrong": (lambda t, p, g, s: (t, p, g, s | {"model.layers.2.q.weight": (20,)}), ["mismatched"], "model.layers.2.q.weight"),
    "the model has a layer more": (lambda t, p, g, s: (t, p, g | {"layers.q.kernel": (4, 5, 4)}, s), ["unfilled"], "stacked layer 3"),
    "the model has a layer less": (lambda t, p, g, s: (t, p, g | {"layers.q.kernel": (2, 5, 4)}, s), ["mismatched"], "stacked layer 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLS)
def test_audit_closes_both_ways(name):
    change, groups, named = CONTROLS[name]
    assert audit_table(*dense()).passed
    report = audit_table(*change(*dense()))
    assert not report.passed
    assert [g for g in ("unread", "missing", "unfilled", "doubled", "mismatched", "mixed") if getattr(report, g)] == sorted(
        groups, key="unread missing unfilled doubled mismatched mixed".split().index
    )
    with pytest.raises(InputError) as error:
        report.require("somewhere")
    assert named in str(error.value) and "somewhere" in str(error.value)


def test_a_tensor_read_by_two_rules_and_a_parameter_filled_twice():
    table, plan, targets, tensors = dense()
    overlapping = RuleTable(EMBED, Rule("layers.q.kernel", Layout("model.layers.{layer}.0", Transpose(1, 0))), Ignored("model.layers.0.{layer}", reason="x"))
    report = audit_table(overlapping, plan, targets, {"model.embed.weight": (7, 5)} | {f"model.layers.{i}.0": (4, 5) for i in range(3)})
    assert report.doubled == ["model.layers.0.0 is both read and ignored"]
    twice = RuleTable(*table, Rule("layers.k.kernel", Layout("model.layers.{layer}.k.weight", Transpose(1, 0))))
    object.__setattr__(twice.rules[2].layouts[0], "sources", KERNEL.layouts[0].sources)
    report = audit_table(twice, plan, targets | {"layers.k.kernel": (3, 5, 4)}, tensors)
    assert "model.layers.0.q.weight is read 2 times" in report.doubled
    again = RuleTable(*table, Rule("layers.z.kernel", Layout("model.layers.{layer}.z.weight", Transpose(1, 0))))
    object.__setattr__(again.rules[2], "targets", ("layers.q.kernel",))
    report = audit_table(again, plan, targets, tensors | {f"model.layers.{i}.z.weight": (4, 5) for i in range(3)})
    assert "layers.q.kernel layer 0 is filled 2 times" in report.doubled


def test_a_shape_that_does_not_fit_is_shown_with_both_shapes_and_the_rule():
    table, plan, targets, tensors = dense()
    (message,) = audit_table(table, plan, targets, tensors | {"model.embed.weight": (9, 5)}).mismatched
    assert message == "model.embed.weight (9, 5) becomes (9, 5), but embed.embedding (7, 5) is needed, in embed.embedding <- model.embed.weight"
    (message,) = audit_table(table, plan, targets, tensors | {"model.layers.2.q.weight": (5, 4)}).mismatched
    assert "(5, 4) becomes (4, 5), but layers.q.kernel[2] (5, 4) is needed" in message and "Transpose" in message


def test_tied_and_ignored_tensors_are_accounted_for():
    table, plan, targets, tensors = dense()
    table = RuleTable(*table, Tied("head", to="model.embed.weight"), Ignored("model.layers.{layer}.inv_freq", reason="a buffer"))
    report = audit_table(table, plan, targets, tensors | {"head": (7, 5), "model.layers.12.inv_freq": (2,)})
    assert report.passed and set(report.expansion.tied) == {"head"} and set(report.expansion.ignored) == {"model.layers.12.inv_freq"}
    assert "1 tied and 1 ignored" in str(report)
    assert not audit_table(table, plan, targets, tensors | {"model.layers.x.inv_freq": (2,)}).passed


def test_an_optional_table_applies_where_the_model_has_the_parameter():
    _, plan, targets, tensors = dense()
    extra = Rule("layers.k.bias", "model.layers.{layer}.k.bias"), Rule("norm.weight", "model.norm.weight")
    assert audit_table(RuleTable(EMBED, KERNEL, *extra, optional=True), plan, targets, tensors).passed
    assert not audit_table(RuleTable(EMBED, KERNEL, *extra), plan, targets, tensors).passed
    report = audit_table(RuleTable(EMBED, KERNEL, optional=True), plan, targets | {"norm.weight": (5,)}, tensors | {"model.layers.0.k.bias": (5,)})
    assert report.unread and report.unfilled == ["norm.weight (5,) is filled by no rule"]


def test_a_plain_list_has_one_parameter_per_number():
    _, plan, targets, tensors = dense()
    table = RuleTable(EMBED, KERNEL, Rule("H.{i}.w.{j}.kernel", Layout("model.H.{i}.w.{j}.weight", Transpose(1, 0))), optional=True)
    more = {f"H.{i}.w.{j}.kernel": (2 + i, 3) for i in range(2) for j in range(12)}
    disk = {f"model.H.{i}.w.{j}.weight": (3, 2 + i) for i in range(2) for j in range(12)}
    report = audit_table(table, plan, targets | more, tensors | disk)
    assert report.passed and ("model.H.1.w.11.weight",) in [a.sources[0] for a in report.expansion.assignments]
    assert audit_table(table, plan, targets | more, tensors | without(disk, "model.H.1.w.11.weight")).missing


def test_the_leading_part_of_names_is_the_one_on_disk():
    table, plan, targets, tensors = dense()
    table = RuleTable(*table, Tied("head", to="model.embed.weight"), optional=True, prefixes=("model.", "model.text.", ""))
    for prefix in ("model.", "model.text.", ""):
        spelled = {n.replace("model.", prefix): s for n, s in tensors.items()}
        report = audit_table(table, plan, targets, spelled | {"head": (7, 5)})
        assert report.passed and report.expansion.tied["head"].to == f"{prefix}embed.weight"
    assert not audit_table(table, plan, targets, {n.replace("model.", "other."): s for n, s in tensors.items()}).passed


def test_ignored_regular_expressions_never_hide_what_a_rule_reads():
    table, plan, targets, tensors = dense()
    table = RuleTable(*table, Ignored(r"layers\.\d+\.", reason="not ours", regex=True))
    report = audit_table(table, plan, targets, tensors | {"model.layers.0.mask": (1,)})
    assert report.passed and set(report.expansion.ignored) == {"model.layers.0.mask"}
    assert not audit_table(table, plan, targets, tensors | {"model.mask": (1,)}).passed


def test_patterns_are_literal_but_for_their_numbers():
    regex = pattern_regex("model.layers.{layer}.e.{expert}.w")
    assert regex.fullmatch("model.layers.10.e.3.w")["expert"] == "3"
    assert (
        not regex.fullmatch("modelxlayers.1.e.3.w")
        and not regex.fullmatch("model.layers.1.e.w")
        and not pattern_regex("l.{layer}.w", layer=2).fullmatch("l.12.w")
    )
