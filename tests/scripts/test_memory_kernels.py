"""How the memory-bound kernels meet the memory; compiles for a GPU not there."""

import dataclasses

import pytest

from scripts.kernels import memory_kernels

THUNKS = """
001: kCopy         [source       | next=005 (4)] kCopy
005: kWhile        [prev=004 (1) | next=028 (1)]
  body:
    013: kCustomKernel [prev=012 (1) | next=014 (1)] input_reduce_fusion grid: [32768, 2, 1] threads: [256, 1, 1]  shared_memory: 128 bytes
028: kCustomKernel [prev=005 (1) | next=029 (1)] loop_multiply_fusion_1 grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501


def test_launches_are_read_inside_loops_too() -> None:
    assert memory_kernels.read_launches(THUNKS) == {
        "input_reduce_fusion": (65536, 256, 128),
        "loop_multiply_fusion_1": (1, 8, 0),
    }


@pytest.fixture(scope="module")
def kernels() -> list[memory_kernels.MemoryKernel]:
    return memory_kernels.compiled_kernels(
        ["layernorm D=768", "layernorm D=2048", "gelu F=8192 ", "gelu_tanh F=8192 "]
    )


@pytest.mark.plan
def test_our_kernels_wait_for_the_memory_and_nothing_else(kernels) -> None:
    assert memory_kernels.faults(kernels) == []
    ours = [kernel for kernel in kernels if kernel.ring_bytes]
    assert [k.case for k in ours] == [
        "layernorm D=768 backward, with dx + g",
        "layernorm D=2048 backward, with dx + g",
    ]
    assert {k.launch.threads for k in ours} == {128}
    assert [k.blocks_per_sm for k in ours] == [4, 3]


@pytest.mark.plan
def test_a_kernel_that_would_wait_is_found(kernels) -> None:
    (kernel,) = (k for k in kernels if k.ring_bytes and "2048" in k.case)

    def faults(**changes) -> list[str]:
        return memory_kernels.faults([dataclasses.replace(kernel, **changes)])

    def launch(**changes):
        return dataclasses.replace(kernel.launch, **changes)

    assert faults() == []
    (fault,) = faults(ring_bytes=4096)
    assert "under way" in fault
    (fault,) = faults(launch=launch(registers=255))
    assert "2 blocks fit" in fault
    (fault,) = faults(sass=kernel.sass.replace("STG.E.128", "STG.E.U16"))
    assert fault.endswith("4 STG.16")
    (fault,) = faults(sass=kernel.sass.replace("SHFL.BFLY", "BAR.SYNC"))
    assert "barriers" in fault


@pytest.mark.plan
def test_an_activation_of_too_much_arithmetic_is_found(kernels) -> None:
    (kernel,) = (k for k in kernels if k.case == "gelu F=8192 forward")
    doubled = dataclasses.replace(
        kernel, read_bytes=kernel.read_bytes // 2, written_bytes=0
    )
    (fault,) = memory_kernels.faults([doubled])
    assert "of arithmetic" in fault
