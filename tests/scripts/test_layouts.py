"""Which kernels of a compiled step only change the order of an array."""

from scripts.plan.layouts import Kind, count

MODULE = """HloModule step, is_scheduled=true

%turned (p: bf16[4,8]) -> bf16[8,4] {
  %p = bf16[4,8]{1,0} parameter(0)
  %c = bf16[4,8]{1,0} convert(%p)
  ROOT %t = bf16[8,4]{1,0} transpose(%c), dimensions={1,0}
}

%computed (q: bf16[4,8]) -> bf16[8,4] {
  %q = bf16[4,8]{1,0} parameter(0)
  %e = bf16[4,8]{1,0} exponential(%q)
  ROOT %u = bf16[8,4]{1,0} transpose(%e), dimensions={1,0}
}

ENTRY %main (x: bf16[4,8]) -> (bf16[8,4], bf16[8,4], bf16[4,8]) {
  %x = bf16[4,8]{1,0} parameter(0)
  %a = bf16[8,4]{1,0} fusion(%x), kind=kInput, calls=%turned
  %b = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%computed
  %k = bf16[4,8]{1,0} copy(%x)
  ROOT %out = (bf16[8,4], bf16[8,4], bf16[4,8]) tuple(%a, %b, %k)
}
"""


def test_a_fusion_with_arithmetic_is_not_a_pass_of_its_own():
    assert count(MODULE) == {
        "layout": Kind(launches=2, moved_bytes=2 * 2 * 64),
        "elementwise": Kind(launches=1, moved_bytes=2 * 64),
    }
