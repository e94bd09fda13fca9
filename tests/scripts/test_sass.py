"""Loops of disassembled code: which there are, and what runs under a product."""

from scripts.kernels import sass

LINE = "        /*{address:04x}*/    {text} ;  /* 0x0000000000007918 */\n"


def listing(*lines: str) -> str:
    """Write lines as nvdisasm does: labels end in a colon."""
    texts = [
        f"{line}\n" if line.endswith(":") else LINE.format(address=16 * i, text=line)
        for i, line in enumerate(lines)
    ]
    return "".join(texts)


PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"
EX2 = "MUFU.EX2 R1, R2"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, {}"


def loop(*body: str) -> str:
    return listing(".L_x_1:", *body, "@!P1 BRA `(.L_x_1)", "EXIT")


def hidden(*body: str) -> tuple[int, int]:
    (found,) = sass.loops(loop(*body))
    return found.hidden_exponentials, found.exponentials


def test_exponentials_count_as_hidden_between_a_product_and_its_wait():
    assert hidden(EX2, PRODUCT, EX2, EX2, WAIT.format("0x0"), EX2) == (2, 4)


def test_what_a_round_leaves_unfinished_hides_those_of_the_next():
    assert hidden(EX2, WAIT.format("0x0"), EX2, PRODUCT) == (1, 2)


def test_a_wait_for_all_but_one_leaves_one_under_way():
    body = (PRODUCT, PRODUCT, WAIT.format("0x1"), EX2, WAIT.format("0x0"), EX2)
    assert hidden(*body) == (1, 2)


def test_a_product_that_ends_no_group_is_no_group_of_its_own():
    first = PRODUCT.removesuffix(", gsb0")
    assert hidden(first, PRODUCT, WAIT.format("0x0"), EX2) == (0, 1)


def test_loops_without_products_and_code_out_of_line_are_left_out():
    spin = (".L_x_7:", "NOP", "@!P0 BRA `(.L_x_7)")
    text = listing(
        *spin,
        *(".L_x_1:", PRODUCT, EX2, WAIT.format("0x0"), "@P1 BRA `(.L_x_1)", "EXIT"),
        # The slow path of a wait, which goes back to where it came from.
        *(".L_x_9:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR8], R2", "BRA `(.L_x_1)"),
    )
    (found,) = sass.loops(text)
    assert found.instructions == 4


def test_of_loops_inside_each_other_it_is_the_inner_one():
    inner = (".L_x_2:", PRODUCT, WAIT.format("0x0"), "@P1 BRA `(.L_x_2)")
    text = listing(".L_x_1:", EX2, *inner, "@P2 BRA `(.L_x_1)", "EXIT")
    (found,) = sass.loops(text)
    assert (found.instructions, found.exponentials) == (3, 0)


def test_generic_loads_are_told_from_those_that_name_their_memory():
    body = ("LD.E.64 R2, [R4.64]", "LDG.E R2, [R4.64]", "LDS.64 R2, [R4]", PRODUCT)
    (found,) = sass.loops(loop(*body))
    counts = {name: found.counts[name] for name in ("LD", "LDG", "LDS", "HGMMA")}
    assert counts == {"LD": 1, "LDG": 1, "LDS": 1, "HGMMA": 1}
