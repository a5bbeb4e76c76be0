"""The compiler's text read back: structure, loops, origins, operations, traffic, collectives. No compiler is needed."""

from pathlib import Path

import pytest

from labkit.scale.collectives import Role, find_collectives
from labkit.scale.hlo import Array, leaves, parse_module, parse_shape
from labkit.scale.hlo_cost import _convolution_flops, hbm_traffic, products
from labkit.scale.hlo_flow import Origins, count_executions

# A program in the compiler's own format: a loop of five layers over a weight that arrives in pieces, on a mesh of fsdp=2, tensor=2.
PROGRAM, LAYERS = Path(__file__).with_name("small_program.hlo").read_text(), 5
MESH = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 1}
ROLES = [Role("weight", "layers.kernel"), Role("weight", "layers.experts.down_proj"), Role("input", "x"), Role("input", "tokens")]


@pytest.fixture(scope="module")
def read():
    module = parse_module(PROGRAM)
    return module, count_executions(module), Origins(module)


def collectives(text: str = PROGRAM) -> dict[str, list]:
    module = parse_module(text)
    found: dict[str, list] = {}
    for collective in find_collectives(module, count_executions(module), Origins(module), ROLES, MESH):
        found.setdefault(collective.kind, []).append(collective)
    return found


def test_shapes():
    assert parse_shape("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}") == Array("bf16", (2, 3), 1)
    assert parse_shape("(f32[], (s32[2]{0}, /*index=2*/pred[4]{0}))") == (Array("f32", ()), (Array("s32", (2,)), Array("pred", (4,))))
    assert [a.nbytes for a in leaves(parse_shape("(f32[3]{0}, s4[3]{0}, bf16[<=5]{0}, f8e4m3fn[7]{0})"))] == [12, 2, 10, 7]
    with pytest.raises(ValueError, match="not a shape"):
        parse_shape("nonsense")
    with pytest.raises(ValueError, match="no entry"):
        parse_module("HloModule nothing")


def test_names_and_attributes(read):
    module, _, _ = read
    assert module.entry.parameters[0].op_name == "state['layers.kernel']"
    assert module.entry.by_name["permute"].attribute("source_target_pairs").startswith("{{0,1},{1,0}")
    assert module.entry.by_name["permute"].attribute("dimensions") is None
    assert module.entry.root.operands == ("out", "scattered")


def test_loops_run_as_often_as_they_count(read):
    module, executions, _ = read
    assert executions.loops == {"body": LAYERS} and executions.unknown == ()
    assert executions.times["started"] == LAYERS and executions.times["main"] == 1
    data = PROGRAM.replace("%tuple.3 = (s32[]", "%first = s32[] reduce(%tokens, %zero), dimensions={0}, to_apply=%add\n  %tuple.3 = (s32[]").replace(
        "tuple(%zero, %x.2, %weights.2, %five)", "tuple(%zero, %x.2, %weights.2, %first)"
    )
    executions = count_executions(parse_module(data))
    assert executions.unknown == (("jit(step)/while", 1),) and executions.times["started"] == 1
    told = count_executions(parse_module(data.replace('op_name="jit(step)/while"', 'op_name="jit(step)/about_7_times/while"')))
    assert told.unknown == (("jit(step)/about_7_times/while", 7),) and told.times["started"] == 7


