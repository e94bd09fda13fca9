"""What Pallas Mosaic GPU kernels compile to; compiles for a GPU that is not there."""

import dataclasses
import importlib
import json

import pytest

from mjax.kernels.attention.tuning import FUSED_H200, MOSAIC_H200
from scripts.kernels import kernel_table
from scripts.kernels.compiled_kernels import (
    CaseReport,
    CompiledKernel,
    KernelCase,
    compile_cases,
    count_instructions,
    find_faults,
)
from scripts.kernels.sass import LOOP_WATCHED, Loop
from tests.scripts import planted_cases

PLANTED = f"{planted_cases.__name__}:cases"
SELECTED = f"{planted_cases.__name__}:selected"
LIMIT = 1024


def sound(**changes) -> KernelCase:
    """Return a case that asks for nothing, but for the changes."""
    return KernelCase(function=abs, args=(), required=(), **changes)


def compiled(**changes) -> CompiledKernel:
    fields = {
        "name": "op",
        "registers": 168,
        "set_registers": (240, 24),
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "shared_memory_bytes": 1024,
        "serialised": (),
        "instructions": {"HGMMA": 4},
        "loops": (),
    }
    return CompiledKernel(**fields | changes)


@pytest.fixture(scope="module")
def planted() -> dict[str, CaseReport]:
    return {report.case: report for report in compile_cases(PLANTED)}


@pytest.mark.plan
def test_every_case_is_reported_in_order(planted):
    assert list(planted) == list(planted_cases.cases())


@pytest.mark.plan
def test_a_sound_kernel_has_no_fault_and_its_numbers_are_read(planted):
    report = planted["sound"]
    assert report.faults == ()
    (kernel,) = report.kernels
    assert kernel.name == "product"
    # 64 x 64 float32 sums over the 128 threads of a warpgroup, and addresses.
    assert 32 < kernel.registers < 128
    # Three tiles of 64 x 64 bfloat16, then one barrier of 8 bytes.
    assert kernel.shared_memory_bytes == 3 * 64 * 64 * 2 + 8
    # 64 deep, 16 at a time; a copy in for each operand, and one out.
    assert kernel.instructions["HGMMA"] == 4
    assert kernel.instructions["UTMALDG"] == 2
    assert kernel.instructions["UTMASTG"] == 1
    assert kernel.instructions["STL"] == kernel.instructions["LDL"] == 0


@pytest.mark.plan
@pytest.mark.parametrize(
    ("case", "faults"),
    [
        (
            "serialised products",
            ["product: wgmma.mma_async instructions are serialized due to "],
        ),
        (
            "no matrix product, no bulk copy",
            ["twice has no HGMMA", "twice has no UTMALDG"],
        ),
        ("too much shared memory", ["does not compile: Mosaic GPU kernel exceeds"]),
        ("no kernel", ["no kernel was compiled"]),
    ],
)
def test_a_planted_fault_is_found(planted, case, faults):
    found = planted[case].faults
    assert len(found) == len(faults)
    assert all(map(str.startswith, found, faults)), found


@pytest.mark.plan
def test_spilled_registers_are_found_and_their_instructions_counted(planted):
    report = planted["spilled registers"]
    (kernel,) = report.kernels
    assert kernel.spill_store_bytes > 0
    # 4 to 16 bytes an instruction.
    assert 0 < kernel.instructions["STL"] <= kernel.spill_store_bytes / 4
    assert 0 < kernel.instructions["LDL"] <= kernel.spill_load_bytes / 4
    assert report.faults[0] == (
        f"product spills: {kernel.spill_store_bytes} bytes stored, "
        f"{kernel.spill_load_bytes} loaded"
    )


@pytest.mark.plan
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"No module named 'tests\.nothing'"):
        compile_cases("tests.nothing:cases")


def test_a_spill_a_serialisation_and_too_much_shared_memory_are_faults():
    kernel = compiled(
        spill_store_bytes=8,
        spill_load_bytes=16,
        serialised=("wgmma.mma_async instructions are serialized",),
        shared_memory_bytes=1025,
    )
    assert find_faults(
        [compiled(), kernel], case=sound(), max_shared_memory_bytes=LIMIT
    ) == (
        "op spills: 8 bytes stored, 16 loaded",
        "op: wgmma.mma_async instructions are serialized",
        "op takes 1025 bytes of shared memory; a block has 1024",
    )


def loop(hidden: int = 66, instructions: int = 500, **counts: int) -> Loop:
    every = dict.fromkeys(LOOP_WATCHED, 0) | {"HGMMA": 16, "MUFU.EX2": 66} | counts
    return Loop(instructions=instructions, counts=every, hidden_exponentials=hidden)


