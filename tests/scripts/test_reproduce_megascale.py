"""MegaScale's tables, simulated: two rows are fitted, the page is what comes out."""

import dataclasses
from collections.abc import Sequence

import pytest

from mjax import recipes
from mjax.estimate.formulas.case import Case, Constants, Device
from scripts.evidence import BENCHMARKS_DIR, Table
from scripts.plan import network_sweep
from scripts.reproduce import megascale as reproduce_megascale
from scripts.reproduce import megascale_cases as paper
from scripts.reproduce.megascale_cases import Row
from scripts.reproduce.megascale_fit import (
    FITTED_GPUS,
    errors,
    fitted_rows,
    simulate_row,
    solve,
)

ROWS = paper.STRONG_SCALING
READ_IN_TABLE_1 = {
    *("layers", "d_model", "heads", "head_width", "kv_heads", "gated", "parallel"),
    *("vocab_size", "seq_len", "sizes", "chunks", "microbatches"),
    *("post_norms", "learned_positions"),
}
"""Fields of a case that are sizes and layouts, or follow from them."""


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return {table.title: table for table in reproduce_megascale.make_tables(ROWS)}


def predictions(rows: Sequence[Row]) -> list[float]:
    fit = solve(fitted_rows(rows))
    assert fit is not None
    return [simulate_row(row, fit).total_s for row in rows]


def test_the_two_fitted_rows_are_exact():
    chosen = fitted_rows(ROWS)
    assert [row.gpus for row in chosen] == list(FITTED_GPUS)
    fit = solve(chosen)
    assert fit is not None
    # The bisection ends at the spacing of float64.
    assert errors(chosen, fit) == pytest.approx([0, 0], abs=1e-12)


def test_no_other_figure_of_the_paper_moves_a_prediction():
    """Times, MFU and FLOP/s of 14 rows, and of the fitted two all but the times."""
    chosen = fitted_rows(ROWS)
    others = [
        dataclasses.replace(
            row,
            step_s=row.step_s if row in chosen else 2 * row.step_s,
            mfu=row.mfu / 2,
            flops_per_s=row.flops_per_s / 2,
        )
        for row in ROWS
    ]
    assert predictions(others) == predictions(ROWS)


@pytest.mark.parametrize("gpus", FITTED_GPUS)
def test_the_time_of_a_fitted_row_moves_predictions(gpus: int):
    chosen = fitted_rows(ROWS)
    changed = [
        dataclasses.replace(row, step_s=1.02 * row.step_s)
        if row in chosen and row.gpus == gpus
        else row
        for row in ROWS
    ]
    # 512 GPUs are between the two in microbatches, so that either moves it.
    (index,) = (
        i for i, row in enumerate(ROWS) if (row.system, row.gpus) == ("MegaScale", 512)
    )
    before, after = predictions(ROWS)[index], predictions(changed)[index]
    assert 1.003 < after / before < 1.02


def test_rows_that_no_constants_fit_are_not_fitted():
    first, second = fitted_rows(ROWS)
    assert solve((first, dataclasses.replace(second, step_s=first.step_s))) is None
    # A quarter of the work in less than a quarter of the time: a fixed time below 0.
    assert solve((first, dataclasses.replace(second, step_s=7.5))) is None


@pytest.mark.parametrize("name", ["megascale", "network_sweep"])
def test_the_page_has_the_figures_that_are_computed_now(
    name: str, tables: dict[str, Table]
):
    page = (BENCHMARKS_DIR / f"{name}.md").read_text()
    made = tables if name == "megascale" else {"": network_sweep.make_table()}
    expected = [table.text for table in made.values()]
    for table in made.values():
        expected += ["| " + " | ".join(row) + " |" for row in table.rows]
    missing = [line for line in expected if line not in page.splitlines()]
    assert missing == []
    assert "imulated" in page.splitlines()[0]


def test_what_is_simulated_is_called_so_wherever_it_stands(tables: dict[str, Table]):
    for table in [*tables.values(), network_sweep.make_table()]:
        shows_paper_only = table.title.startswith(("The paper's", "Constants"))
        named = " ".join([table.title, table.text, *table.header])
        assert shows_paper_only or "simulated" in named, table.title


def test_the_largest_error_is_that_of_the_rows(tables: dict[str, Table]):
    (table,) = (t for t in tables.values() if "table 2" in t.title)
    ours = [row for row in table.rows if row[0] == "MegaScale"]
    assert len(ours) == 8
    assert [row[1] for row in ours if row[-1] == "fitted"] == ["256", "1024"]
    assert all(row[-1] == "predicted" for row in table.rows if row not in ours)
    error = max(abs(float(row[5].rstrip("%"))) for row in ours)
    assert f"MegaScale's 8 rows: {error}%" in table.text