def test_products_count_once_per_layer(read):
    module, executions, _ = read
    found = {product.shapes: product for product in products(module, executions)}
    first = found[((6, 16), (8, 16))]
    assert (first.flops, first.times, first.total) == (2 * 6 * 16 * 8, LAYERS, 2 * 6 * 16 * 8 * LAYERS)
    assert found[((6, 16), (6, 16))].part == "backward" and first.part == "forward"


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mul", "recomputed"),
        ("jit(step)/transpose(jvp())/while/body/checkpoint/mul", "backward"),
    ],
)
def test_a_kernel_that_the_compiler_named_is_of_the_part_that_its_rows_are_of(place, part):
    text = f"""HloModule m

%body (state: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {{
  %state = (s32[], bf16[64,16]) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %x = bf16[64,16]{{1,0}} get-tuple-element(%state), index=1
  %sizes = s32[4]{{0}} constant({{16, 16, 16, 16}}), metadata={{op_name="jit(step)/jvp()/sizes"}}
  %told = (s32[4]{{0}}, s32[1]{{0}}) custom-call(%sizes), custom_call_target="tpu_custom_call", metadata={{op_name="ragged-dot-metadata"}}
  %groups = s32[4]{{0}} get-tuple-element(%told), index=0
  %rows = bf16[64,16]{{1,0}} multiply(%x, %x), metadata={{op_name="{place}"}}
  %moved = bf16[64,16]{{1,0}} copy(%rows)
  %w = bf16[4,16,16]{{2,1,0}} constant({{...}})
  %ragged-dot-none.1 = bf16[64,16]{{1,0}} custom-call(%groups, %moved, %w), custom_call_target="tpu_custom_call", metadata={{op_name="ragged-dot-none"}}
  %back = bf16[64,16]{{1,0}} add(%ragged-dot-none.1, %x), metadata={{op_name="jit(step)/transpose(jvp())/while/body/add_any"}}
  %more = bf16[64,16]{{1,0}} add(%back, %x), metadata={{op_name="jit(step)/transpose(jvp())/while/body/add_any"}}
  %one = s32[] constant(1)
  %next = s32[] add(%count, %one), metadata={{op_name="jit(step)/transpose(jvp())/while/body/add"}}
  ROOT %out = (s32[], bf16[64,16]) tuple(%next, %more)
}}

%condition (state.1: (s32[], bf16[64,16])) -> pred[] {{
  %state.1 = (s32[], bf16[64,16]) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%count.1, %end), direction=LT
}}

ENTRY %main (x.2: bf16[64,16]) -> (s32[], bf16[64,16]) {{
  %x.2 = bf16[64,16]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,16]) tuple(%zero, %x.2)
  ROOT %loop = (s32[], bf16[64,16]) while(%start), condition=%condition, body=%body
}}
"""
    module = parse_module(text)
    (product,) = products(module, count_executions(module))
    assert (product.kind, product.times, product.part) == ("ragged", 3, part)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # a batched product, the batch as a spatial dimension with holes: two of the four pairs of positions meet an element
        ("convolution(%a, %b), window={size=2 lhs_dilate=2}, dim_labels=0bf_0oi->0bf", 2 * 2 * 256 * 64 * 128),
        ("convolution(%a, %b), window={size=2 stride=2 pad=1_1 rhs_reversal=1}, dim_labels=0bf_0oi->0bf", 2 * 2 * 256 * 64 * 128),
        ("convolution(%c, %d), dim_labels=bf_io->bf", 2 * 256 * 64 * 128),
    ],
)
def test_products_written_as_convolutions(line, flops):
    text = f"""HloModule m

ENTRY %main (a: bf16[2,256,64], b: bf16[2,128,64], c: bf16[256,64], d: bf16[64,128]) -> bf16[2,256,128] {{
  %a = bf16[2,256,64]{{2,1,0}} parameter(0)
  %b = bf16[2,128,64]{{2,1,0}} parameter(1)
  %c = bf16[256,64]{{1,0}} parameter(2)
  %d = bf16[64,128]{{1,0}} parameter(3)
  ROOT %out = bf16[2,256,128]{{2,1,0}} {line}
}}
"""
    module = parse_module(text)
    assert [product.flops for product in products(module, count_executions(module))] == [flops]
    shapes = [module.entry.by_name[name].shape.dims for name in module.entry.root.operands]
    assert _convolution_flops(module.entry.root, shapes) == flops


def test_origins_follow_values_not_operations(read):
    module, _, origins = read
    where = lambda computation, name: origins.entry_parameters(module.computations[computation].by_name[name])
    assert where("started", "all-gather.1") == {0}, "a slice by a loop counter is a weight still"
    assert where("body", "all-reduce.1") == {0, 2}
    assert where("main", "permute") == {1}
    assert where("main", "rows") == {1, 3}, "rows picked by tokens are activations"