def test_loops_that_lose_their_overlap_or_grow_are_faults():
    asked = sound(hidden=1.0, most_instructions=600)

    def faults(*loops: Loop) -> tuple[str, ...]:
        kernels = [compiled(loops=loops)]
        return find_faults(kernels, case=asked, max_shared_memory_bytes=LIMIT)

    assert faults(loop(), loop()) == ()
    assert faults(loop(), loop(hidden=65)) == (
        "op, loop 1: 65 of 66 exponentials run under a product, at least 100% must",
    )
    assert faults(loop(instructions=601)) == (
        "op, loop 0 has 601 instructions, at most 600 are allowed",
    )
    assert faults(loop(LD=18, BAR=1)) == (
        "op, loop 0 has 18 LD, at most 0 are allowed",
        "op, loop 0 has 1 BAR, at most 0 are allowed",
    )
    asked = dataclasses.replace(asked, most_barriers=2)
    assert faults(loop(BAR=2, MEMBAR=2)) == ()
    assert faults(loop(LD=1, BAR=3)) == (
        "op, loop 0 has 1 LD, at most 0 are allowed",
        "op, loop 0 has 3 BAR, at most 2 are allowed",
    )


def test_instructions_are_counted_by_their_first_parts():
    code = """
    .L_x_1:
       -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
       1:-:-:-:04        /*0010*/               @P0 UTMALDG.4D [UR8], [UR6]
       1:-:-:-:04        /*0020*/             @!UP1 UTMALDG.4D [UR8], [UR6]
       -:-:-:Y:0a        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R24
       -:-:-:Y:01        /*1fa40*/                  MUFU.EX2 R3, R3
       -:-:-:Y:01        /*1fa50*/                  MUFU.RCP R3, R3
       -:-:-:Y:01        /*1fa60*/                  STL.64 [R1+0x8], R2
       -:-:-:Y:01        /*1fa70*/                  LDLX R2
    """
    assert {n: c for n, c in count_instructions(code).items() if c} == {
        "HGMMA": 1,
        "UTMALDG": 2,
        "STL": 1,
        "MUFU.EX2": 1,
    }


def test_text_without_instructions_is_refused():
    with pytest.raises(RuntimeError, match="no instructions"):
        count_instructions("nvdisasm: error")


@pytest.mark.parametrize(
    ("kernels", "faults", "code"),
    [
        ((compiled(instructions=dict.fromkeys(kernel_table.WATCHED, 0)),), (), 0),
        ((), ("does not compile",), 1),
    ],
)
def test_the_table_ends_with_1_on_a_fault(monkeypatch, capsys, kernels, faults, code):
    report = CaseReport(case="case", compile_s=1.0, kernels=kernels, faults=faults)
    monkeypatch.setattr(kernel_table, "compile_cases", lambda *_, **__: [report])
    assert kernel_table.main([]) == code
    table = capsys.readouterr().out
    assert ("168 (240/24)" in table) == bool(kernels)
    assert ("case: does not compile" in table) == bool(faults)
    assert kernel_table.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)[0]["faults"] == list(faults)


def test_the_cases_of_the_table_are_found_by_their_name():
    module, _, function = kernel_table.SHIPPED.partition(":")
    found = getattr(importlib.import_module(module), function)
    assert found is kernel_table.shipped_cases


def test_a_process_that_fails_ends_the_table_with_its_message(monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("jax has no CUDA plugin")

    monkeypatch.setattr(kernel_table, "compile_cases", fail)
    assert kernel_table.main([]) == 1
    assert "error: jax has no CUDA plugin" in capsys.readouterr().err


def test_a_table_of_nothing_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(kernel_table, "compile_cases", lambda *_, **__: [])
    assert kernel_table.main([]) == 1
    assert "has no cases" in capsys.readouterr().err


@pytest.mark.plan
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases", [SELECTED, pytest.param(kernel_table.SHIPPED, marks=pytest.mark.slow)]
)
def test_no_shipped_kernel_has_a_fault(cases):
    reports = compile_cases(cases)
    assert {f"{r.case}: {fault}" for r in reports for fault in r.faults} == set()
    names = {kernel.name for report in reports for kernel in report.kernels}
    assert names == {
        *("attention_forward", "attention_dq", "attention_dkv", "attention_fused"),
        "norm_backward",
    }


@pytest.mark.parametrize("head_dim", MOSAIC_H200)
def test_every_tuning_of_attention_is_among_the_shipped_cases(head_dim):
    """With all that a kernel can be asked for at once: it takes most registers."""
    found = {
        ", fused" in name: case
        for name, case in kernel_table.shipped_cases().items()
        if name.startswith(f"attention {head_dim}, ") and ", all" in name
    }
    assert len(found) == 1 + (head_dim in FUSED_H200)
    for is_fused, case in found.items():
        q, k, v = case.args[:3]
        assert q.shape[-1] == head_dim
        assert v.shape[-1] == (MOSAIC_H200[head_dim].value_dim or head_dim)
        assert q.shape[2] == 8 * k.shape[2]
        assert case.args[6 if is_fused else 3] is not None
