"""The counter of kernels and bytes, on a module whose count is known."""

import pytest

from mjax.plan.hlo.counts import kernels

# As XLA prints modules for GPUs, shortened: a loop of three rounds takes a row of
# bf16[3,8], multiplies it by a matrix, and writes a row of f32[3,4] in place.
MODULE = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%take (p0: bf16[3,8], p1: s32[]) -> bf16[1,8] {
  %p0 = bf16[3,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
}

%product (q0: bf16[1,8], q1: bf16[8,4]) -> f32[1,4] {
  %q0 = bf16[1,8]{1,0} parameter(0)
  %q1 = bf16[8,4]{1,0} parameter(1)
  ROOT %dot = f32[1,4]{1,0} dot(%q0, %q1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (r0: f32[3,4], r1: f32[1,4], r2: s32[]) -> f32[3,4] {
  %r0 = f32[3,4]{1,0} parameter(0)
  %r1 = f32[1,4]{1,0} parameter(1)
  %r2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = f32[3,4]{1,0} dynamic-update-slice(%r0, %r1, %r2, %zero.1)
}

%halves (s0: bf16[2,8]) -> f32[2,4] {
  %s0 = bf16[2,8]{1,0} parameter(0)
  %wide = f32[2,8]{1,0} convert(%s0)
  %left = f32[2,4]{1,0} slice(%wide), slice={[0:2], [0:4]}
  ROOT %double = f32[2,4]{1,0} add(%left, %left)
}

%body (state: (s32[], bf16[3,8], bf16[8,4], f32[3,4])) -> (s32[], bf16[3,8], bf16[8,4], f32[3,4]) {
  %state = (s32[], bf16[3,8]{1,0}, bf16[8,4]{1,0}, /*index=3*/f32[3,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[3,8]{1,0} get-tuple-element(%state), index=1
  %w = bf16[8,4]{1,0} get-tuple-element(%state), index=2
  %y = f32[3,4]{1,0} get-tuple-element(%state), index=3
  %row-start = ((bf16[3,8]{1,0}, s32[]), bf16[1,8]{1,0}, u32[]) fusion-start(%x, %i), kind=kLoop, calls=%take
  %row = bf16[1,8]{1,0} fusion-done(%row-start)
  %gemm = f32[1,4]{1,0} fusion(%row, %w), kind=kCustom, calls=%product, metadata={op_name="f/dot"}
  %sum.1 = f32[1,4]{1,0} all-reduce(%gemm), replica_groups={{0,1}}, to_apply=%add
  %next = f32[3,4]{1,0} fusion(%y, %sum.1, %i), kind=kLoop, calls=%put
  ROOT %out = (s32[], bf16[3,8]{1,0}, bf16[8,4]{1,0}, f32[3,4]{1,0}) tuple(%i, %x, %w, %next)
}

%condition (state.1: (s32[], bf16[3,8], bf16[8,4], f32[3,4])) -> pred[] {
  %state.1 = (s32[], bf16[3,8]{1,0}, bf16[8,4]{1,0}, f32[3,4]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (init: (s32[], bf16[3,8], bf16[8,4], f32[3,4]), h: bf16[2,8]) -> f32[2,4] {
  %init = (s32[], bf16[3,8]{1,0}, bf16[8,4]{1,0}, f32[3,4]{1,0}) parameter(0)
  %h = bf16[2,8]{1,0} parameter(1)
  %loop = (s32[], bf16[3,8]{1,0}, bf16[8,4]{1,0}, f32[3,4]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %half = f32[2,4]{1,0} fusion(%h), kind=kLoop, calls=%halves
}
"""  # noqa: E501


def by_name():
    return {k.name: k for k in kernels(MODULE)}


def test_launches_are_listed_with_the_rounds_of_their_loop() -> None:
    runs = {name: k.runs for name, k in by_name().items()}
    assert runs == {"row-start": 3, "gemm": 3, "sum.1": 3, "next": 3, "half": 1}


def test_a_slice_counts_and_not_what_it_is_taken_from() -> None:
    take = by_name()["row-start"]
    assert (take.read_bytes, take.written_bytes) == (8 * 2 + 4, 8 * 2)


def test_a_slice_behind_a_conversion_counts_in_the_dtype_that_is_read() -> None:
    half = by_name()["half"]
    assert (half.read_bytes, half.written_bytes) == (8 * 2, 8 * 4)


def test_writing_in_place_counts_what_is_written() -> None:
    put = by_name()["next"]
    assert (put.read_bytes, put.written_bytes) == (4 * 4 + 4, 4 * 4)
    assert put.moved_bytes == 3 * (4 * 4 + 4 + 4 * 4)


def test_products_have_flops_and_a_dtype() -> None:
    gemm = by_name()["gemm"]
    assert (gemm.kind, gemm.flops, gemm.product_dtype) == ("gemm", 2 * 8 * 4, "bf16")
    assert gemm.source == "f/dot"


def test_collectives_are_told_apart() -> None:
    assert by_name()["sum.1"].kind == "collective"
    assert by_name()["next"].kind == "elementwise"


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="not an HLO module"):
        kernels("nothing")
    with pytest.raises(ValueError, match="trip count of loop loop is unknown"):
        kernels(MODULE.replace("known_trip_count", "other"))