def test_collectives():
    found = collectives()
    (gathered,) = found["all-gather"]
    assert (gathered.moves, gathered.names, gathered.axes, gathered.times) == ("weights", ("layers.kernel",), ("fsdp",), LAYERS), "start and end are one"
    assert gathered.bytes == 4 * 16 * 2 and gathered.total == gathered.bytes * LAYERS and not gathered.moves_experts
    (reduced,) = found["all-reduce"]
    assert (reduced.moves, reduced.axes, reduced.group, reduced.bytes) == ("activations", ("tensor",), (0, 1), 6 * 8 * 2)
    (permuted,) = found["collective-permute"]
    assert permuted.moves == "weights" and permuted.moves_experts and permuted.axes == ("tensor",) and permuted.bytes == 2 * 16 * 2
    (exchanged,) = found["all-to-all"]
    assert exchanged.moves == "activations" and exchanged.bytes == 6 * 16 * 2 // 2
    (scattered,) = found["reduce-scatter"]
    assert (scattered.moves, scattered.part, scattered.axes, scattered.bytes) == ("gradients", "backward", ("fsdp",), 8 * 16 * 2 // 2)


def test_a_sum_over_the_batch_of_another_size_is_no_gradient():
    changed = PROGRAM.replace("bf16[8,16]{1,0} dot(%x.2, %all-to-all.1)", "bf16[9,16]{1,0} dot(%x.2, %all-to-all.1)").replace(
        "%input = bf16[8,16]", "%input = bf16[9,16]"
    )
    (scattered,) = collectives(changed)["reduce-scatter"]
    assert scattered.moves == "activations"


def test_a_permute_of_activations_is_no_move_of_weights():
    changed = PROGRAM.replace("collective-permute(%experts)", "collective-permute(%x.2)")
    (permuted,) = collectives(changed)["collective-permute"]
    assert permuted.moves == "activations" and not permuted.moves_experts and permuted.names == ()


def test_traffic_counts_slices_and_leaves_out_the_chips_own_memory(read):
    module, executions, _ = read
    traffic = {t.instruction: t for t in hbm_traffic(module, executions)}
    piece, whole, x = 4 * 16 * 2, 8 * 16 * 2, 6 * 16 * 2
    assert traffic["piece.2"].total == LAYERS * (piece + 4 + piece), "a layer's slice, the counter and the slice written, not the whole stack"
    assert traffic["dot.2"].bytes == 6 * 8 * 2 + whole + x and traffic["dot.2"].times == LAYERS
    assert "while.1" not in traffic and "tuple.3" not in traffic
    elsewhere = parse_module(PROGRAM.replace("%done = bf16[8,16]{1,0} fusion", "%done = bf16[8,16]{1,0:S(1)} fusion"))
    less = {t.instruction: t for t in hbm_traffic(elsewhere, count_executions(elsewhere))}
    assert less["dot.2"].bytes == 6 * 8 * 2 + x


def test_a_scatter_costs_what_it_changes():
    text = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%scattered (into: f32[1000,8], rows: s32[4], updates: f32[4,8]) -> f32[1000,8] {
  %into = f32[1000,8]{1,0} parameter(0)
  %rows = s32[4]{0} parameter(1)
  %updates = f32[4,8]{1,0} parameter(2)
  ROOT %scatter.1 = f32[1000,8]{1,0} scatter(%into, %rows, %updates), update_window_dims={1}, to_apply=%add
}

ENTRY %main (a: f32[1000,8], b: s32[4], c: f32[4,8]) -> f32[1000,8] {
  %a = f32[1000,8]{1,0} parameter(0)
  %b = s32[4]{0} parameter(1)
  %c = f32[4,8]{1,0} parameter(2)
  ROOT %out = f32[1000,8]{1,0} fusion(%a, %b, %c), kind=kCustom, calls=%scattered
}
"""
    module = parse_module(text)
    (traffic,) = hbm_traffic(module, count_executions(module))
    assert traffic.bytes == 3 * 4 * 8 * 4 + 4 * 4, "rows read, written, the updates and the indices"
