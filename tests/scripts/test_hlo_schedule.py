"""What stands between the start and the end of a collective is counted."""

import re

import pytest

from scripts.hlo_schedule import read_bodies

MODULE = """HloModule step, is_scheduled=true

%product (p: f32[2,2]) -> f32[2,2] {
  %p = f32[2,2]{1,0} parameter(0)
  ROOT %dot.1 = f32[2,2]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

%layer (p: f32[2,2]) -> f32[2,2] {
  %q = f32[2,2]{1,0} parameter(0)
  %first = f32[2,2]{1,0} fusion(%q), kind=kCustom, calls=%product
  ROOT %kernel = f32[2,2]{1,0} custom-call(%first), custom_call_target="mosaic_gpu_v2"
}

%more (p: f32[2,2]) -> pred[] {
  %r = f32[2,2]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2]{1,0} parameter(0)
  %send = ((f32[2,2]{1,0}), f32[2,2]{1,0}) \
collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %one = f32[2,2]{1,0} fusion(%x), kind=kCustom, calls=%product
  %ready = f32[2,2]{1,0} collective-permute-done(%send)
  %gather = ((f32[2,2]{1,0}), f32[4,2]{1,0}) \
all-gather-start(%x), replica_groups=mesh['pp'=2,'dp_shard'=2] {'dp_shard'}
  %layers = f32[2,2]{1,0} while(%one), condition=%more, body=%layer, \
backend_config={"known_trip_count":{"n":"3"}}
  %whole = f32[4,2]{1,0} all-gather-done(%gather)
  %total = f32[2,2]{1,0} all-reduce(%layers), \
replica_groups=mesh['pp'=2,'dp_shard'=2] {'pp'}, to_apply=%more
  %kept = f32[2,2]{1,0} copy(%total)
  ROOT %two = f32[2,2]{1,0} dot(%kept, %ready), lhs_contracting_dims={1}
}
"""


def test_products_and_kernels_beside_a_collective_are_counted_with_inner_loops():
    (body,) = read_bodies(MODULE)
    send, gather, total = body.collectives
    assert (send.kind, send.products, send.kernels) == ("collective-permute", 1, 0)
    assert send.pairs == ((0, 1), (1, 0))
    assert (gather.axes, gather.products, gather.kernels) == (("dp_shard",), 3, 3)
    assert (total.is_async, total.axes, total.products) == (False, ("pp",), 0)
    assert send.is_async
    # One alone, three in the loop, and the last.
    assert (body.products, body.kernels) == (5, 3)
    assert body.copies == ("f32[2,2]",)


def test_a_start_without_its_end_is_an_error():
    text = MODULE.replace("collective-permute-done(%send)", "negate(%x)")
    with pytest.raises(ValueError, match="send is started and not awaited"):
        read_bodies(text)


def test_a_loop_of_unknown_length_is_an_error():
    text = re.sub(r", backend_config=\{.*\}\}", "", MODULE)
    with pytest.raises(ValueError, match="a loop of unknown length"):
        read_bodies(text)
