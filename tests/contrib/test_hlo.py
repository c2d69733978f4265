from __future__ import annotations

from dlm_jax.contrib.pod_costs import num_bytes, parse, shapes_of, trip_count

LOOP = """HloModule loop

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
    module = parse(LOOP)
    assert module.entry == "main"
    assert list(module.computations) == ["condition", "body", "main"]
    loop = module.computations["main"][3]
    assert (loop.name, loop.kind, loop.operands) == ("loop", "while", ("start",))
    assert module.called(loop, "body") == "body"
    assert module.computations["main"][0].source == "a (b)"


def test_bytes_count_all_arrays_and_tell_the_main_memory_from_faster_ones():
    shapes = shapes_of(
        "(bf16[2,3]{1,0:T(8,128)(2,1)}, f32[5]{0:T(128)S(1)}, u32[]{:S(2)}, token[])"
    )
    assert [shape.num_bytes for shape in shapes] == [12, 20, 4]
    assert [shape.in_memory for shape in shapes] == [True, False, False]
    assert num_bytes("(s4[6], pred[3])") == 6


def test_a_loop_runs_as_often_as_its_bound_says_wherever_that_stands():
    def count(text):
        module = parse(text)
        return trip_count(module, module.computations["main"][3], module.computations["main"])

    assert count(LOOP) == 24
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert count(known) == 7
    carried = LOOP.replace("%bound = s32[] constant(24)",
                           "%bound = s32[] get-tuple-element(%carry), index=2")  # fmt: skip
    carried = carried.replace("tuple(%zero, %x)", "tuple(%zero, %x, %nine)")
    carried = carried.replace("%zero = ", "%nine = s32[] constant(9)\n  %zero = ")
    module = parse(carried)
    main = module.computations["main"]
    assert trip_count(module, next(x for x in main if x.kind == "while"), main) == 9
    unknown = LOOP.replace("%bound = s32[] constant(24)", "%bound = s32[] add(%index, %index)")
    assert count(unknown) is None