def test_the_network_of_the_described_a100_is_that_of_the_papers_servers():
    """Section 3.6: eight cards of 200 Gb/s, eight GPUs."""
    assert paper.A100.network_bytes_per_s == 200e9 / 8
    assert paper.A100.gpus_per_node == 8


def test_every_constant_says_where_it_is_from():
    names = {
        field.name
        for owner in (Device, Constants, Case)
        for field in dataclasses.fields(owner)
    }
    # The window decides the visible keys.
    expected = names - READ_IN_TABLE_1 - {"visible_keys"} | {"window"}
    assert set(paper.SOURCES) == expected
    assert {kind for kind, _ in paper.SOURCES.values()} == {"read", "assumed", "fitted"}
    fitted = {name for name, (kind, _) in paper.SOURCES.items() if kind == "fitted"}
    assert fitted == {field.name for field in dataclasses.fields(paper.Fit)}


def test_every_assumed_constant_of_a_system_is_varied(tables: dict[str, Table]):
    (table,) = (t for t in tables.values() if "assumed constants" in t.title)
    varied = {row[0].split("`")[1] for row in table.rows if "`" in row[0]}
    assert varied == {
        field.name
        for field in dataclasses.fields(Constants)
        if paper.SOURCES[field.name][0] == "assumed"
    }
    # None of the changes is without effect.
    assert all(row[1:] != table.rows[0][1:] for row in table.rows[1:])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}-{row.gpus}")
def test_time_and_mfu_of_the_paper_agree_by_the_formula(row: Row):
    """To 1.1%: times have three figures (0.6% of 8.9 s), and the window is assumed."""
    formula = paper.flops_per_token(paper.GPT_175B, paper.SYSTEMS[row.system])
    tokens_per_s = row.batch * paper.SEQ_LEN / row.step_s
    peak = row.gpus * paper.A100.peak_flops_per_s
    assert tokens_per_s * formula / peak == pytest.approx(row.mfu, rel=0.011)


def test_four_rows_of_the_paper_have_another_flop_rate_than_mfu():
    different = [
        (row.system, row.gpus)
        for row in ROWS
        # Both have three figures: half a unit of the last is 0.1 points of MFU.
        if abs(row.flops_per_s / row.gpus / 312e12 - row.mfu) > 0.002
    ]
    assert different == [
        ("MegaScale", 12288),
        *(("Megatron-LM", 256), ("Megatron-LM", 512), ("Megatron-LM", 1024)),
    ]


@pytest.mark.parametrize(
    ("model", "billions"), [(paper.GPT_175B, 175), (paper.GPT_530B, 530)]
)
def test_a_model_has_the_parameters_of_its_name(model: paper.Model, billions: int):
    case = paper.make_case(
        model, paper.SYSTEMS["MegaScale"], 8 * model.pp, model.chunks * model.pp
    )
    weights = model.layers * case.layer_weights + case.vocab_size * case.d_model
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert case.layers_per_gpu * model.pp == model.layers


def test_a_layout_that_does_not_fill_its_gpus_is_refused():
    with pytest.raises(ValueError, match=r"100 GPUs and batch 768 .* multiple of 64"):
        paper.make_case(paper.GPT_175B, paper.SYSTEMS["MegaScale"], 100, 768)


def test_the_ablation_ends_where_table_2_begins():
    assert paper.ABLATION[-1][1] == ROWS[0].mfu
    assert paper.ABLATION_SYSTEMS[0] == paper.UNOPTIMISED
    ours = paper.ABLATION_SYSTEMS[-1]
    assert (ours.parallel, ours.window, ours.dp_overlap) == (True, 1024, True)


def test_on_a_fast_network_hsdp_is_fsdp_and_on_a_slow_one_it_is_not():
    """AWS's claim for 3.2 Tb/s. With accumulation a slow network tells them apart."""
    rows = {row[0]: row[1:-1] for row in network_sweep.make_table().rows}
    fsdp, hsdp = (
        [float(cell.split()[0]) for cell in rows[f"{name}, 4 microbatches"]]
        for name in ("FSDP", "HSDP")
    )
    assert fsdp[-1] == pytest.approx(hsdp[-1], rel=0.01)
    assert fsdp[0] > 3 * hsdp[0]


def test_the_recipes_have_the_window_of_the_step_time_model():
    for recipe in (recipes.megascale_175b, recipes.megascale_530b):
        assert recipe().model.window == (paper.WINDOW,)
