"""What XLA makes of operators that wait for memory, on a GPU that is described."""

import pytest

from scripts.overlap import xla_bytes

pytestmark = pytest.mark.plan

# Sums of the scale's gradient over blocks of positions, and of biases: a few rows.
PARTIAL_SUMS = 1.02


def ratio(case: xla_bytes.Case) -> float:
    """Return bytes moved over the minimum."""
    counted = xla_bytes.count(case)
    return counted.of("elementwise", "call")[1] / counted.minimum_bytes


def by_name(cases):
    return {case.name: case for case in cases}


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
def test_activations_move_each_argument_and_result_once(kind) -> None:
    cases = by_name(xla_bytes.activation_cases())
    chosen = [case for name, case in cases.items() if name.startswith(f"{kind} ")]
    assert len(chosen) == 4
    for case in chosen:
        assert ratio(case) < PARTIAL_SUMS


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_read_and_write_once(kind) -> None:
    cases = by_name(xla_bytes.norm_cases())
    assert ratio(cases[f"{kind} D=2048 forward"]) < PARTIAL_SUMS
    # 396 blocks of sums in float32, written and read: 6.2 MiB for 128.
    assert ratio(cases[f"{kind} D=2048 backward, with dx + g"]) < 1.05
    # Where the kernel does not fit: x and g twice, what is added and dx once.
    wide = ratio(cases[f"{kind} D=12288 backward, with dx + g"])
    assert wide < 1.5 * PARTIAL_SUMS


@pytest.mark.parametrize("tp", [1, 8])
def test_the_head_keeps_one_chunk_and_multiplies_in_bfloat16(tp) -> None:
    name = f"head D=2048 V=131072 tp={tp}, loss and gradients"
    counted = xla_bytes.count(by_name(xla_bytes.head_cases())[name])
    products = [k for k in counted.kernels if k.kind == "gemm"]
    assert {k.product_dtype for k in products} == {"bf16"}
    per_product = 2 * xla_bytes.POSITIONS * 2048 * 131072 // tp
    assert sum(k.runs * k.flops for k in products) == 3 * per_product
    # 2^27 logits in float32, their gradient in bfloat16, and 128 MiB for the rest.
    assert counted.temp_bytes < 2**27 * (4 + 2) + 2**27


def test_rotation_costs_too_little_for_a_kernel() -> None:
    # The recipe where it costs most: narrow, and as many key heads as query heads.
    rotated, plain = (
        xla_bytes.count(xla_bytes.rope_case("gpt-1b3", rotate))
        for rotate in (True, False)
    )
    assert plain.floor_s < rotated.floor_s < 1.015 * plain.floor_s
