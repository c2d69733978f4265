"""Costs from hand-written programs, against figures worked out by hand, and the program."""

from __future__ import annotations

import pytest
import tiny_run

from dlm_jax.contrib.pod_costs import (
    Torus,
    cost,
    first_group,
    main,
    moved,
    num_bytes,
    parse,
    shapes_of,
    trip_count,
)
from dlm_jax.distributed.mesh import Chip

# One FLOP, byte or cycle a second, so that figures are seconds.
CHIP = Chip("unit", flops=1.0, clock=1.0, memory=0.0, bandwidth=1.0, link=2.0, torus=4)
RING = Torus(CHIP, tuple((place, 0) for place in range(4)), (4, 1))


WHOLE = """HloModule loop

%condition (carry: (s32[], f32[4])) -> pred[] {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %bound = s32[] constant(24)
  ROOT %less = pred[] compare(%index, %bound), direction=LT
}

%body (carry.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %same = (s32[], f32[4]{0}) tuple(%carry.1)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(128)} parameter(0), metadata={op_name="a (b)"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_operations_are_read_with_their_operands_types_and_attributes():
    program = parse(WHOLE)
    assert list(program) == ["condition", "body", "ENTRY"]
    loop = program["ENTRY"]["loop"]
    assert (loop.kind, loop.operands) == ("while", ("start",))
    assert loop.attribute(r"body=%(\w+)") == "body"
    assert program["ENTRY"]["x"].attribute('op_name="([^"]*)"') == "a (b)"


def test_bytes_count_all_arrays_and_tell_the_main_memory_from_faster_ones():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)}, f32[5]{0:T(128)S(1)}, u32[]{:S(2)}, token[])"
    assert shapes_of(text) == [("bf16", (2, 3), True), ("f32", (5,), False), ("u32", (), False)]
    assert (num_bytes(text), num_bytes(text, in_memory=True)) == (36, 12)
    assert num_bytes("(s4[6], pred[3])") == 6


def test_a_loop_runs_as_often_as_its_bound_says_wherever_that_stands():
    def count(text):
        program = parse(text)
        return trip_count(program, program["ENTRY"]["loop"], program["ENTRY"])

    assert count(WHOLE) == 24
    known = WHOLE.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert count(known) == 7
    bound = "%bound = s32[] constant(24)"
    carried = WHOLE.replace(bound, "%bound = s32[] get-tuple-element(%carry), index=2")
    carried = carried.replace("tuple(%zero, %x)", "tuple(%zero, %x, %nine)")
    assert count(carried.replace("%zero = ", "%nine = s32[] constant(9)\n  %zero = ")) == 9
    assert count(WHOLE.replace(bound, "%bound = s32[] add(%index, %index)")) is None


def _main(body: str, before: str = "") -> str:
    return f"HloModule m\n\n{before}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def test_a_product_takes_two_flop_a_multiplication_or_its_bytes_if_they_take_longer():
    text = _main(
        "  %a = f32[8,16]{1,0} parameter(0)\n  %b = f32[16,2]{1,0} parameter(1)\n"
        "  ROOT %c = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    found = cost(text, RING)
    assert found.flops == 2 * 8 * 16 * 2
    assert found.memory_bytes == 4 * (8 * 16 + 16 * 2 + 8 * 2)
    assert found.seconds == max(found.flops, found.memory_bytes)


def test_what_lies_in_faster_memory_is_no_traffic_and_cycles_are_the_other_bound():
    text = _main(
        "  %a = f32[8]{0:S(1)} parameter(0)\n"
        '  ROOT %c = f32[8]{0} negate(%a), backend_config={"estimated_cycles":"77"}'
    )
    assert cost(text, RING).seconds == 32
    assert cost(text, RING, "cycles").seconds == 77


def test_a_slice_counts_as_what_is_read_and_an_update_in_place_as_what_is_written():
    text = _main(
        "  %a = f32[100]{0} parameter(0)\n  %u = f32[4]{0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        "  %s = f32[4]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={4}\n"
        "  ROOT %d = f32[100]{0} dynamic-update-slice(%a, %u, %i)"
    )
    assert cost(text, RING).memory_bytes == 2 * 16 + 2 * 16


def test_a_slice_in_a_nested_fusion_counts_as_what_is_read():
    inner = (
        "%slice (p: f32[100], j: s32[]) -> f32[4] {\n  %p = f32[100]{0} parameter(0)\n"
        "  %j = s32[] parameter(1)\n"
        "  ROOT %s = f32[4]{0} dynamic-slice(%p, %j), dynamic_slice_sizes={4}\n}\n\n"
        "%outer (q: f32[100], k: s32[]) -> f32[4] {\n  %q = f32[100]{0} parameter(0)\n"
        "  %k = s32[] parameter(1)\n"
        "  %f = f32[4]{0} fusion(%q, %k), kind=kLoop, calls=%slice\n"
        "  ROOT %n = f32[4]{0} negate(%f)\n}\n"
    )
    text = _main(
        "  %a = f32[100]{0} parameter(0)\n  %i = s32[] parameter(1)\n"
        "  ROOT %g = f32[4]{0} fusion(%a, %i), kind=kLoop, calls=%outer",
        inner,
    )
    assert cost(text, RING).memory_bytes == 16 + 4 + 16


def test_buffers_are_allocated_for_nothing_and_asynchronous_slices_count_once():
    text = _main(
        "  %a = f32[100]{0} parameter(0)\n"
        '  %b = f32[100]{0} custom-call(), custom_call_target="AllocateBuffer"\n'
        "  %s = ((f32[100]{0}), f32[4]{0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:4]}\n"
        "  ROOT %d = f32[4]{0:S(1)} slice-done(%s)"
    )
    assert cost(text, RING).memory_bytes == 16


def test_a_convolution_counts_only_the_taps_that_meet_numbers():
    # A batched product as XLA writes it: a window as large as the batch, held apart by holes.
    text = _main(
        "  %a = f32[8,3,16]{2,1,0} parameter(0)\n  %b = f32[3,16,2]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[8,3,2]{2,1,0} convolution(%a, %b), "
        "window={size=3 stride=2 pad=2_2 lhs_dilate=3}, dim_labels=b0f_0io->b0f"
    )
    assert cost(text, RING).flops == pytest.approx(2 * 3 * 8 * 16 * 2)


LOOP = """%condition (carry: (s32[], f32[4])) -> pred[] {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%index, %bound), direction=LT
}

