"""How machine code meets the memory: widths, loads under way, occupancy, waits."""

import pytest

from mjax.hardware.gpus import GPUS
from scripts.kernels import memory_access
from scripts.kernels.memory_access import Launch

GPU = GPUS["h200"]

# Of XLA's LayerNorm, D 2048, and of its softmax of a chunk of logits, jax 0.11.2: some
# of their lines, as nvdisasm prints them.
NORM = """
        /*0090*/                   LDG.E.128 R8, desc[UR6][R40.64] ;
        /*00a0*/                   LDG.E.128 R20, desc[UR6][R40.64+0x1000] ;
        /*00b0*/                   LDG.E.128 R28, desc[UR6][R40.64+0x3000] ;
        /*00c0*/                   SHF.L.U32 R4, R5, 0x1, RZ ;
        /*00d0*/                   IMAD.U32 R62, R21, 0x10000, RZ ;
        /*00e0*/                   LDG.E.128 R24, desc[UR6][R40.64+0x5000] ;
        /*3710*/                   STG.E.128 desc[UR6][R42.64], R4 ;
        /*3790*/                   EXIT ;
        /*37a0*/                   BRA `(.L_x_0);
"""
SOFTMAX = """
        /*0090*/                   LDG.E.64.CONSTANT R10, desc[UR8][R10.64] ;
        /*00a0*/               @P0 LDG.E.U8.CONSTANT R22, desc[UR8][R12.64] ;
        /*00b0*/                   LDG.E.CONSTANT R4, desc[UR8][R6.64] ;
        /*00c0*/                   STG.E.U16 desc[UR8][R2.64+0x2], R6 ;
        /*00d0*/              @UP2 UTMALDG.3D [UR24], [UR14] ;
        /*00e0*/              @UP2 UBLKCP.G.S [UR8], [UR11], UR5 ;
"""


def test_widths_are_read_from_suffixes() -> None:
    assert memory_access.accesses(NORM) == {"LDG.128": 4, "STG.128": 1}
    assert memory_access.accesses(SOFTMAX) == {
        "LDG.64": 1,
        "LDG.8": 1,
        "LDG.32": 1,
        "STG.16": 1,
        "UTMALDG": 1,
        "UBLKCP": 1,
    }


def test_a_load_is_under_way_until_one_of_its_registers_is_named() -> None:
    # R21 is of the second load, R20 to R23; the others stay.
    assert memory_access.loaded_bytes(NORM) == 48
    assert memory_access.loaded_bytes(NORM.replace("R21,", "R17,")) == 64
    # The address of the third is in the second; the first is waited for after it.
    chained = NORM.replace("R40.64+0x3000", "R22.64").replace("R5, 0x1", "R9, 0x1")
    assert memory_access.loaded_bytes(chained) == 32


def test_code_ends_at_its_last_exit() -> None:
    assert memory_access.straight(NORM)[-1].opcode == "EXIT"
    assert len(memory_access.straight(NORM)) == 8


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 16),  # 64 warps of 4.
        ({"registers": 89}, 5),  # 96 x 128 registers of 65,536.
        ({"registers": 33}, 12),  # 40 x 128.
        ({"shared_bytes": 29_720}, 7),  # And 1 KiB each, of 228.
        ({"shared_bytes": 115_736}, 1),  # Two are 48 bytes too much.
        ({"shared_bytes": 115_712}, 2),
        ({"threads": 32}, 32),
        ({"blocks": 264}, 2),
    ],
)
def test_the_scarcest_resource_decides_how_many_blocks_fit(changes, blocks) -> None:
    fields = {"blocks": 10**6, "threads": 128, "registers": 32, "shared_bytes": 0}
    assert memory_access.blocks_per_sm(Launch(**fields | changes), GPU) == blocks


def test_bytes_needed_are_bandwidth_times_latency() -> None:
    # 4.8e12 / 132 a second, 700 ns: 25.5 KB.
    assert memory_access.bytes_needed(GPU, 1.0) == pytest.approx(25_455, rel=1e-3)
    assert memory_access.bytes_needed(GPU, 0.5) == pytest.approx(12_727, rel=1e-3)


LOOP = """
.L_x_3:
        /*0010*/                   LDS.64 R2, [R42] ;
        /*0020*/                   FADD R4, R3, R3 ;
        /*0030*/                   FADD R5, R4, R4 ;
        /*0040*/                   SHFL.BFLY PT, R6, R5, 0x1, 0x1f ;
        /*0050*/                   FADD R7, R6, R5 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
        /*0070*/              @!P2 BRA `(.L_x_3) ;
        /*0080*/                   EXIT ;
"""


def test_a_loop_waits_for_what_it_needs() -> None:
    body = memory_access.longest_loop(LOOP)
    assert [x.opcode.partition(".")[0] for x in body] == [
        *("LDS", "FADD", "FADD", "SHFL", "FADD", "BAR", "BRA")
    ]
    clocks = memory_access.CLOCKS
    waits = clocks["LDS"] + 4 + 4 + clocks["SHFL"] + clocks["BAR"]
    assert memory_access.clocks_alone(body) == pytest.approx(waits, abs=6)
    independent = memory_access.longest_loop(LOOP.replace("R3, R3", "R8, R8"))
    saved = memory_access.clocks_alone(body) - memory_access.clocks_alone(independent)
    assert saved == pytest.approx(clocks["LDS"], abs=2)


def test_code_without_a_loop_has_none() -> None:
    assert memory_access.longest_loop(NORM.partition("EXIT")[0]) == []
