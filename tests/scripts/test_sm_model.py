"""The model of an SM: hand-computed rounds, and what must hold of any."""

import pytest

from scripts.kernels import loop_program, loop_variants, sass, sm_model
from scripts.kernels.sm_model import Meet, Product, Turn, Wait, Work

CLOCKS_OF_PRODUCT = 100.0


def product(clocks: float = CLOCKS_OF_PRODUCT) -> Product:
    return Product(flops=clocks * sm_model.FLOPS_PER_CLOCK, shared_bytes=0.0)


def work(**clocks: float) -> Work:
    return Work(clocks=clocks)


ALL = Wait(most_unfinished=0)


def round_of(*program: sm_model.Phase, warpgroups: int = 1, slowness: float = 1.0):
    return sm_model.clocks_per_round(program, warpgroups=warpgroups, slowness=slowness)


def test_work_after_a_waited_product_adds_to_it():
    assert round_of(product(), ALL, work(issue=40)) == pytest.approx(140)


def test_work_before_the_wait_runs_beside_the_product():
    assert round_of(product(), work(issue=40), ALL) == pytest.approx(100)
    assert round_of(product(), work(issue=240), ALL) == pytest.approx(240)


def test_work_takes_the_clocks_of_its_busiest_pipe():
    assert round_of(work(issue=40, mufu=70, alu=60)) == pytest.approx(70)


def test_a_product_takes_the_clocks_of_its_operands_if_they_are_later():
    bytes_read = 300 * sm_model.SHARED_BYTES_PER_CLOCK
    late = Product(flops=100 * sm_model.FLOPS_PER_CLOCK, shared_bytes=bytes_read)
    assert round_of(late, ALL) == pytest.approx(300)


def test_two_warpgroups_share_one_pipe():
    assert round_of(work(mufu=70), warpgroups=2) == pytest.approx(140)


def test_a_slow_warp_leaves_the_pipe_to_the_other():
    assert round_of(work(mufu=70), slowness=2.0) == pytest.approx(140)
    assert round_of(work(mufu=70), warpgroups=2, slowness=2.0) == pytest.approx(140)
    assert round_of(work(mufu=70), warpgroups=3, slowness=2.0) == pytest.approx(210)


def test_two_warpgroups_hide_each_others_work():
    program = (product(), ALL, work(issue=100))
    assert round_of(*program, warpgroups=2) == pytest.approx(200)


def test_a_wait_for_all_but_one_does_not_wait_for_the_last():
    program = (product(), product(), Wait(most_unfinished=1), work(issue=100), ALL)
    assert round_of(*program) == pytest.approx(200)


def test_turns_keep_products_of_a_warpgroup_together():
    turns = (Turn(taken=True), product(), product(), Turn(taken=False), ALL)
    assert round_of(*turns, warpgroups=2) == pytest.approx(400)


def test_a_turn_that_nobody_passes_is_reported():
    with pytest.raises(ValueError, match="each waits for another"):
        round_of(Turn(taken=True), product(), ALL, warpgroups=2)


def test_warpgroups_that_meet_wait_for_the_slower_one():
    # The second one's product is behind the first one's: 200, then both work.
    program = (product(), ALL, Meet(), work(issue=40))
    assert round_of(*program, warpgroups=2) == pytest.approx(280)
    alone = (product(), ALL, work(issue=40))
    assert round_of(*alone, warpgroups=2) == pytest.approx(200)
    assert round_of(*program) == pytest.approx(140)


def test_a_warp_cannot_be_faster_than_its_pipe():
    with pytest.raises(ValueError, match="slowness must be at least 1, got"):
        round_of(work(issue=1), slowness=0.5)


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_a_round_is_never_faster_than_its_busiest_resource(warpgroups):
    program = (product(), work(issue=60, mufu=90), ALL, product(30), work(alu=50))
    clocks = round_of(*program, warpgroups=warpgroups, slowness=1.5)
    most = sm_model.counts(program, warpgroups=warpgroups, loaded_bytes=0.0).most
    assert clocks >= most * (1 - 1e-6)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_more_clocks_never_make_it_faster(warpgroups):
    before = 0.0
    for more in range(0, 400, 25):
        program = (product(), ALL, work(issue=50 + more), product(), ALL)
        clocks = round_of(*program, warpgroups=warpgroups)
        assert clocks >= before - 1e-6
        before = clocks


def test_counts_are_clocks_of_the_whole_sm():
    read = 10 * sm_model.SHARED_BYTES_PER_CLOCK
    one = Product(flops=64 * sm_model.FLOPS_PER_CLOCK, shared_bytes=read)
    count = sm_model.counts(
        [one, work(issue=5, mufu=16, lsu=4)],
        warpgroups=2,
        loaded_bytes=6 * sm_model.SHARED_BYTES_PER_CLOCK,
    )
    assert (count.tensor, count.exponentials, count.issue) == (128, 32, 10)
    assert count.shared == 2 * 10 + 6 + 2 * 4
    added = sm_model.counts(
        [one], warpgroups=2, loaded_bytes=0.0, added_bytes=sm_model.L2_BYTES_PER_CLOCK
    )
    # Read from shared memory once; read and written in the L2.
    assert added.shared == 2 * 10 + sm_model.L2_BYTES_PER_CLOCK / 128
    assert added.l2 == pytest.approx(2)