%body (carry.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry.1 = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%carry.1), index=1
  %y = f32[4]{0} negate(%x)
  ROOT %same = (s32[], f32[4]{0}) tuple(%carry.1, %y)
}
"""


def test_a_loop_counts_as_often_as_it_runs_and_an_unknown_one_once_and_is_told():
    body = (
        "  %start = (s32[], f32[4]{0}) parameter(0)\n"
        "  ROOT %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body"
    )
    found = cost(_main(body, LOOP), RING)
    assert (found.seconds, found.unknown_loops) == (5 * 32, 0)
    unknown = LOOP.replace("constant(5)", "add(%index, %index)")
    found = cost(_main(body, unknown), RING)
    assert (found.seconds, found.unknown_loops) == (32, 1)
    scoped = body + ', metadata={op_name="jit(f)/layers/while"}'
    assert cost(_main(scoped, LOOP), RING, repeats={"layers": 3}).seconds == 3 * 32
    assert cost(_main(scoped, LOOP), RING, repeats={"f": 3}).seconds == 5 * 32


def test_a_collective_that_runs_beside_work_costs_only_what_is_left_of_it():
    start = (
        "  %a = f32[4]{0} parameter(0)\n  %b = f32[5]{0} parameter(1)\n"
        "  %g = (f32[4]{0}, f32[16]{0}) all-gather-start(%a), replica_groups={{0,1,2,3}}\n"
    )
    done = "  ROOT %d = f32[16]{0} all-gather-done(%g)"
    alone = cost(_main(start + done), RING)
    # 64 bytes, three quarters from others, over a ring of both directions: 48 / 2.
    assert (alone.seconds, alone.exposed) == (24, 24)
    work = "  %w = f32[2]{0} slice(%b), slice={[0:2]}\n"
    beside = cost(_main(start + work + done), RING)
    assert (beside.seconds, beside.exposed) == (24, 24 - 16)
    assert beside.moved == {"all-gather": 48}


@pytest.mark.parametrize(
    ("kind", "size", "seconds"),
    [("all-gather", 30, 15), ("all-reduce", 60, 30), ("reduce-scatter", 120, 60)],
)
def test_bytes_and_seconds_of_collectives_on_a_ring(kind, size, seconds):
    assert moved(kind, 40.0, "replica_groups={{0,1,2,3}}", RING) == (size, seconds)


def test_a_group_that_does_not_go_all_the_way_round_has_half_of_the_links():
    assert moved("all-gather", 40.0, "replica_groups={{0,1}}", RING) == (20, 20)


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{1,3},{0,2}}", [1, 3]),
        ("replica_groups=[2,2]<=[4]", [0, 1]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [0, 2]),
        ("replica_groups=mesh['data'=2,'fsdp'=2] {'data'}", [0, 2]),
        ("no groups", [0, 1, 2, 3]),
    ],
)
def test_groups_are_read_in_every_notation(attributes, group):
    assert first_group(attributes, 4) == group


def test_the_dearest_branch_of_a_conditional_counts():
    branches = "".join(
        f"%branch{n} (p{n}: f32[{n}]) -> f32[{n}] {{\n  %p{n} = f32[{n}]{{0}} parameter(0)\n"
        f"  ROOT %n{n} = f32[{n}]{{0}} negate(%p{n})\n}}\n\n"
        for n in (3, 9)
    )
    text = _main(
        "  %p = pred[] parameter(0)\n  %x = f32[3]{0} parameter(1)\n  %y = f32[9]{0} parameter(2)\n"
        "  ROOT %c = f32[9]{0} conditional(%p, %x, %y), "
        "branch_computations={%branch3, %branch9}",
        branches,
    )
    assert cost(text, RING).seconds == 72


def test_a_splash_kernel_counts_its_products_at_the_share_that_kernels_reach():
    text = _main(
        "  %mask = s8[1,16,66]{2,1,0} parameter(2)\n"
        "  %q = bf16[2,4,128,64]{3,2,1,0} parameter(0)\n"
        "  %k = bf16[2,4,256,64]{3,2,1,0} parameter(1)\n"
        "  ROOT %splash_fwd.1 = bf16[2,4,128,64]{3,2,1,0} custom-call(%mask, %q, %k), "
        'custom_call_target="tpu_custom_call"'
    )
    found = cost(text, RING)
    assert found.flops == 2 * 2 * (2 * 4) * 128 * 256 * 64
    assert found.seconds == pytest.approx(found.flops / 0.55)


def test_the_estimate_of_a_kernel_replaces_the_bytes_of_its_operands():
    """It takes the longer of its bytes and its products; the seconds of a known kernel count in
    ``cycles`` alone.
    """
    text = _main(
        "  %x = bf16[1000,64]{1,0} parameter(0)\n"
        "  ROOT %window.1 = bf16[8,64]{1,0} custom-call(%x), "
        'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":'
        '{"flops":"300","transcendentals":"5","bytes_accessed":"700"}}'
    )
    found = cost(text, RING)
    assert (found.flops, found.memory_bytes, found.seconds) == (300, 700, 700)
    assert cost(text.replace("300", "900"), RING).seconds == 900
    known = {"window": 800.0}
    assert cost(text, RING, "roof", kernels=known).seconds == 700
    assert cost(text, RING, "cycles", kernels=known).seconds == 800


def test_the_program_prints_the_plan_and_the_estimates(tmp_path, capsys):
    given = tiny_run.flags(tmp_path / "run", mesh__fsdp=4)
    assert main([f"{key}={value}" for key, value in given.items()]) == 0
    out = capsys.readouterr().out
    assert "mesh         data=2 fsdp=4 tensor=1 on 8 devices" in out
    assert "TFLOP per device and step, with recomputation" in out
    assert "collectives  " in out and "GiB per device and step" in out
    assert "not estimated: the peak performance of this device is unknown" in out
    assert not (tmp_path / "run").exists()


def test_bad_input_ends_with_its_code_in_one_line(capsys):
    assert main(["--topology", "pod"]) == 2
    err = capsys.readouterr().err
    assert "--topology=pod is not a topology" in err and err.count("\n") == 1
