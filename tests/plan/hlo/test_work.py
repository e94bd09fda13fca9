"""FLOPs and bytes of single instructions are those that the shapes say."""

import pytest

from mjax.plan.hlo.parse import Computation, Module, parse
from mjax.plan.hlo.work import Work, fused_work, moved_bytes
from tests.plan.modules import recorded, text_of

PRODUCT = 2 * 512 * 256 * 128
WEIGHT, GATHERED, HIDDEN, INDEX = 256 * 128 * 2, 512 * 256 * 2, 512 * 128 * 2, 4


def layer() -> tuple[Module, Computation]:
    module, _ = recorded("layers")
    return module, module.computations["region_0.2_spmd"]


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        # cuBLAS: the workspace, an s8 result of 4 MiB, is no traffic.
        ("custom-call.2", GATHERED + WEIGHT, HIDDEN),
        # cuBLAS that reads a slice of the stacked weights, and writes one of a stack.
        ("dynamic_slice_fusion.1", WEIGHT + INDEX + HIDDEN, GATHERED),
        ("dynamic_slice_fusion", WEIGHT + INDEX + GATHERED, HIDDEN),
        # A slice of the stack, on another stream.
        ("fusion-start", WEIGHT + INDEX, WEIGHT),
        ("wrapped_add", 2 * 64 * 256 * 2, 64 * 256 * 2),
        ("copy.8", 4, 4),
    ],
)
def test_slices_count_as_slices_and_updates_as_updates(
    name: str, read: int, written: int
):
    module, computation = layer()
    x = computation.by_name[name]
    assert moved_bytes(x, computation, module) == (read, written)


@pytest.mark.parametrize("name", ["custom-call.2", "dynamic_slice_fusion"])
def test_a_product_is_found_alone_and_inside_a_fusion(name: str):
    module, computation = layer()
    work = fused_work(computation.by_name[name], computation, module)
    assert work == Work(flops=PRODUCT, products=1, product_dtype="bf16")
    assert work.times(3).flops == 3 * PRODUCT


def test_a_started_product_has_the_size_of_its_result():
    module, _ = recorded("async")
    main = module.computations["main"]
    start = main.by_name["gemm_start"]
    assert fused_work(start, main, module).flops == 2 * 64 * 32 * 16
    assert moved_bytes(start, main, module) == (
        64 * 32 * 2 + 32 * 16 * 2,
        64 * 16 * 2,
    )


def test_a_cublas_call_without_its_dims_is_refused():
    text = text_of("async").replace("lhs_contracting_dimensions", "other")
    module = parse(text)
    main = module.computations["main"]
    with pytest.raises(ValueError, match="contracted dims of gemm_start are not given"):
        fused_work(main.by_name["gemm_start"], main, module)


@pytest.mark.parametrize(
    ("target", "kernels"),
    [
        ("mosaic_gpu_v2", 1),
        ("__gpu$xla.gpu.triton", 1),
        ("__cudnn$fmhaSoftmax", 1),
        ("__cub$DeviceRadixSort", 0),
        ("xla_ffi_python_gpu_callback", 0),
    ],
)
def test_a_sort_or_a_callback_is_no_kernel_that_hides_anything(
    target: str, kernels: int
):
    text = text_of("pipeline").replace("mosaic_gpu_v2", target)
    module = parse(text)
    layer = module.computations["layer"]
    assert fused_work(layer.root, layer, module) == Work(kernels=kernels)