def instruction(opcode: str, operands: str = "R0, R1") -> sass.Instruction:
    return sass.Instruction(opcode=opcode, operands=operands, predicate="")


SCORES = "HGMMA.64x128x16.F32.BF16"
WAIT = "WARPGROUP.DEPBAR.LE"


def phases(*body: sass.Instruction) -> list[str]:
    return [type(phase).__name__ for phase in loop_program.program(body)]


def test_a_loop_becomes_work_products_and_waits():
    body = (
        instruction(SCORES, "R24, gdesc[UR8], R24"),
        instruction(SCORES, "R24, gdesc[UR8], R24, gsb0"),
        instruction("MUFU.EX2"),
        instruction(WAIT, "gsb0, 0x0"),
        instruction("FADD"),
    )
    assert phases(*body) == ["Work", "Product", "Work", "Wait", "Work"]
    flops = loop_program.flops(loop_program.program(body))
    assert flops == 2 * 2 * 64 * 128 * 16


def test_operands_in_registers_are_not_read_from_shared_memory():
    both = loop_program.product_of(instruction(SCORES, "R24, gdesc[UR8], R24"))
    one = loop_program.product_of(instruction(SCORES, "R24, R88, gdesc[UR8], R24"))
    assert both == (2 * 64 * 128 * 16, (64 + 128) * 16 * 2)
    assert one == (2 * 64 * 128 * 16, 128 * 16 * 2)


def test_an_arrival_right_after_products_passes_the_turn():
    last = instruction(SCORES, "R24, gdesc[UR8], R24, gsb0")
    arrive, wait = instruction("SYNCS.ARRIVE.TRANS64"), instruction(WAIT, "gsb0, 0x0")
    assert phases(last, arrive, wait).count("Turn") == 2
    assert phases(last, wait, arrive).count("Turn") == 0


def test_an_arrival_after_a_fence_is_a_meeting():
    last = instruction(SCORES, "R24, gdesc[UR8], R24, gsb0")
    fence, arrive = instruction("FENCE.VIEW.ASYNC.S"), instruction("SYNCS.ARRIVE.A1T0")
    wait = instruction(WAIT, "gsb0, 0x0")
    assert phases(last, wait, fence, arrive, last).count("Meet") == 1
    # What is stored for the copy engine is for no warpgroup: a product comes between.
    assert phases(last, wait, fence, last, wait, arrive).count("Meet") == 0
    assert phases(last, fence, arrive).count("Turn") == 0


def test_an_exponential_takes_eight_clocks_of_a_scheduler():
    clocks = loop_program.work([instruction("MUFU.EX2"), instruction("FFMA")]).clocks
    assert clocks == {"issue": 2, "mufu": 8, "fma": 1}
    # 32 threads on each of four schedulers, 16 exponentials a clock of an SM.
    assert 4 * 32 / clocks["mufu"] == sm_model.EXPONENTIALS_PER_CLOCK


OVERLAPPED = (
    product(),
    product(),
    Wait(most_unfinished=1),
    work(issue=80, mufu=120),
    ALL,
)


def test_serial_work_waits_for_all_products():
    assert round_of(*OVERLAPPED) == pytest.approx(220)
    assert round_of(*loop_variants.serial(OVERLAPPED)) == pytest.approx(320)


def test_a_longer_block_takes_longer_in_proportion():
    assert round_of(*loop_variants.scaled(OVERLAPPED, 1.5)) == pytest.approx(330)


DKV = (
    product(),
    ALL,
    work(issue=50, mufu=80),
    product(),
    product(),
    Wait(most_unfinished=1),
    work(issue=30),
    product(),
)


@pytest.mark.parametrize(("fused", "products"), [(False, 4), (True, 5)])
def test_the_backward_loop_does_equal_products(fused, products):
    made = loop_variants.backward(
        DKV,
        scores=64 * 64,
        queries=80,
        keys=128,
        width=128,
        warpgroups=2,
        fused=fused,
    )
    one = 2 * 64 * 80 * 128
    assert loop_program.flops(made) == products * one
    # The work of 64 x 80 scores, of which the loop has 64 x 64.
    work_of = [p.clocks.get("mufu", 0.0) for p in made if isinstance(p, Work)]
    assert sum(work_of) == pytest.approx(80 * 80 / 64)


def test_registers_and_wider_blocks_spare_shared_memory():
    read = 2 * 64 * 128 * 2.0
    score = Product(flops=2.0 * 64 * 64 * 128, shared_bytes=read)
    dq = (score, score, ALL, work(issue=9), product())
    spared = loop_variants.from_registers(dq, 128)
    wide = loop_variants.wider(dq, 128)
    bytes_of = [
        sum(p.shared_bytes for p in program if isinstance(p, Product))
        for program in (dq, spared, wide)
    ]
    assert bytes_of == [2 * read, read, 3 * read]
    assert loop_program.flops(wide) == 2 * loop_program.flops(dq)
