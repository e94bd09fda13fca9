"""The parts of the GPU report: what they ask, how they judge, what they add up to."""

import dataclasses
import math
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import api
from mjax.kernels.attention.tuning import MOSAIC_H200
from mjax.recipes.gpt import gpt_1b3
from scripts.gpu import attention, correctness, layers, supervise, training
from scripts.gpu.parts import PARTS
from scripts.gpu.setting import make_setting

# --------------------------------------------------------------------- correctness

CASE = correctness.Case(seq_len=150, window=64, head_dim=16)


@pytest.fixture(scope="module")
def results():
    """Return what blocked attention computes in bfloat16, and the truth."""
    setting = make_setting("rehearse")
    program = correctness.programs(CASE, setting)[""]
    inputs = program.inputs(0)
    got = tuple(np.asarray(x) for x in program.function(*inputs))
    wider = dataclasses.replace(CASE, window=65)
    return got, correctness.truth(CASE, inputs), correctness.truth(wider, inputs)


def test_right_results_pass_with_their_errors(results):
    got, want, _ = results
    row = correctness.judge(CASE, got, got, want)
    assert 1e-4 < row["errors"]["out"] < correctness.LIMITS["bfloat16"]
    assert row["worst"]["dk"] > row["errors"]["dk"]


def test_a_window_off_by_one_is_found(results):
    got, _, wider = results
    with pytest.raises(RuntimeError, match=r"out is wrong.*dq is wrong.*dk is wrong"):
        correctness.judge(CASE, got, got, wider)


def test_one_number_that_was_not_written_is_found(results):
    got, want, _ = results
    for name, index in (("out", 0), ("dv", 3)):
        spoilt = [x.copy() for x in got]
        spoilt[index][1, 149, 0, 15] = math.nan
        with pytest.raises(RuntimeError, match=f"^{name} is not finite"):
            correctness.judge(CASE, spoilt, spoilt, want)


def test_one_wrong_position_is_found_though_the_whole_is_close(results):
    got, want, _ = results
    spoilt = [x.copy() for x in got]
    spoilt[2][0, 149] = spoilt[2][0, 148]
    with pytest.raises(RuntimeError, match=r"^dk is wrong.*worst position"):
        correctness.judge(CASE, spoilt, spoilt, want)


def test_two_runs_that_differ_in_one_bit_are_found(results):
    got, want, _ = results
    other = [x.copy() for x in got]
    bits = other[1].view(np.uint16)
    bits[0, 100, 0, 0] ^= 1
    with pytest.raises(
        RuntimeError,
        match=r"^dq differs between two runs; 1 of 600 .*t 100 to 100, head 0",
    ):
        correctness.judge(CASE, got, other, want)


@pytest.mark.parametrize("names", [("out",), ("dq",), ("dk", "dv")])
def test_some_results_are_those_of_the_whole(names, results):
    got, _, _ = results
    case = dataclasses.replace(CASE, results=names)
    program = correctness.programs(case, make_setting("rehearse"))[""]
    inputs = program.inputs(0)
    picked = [correctness.RESULTS.index(name) for name in names]
    found = [np.asarray(x) for x in program.function(*inputs)]
    for i, x in zip(picked, found, strict=True):
        np.testing.assert_array_equal(x, got[i])
    row = correctness.judge(case, found, found, correctness.truth(case, inputs))
    assert tuple(row["errors"]) == names


def test_the_place_of_a_fault_is_told(results):
    got, want, _ = results
    spoilt = [x.copy() for x in got]
    spoilt[0][1, 64:128, 1] = 3.0
    with pytest.raises(RuntimeError) as found:
        correctness.judge(CASE, spoilt, spoilt, want)
    where = "64 of 600 positions (b 1 to 1, t 64 to 127, head 1 to 1)"
    assert where in str(found.value)


def test_each_kernel_is_first_asked_alone_at_both_widths():
    first = list(correctness.cases(False).values())[:6]
    assert {(c.head_dim, c.results) for c in first} == {
        (head_dim, results)
        for head_dim in (64, 128)
        for results in (("out",), ("dq",), ("dk", "dv"))
    }
    assert len({correctness.kind_of(case) for case in first}) == 6


def test_the_cases_have_every_window_width_dtype_and_kind():
    cases = correctness.cases(False).values()
    for head_dim in (64, 128):
        for dtype in ("bfloat16", "float16"):
            some = [c for c in cases if (c.head_dim, c.dtype) == (head_dim, dtype)]
            windows = {c.window for c in some}
            assert windows >= {1, 64, 129, None}
        windows = {c.window for c in cases if c.head_dim == head_dim}
        assert windows >= {1, 2, 63, 64, 65, 127, 128, 129, 77, 400, None}
    assert {c.heads // c.kv_heads for c in cases} >= {1, 2, 4}
    assert {c.head_dim for c in cases} == set(MOSAIC_H200)
    assert any(c.documents and c.soft_cap and c.window for c in cases)
    assert all(any(c.seq_len == T for c in cases) for T in (*correctness.RAGGED, 8192))


# ----------------------------------------------------------------------- attention


def test_the_shapes_are_those_asked_for_and_of_equal_cost():
    shapes = attention.shapes(False)
    assert len({shape.name for shape in shapes}) == len(shapes) == 4 * 11
    for shape in shapes:
        assert shape.batch * shape.seq_len == attention.TOKENS
        assert shape.heads * shape.head_dim == attention.WIDTH
    # T=2048 W=4096 is the full window.
    by_length = {T: [s for s in shapes if s.seq_len == T] for T in (2048, 8192, 32_768)}
    assert [len(found) for found in by_length.values()] == [12, 16, 16]
    assert shapes[0].name == "T=8192 W=1024 D=128 GQA=1"


def test_useful_flops_are_fourteen_a_pair_and_width():
    shape = attention.shapes(True)[0]
    i, j = np.indices((shape.seq_len, shape.seq_len))
    pairs = int(((j <= i) & (i - j < 40)).sum()) * shape.batch * shape.heads
    assert shape.flops("forward") == 4 * shape.head_dim * pairs
    assert shape.flops("both") == 14 * shape.head_dim * pairs


def test_ratios_and_their_mean_are_those_of_the_rows():
    names = [shape.name for shape in attention.shapes(False)[:3]]
    rows = {"GEMM": {"case": "GEMM", "status": "ok", "tflops": 800.0, "median_ms": 1.0}}

    def add(name: str, contender: str, ms: float) -> None:
        case = f"{name} | {contender} | both"
        row = {"case": case, "status": "ok", "median_ms": ms, "spread": 0.02}
        rows[case] = row | {"tflops": 400.0}

    add(names[0], "ours", 2.0)
    add(names[0], "cudnn", 1.0)
    add(names[1], "ours", 1.0)
    add(names[1], "cudnn", 8.0)
    add(names[2], "ours", 5.0)
    failed = f"{names[2]} | cudnn | both"
    rows[failed] = {"case": failed, "status": "error", "why": "no plan"}
    tokamax = "T=32768 W=1024 D=128 GQA=1"
    add(tokamax, "tokamax", 30.0)
    add(tokamax, "ours", 4.0)
    forward, both, others = attention.tables(rows, False)
    assert "cuDNN's: -, over 0 of 44 shapes" in forward.text
    # The square root of 2 x 1/8.
    assert "cuDNN's: 0.500, over 2 of 44 shapes" in both.text
    lines = {line[0]: line for line in both.rows}
    assert lines[names[0]][1:6] == ["2.000", "1.000", "2.000", "400", "50.0"]
    assert lines[names[2]][2:4] == ["error: no plan", "-"]
    assert "tokamax / ours at T=32768 W=1024 D=128, both: 7.5" in others.text


@pytest.fixture
def nothing_compiled():
    """Forget what was compiled and imported: the contenders of these tests change."""
    for cached in (attention._compiled, attention.contenders._import):
        cached.cache_clear()
    yield
    for cached in (attention._compiled, attention.contenders._import):
        cached.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("reach", "far"), [(0, False), (1, True)])
def test_a_contender_that_sees_other_keys_is_seen(reach, far, monkeypatch):
    """With a tokamax that counts the keys of a window differently."""

    def dot_product_attention(q, k, v, *, is_causal, local_window_size, implementation):
        assert is_causal
        assert implementation == "mosaic"
        window = local_window_size[0] + 1 + reach
        return api.attention(q, k, v, window=window, backend="reference")

    fake = types.ModuleType("tokamax")
    monkeypatch.setattr(
        fake, "dot_product_attention", dot_product_attention, raising=False
    )
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    shape = dataclasses.replace(attention.shapes(True)[0], window=4)
    case = attention.Case(contender="tokamax", shape=shape, direction="forward")
    found = attention.difference(case, make_setting("rehearse"))
    assert isinstance(found, float)
    # bfloat16 twice; one key in four is more than a tenth.
    assert found > 0.1 if far else found < 0.01


@pytest.mark.usefixtures("nothing_compiled")
def test_a_time_stays_where_there_is_no_memory_to_compare_the_output(monkeypatch):
    def run_out(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    compiled = attention._compiled

    def compiled_or_not(case, setting):
        return run_out if case.contender == "blocked" else compiled(case, setting)

    monkeypatch.setattr(attention, "_compiled", compiled_or_not)
    shape = attention.shapes(True)[0]
    case = attention.Case(contender="ours", shape=shape, direction="forward")
    row = attention.measure(case, make_setting("rehearse"))
    assert row["difference"] == "blocked failed: RESOURCE_EXHAUSTED: Out of memory"
    assert row["median_ms"] > 0


def test_our_output_is_compared_at_the_shapes_that_are_timed():
    """As those of others: correctness has smaller shapes."""
    shape = attention.shapes(True)[0]
    case = attention.Case(contender="ours", shape=shape, direction="forward")
    assert attention.measure(case, make_setting("rehearse"))["difference"] == 0.0


@pytest.mark.parametrize(
    "error", [ImportError, OSError, RuntimeError, AttributeError], ids=str
)
def test_a_package_that_cannot_be_imported_is_asked_once_and_is_no_error(
    error, tmp_path, monkeypatch
):
    """A library that is missing is an OSError, a wrong version may be anything."""
    name = f"broken_{error.__name__.lower()}"
    tried = tmp_path / "tried"
    (tmp_path / f"{name}.py").write_text(
        f"with open({str(tried)!r}, 'a') as file:\n    file.write('x')\n"
        f"raise {error.__name__}('libplanted.so.1: cannot open')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(ImportError, match=r"cannot be imported: .*libplanted"):
            attention.contenders._imported(name)
    assert tried.read_text() == "x"


@pytest.mark.plan
def test_what_the_gpu_will_run_compiles_for_it_without_one():
    every = attention.cases(False)
    picked = [n for n in every if n.startswith("T=8192 W=1024 D=128 GQA=1 | ")]
    rows = []
    supervise.run_cases(
        PARTS["attention"],
        {name: every[name] for name in picked[:4]},
        "compile",
        deadline=time.monotonic() + 600,
        on_row=rows.append,
    )
    ours, cudnn = (
        [row["status"] for row in rows if name in row["case"]]
        for name in ("ours", "cudnn")
    )
    assert ours == ["ok", "ok"]
    assert cudnn == ["skipped", "skipped"]
    # q, k, v and d_out, out and three gradients, of 128 MiB each.
    assert rows[1]["bytes"][""] >= 7 * 2**27


# ------------------------------------------------------------- layers and training


def test_the_least_bytes_are_arguments_and_results_once():
    case = layers.Case(operator="GELU", contender="formula", direction="forward")
    array = layers.operators(False)["GELU"].args[0].size * 2
    assert layers.least_bytes(case, False) == 2 * array
    both = dataclasses.replace(case, direction="both")
    assert layers.least_bytes(both, False) == 3 * array


@pytest.mark.parametrize("operator", layers.operators(True))
def test_the_contenders_of_an_operator_compute_the_same(operator):
    described = layers.operators(True)[operator]
    for contender in described.contenders:
        case = layers.Case(
            operator=operator,
            contender=contender,
            direction=described.directions[-1],
        )
        assert layers.difference(case, make_setting("rehearse")) < layers.LIMIT


def test_a_contender_that_is_wrong_has_no_time(monkeypatch):
    described = layers.operators(True)["RMSNorm"]
    wrong = dict(described.contenders) | {"mjax": lambda x, scale: x * 1.1}
    spoilt = {"RMSNorm": dataclasses.replace(described, contenders=wrong)}
    monkeypatch.setattr(layers, "operators", lambda small: spoilt)
    case = layers.Case(operator="RMSNorm", contender="mjax", direction="forward")
    with pytest.raises(RuntimeError, match="it is wrong: off by"):
        layers.measure(case, make_setting("rehearse"))


def test_the_model_that_is_timed_is_the_recipe():
    recipe = gpt_1b3()
    assert recipe.model == training.GPT_1B3
    assert recipe.optim == training.ADAMW
    assert recipe.steps == training.NUM_STEPS


def test_each_step_has_one_change_against_the_base():
    def flat(case: training.Case) -> dict:
        fields = dataclasses.asdict(case)
        return fields | fields.pop("model")

    cases = training.cases(False)
    base = flat(cases["base"])
    changed = {
        name: {k for k, v in flat(case).items() if v != base[k]}
        for name, case in cases.items()
    }
    assert changed.pop("base") == set()
    # cuDNN has no segments: its base is the row above it.
    assert changed.pop("one document a row, cudnn") == {
        "isolate_documents",
        "attention",
    }
    assert {len(fields) for fields in changed.values()} == {1}
    assert len(cases) <= 10


def test_a_random_batch_has_two_documents_a_row():
    case = training.cases(True)["base"]
    program = training.programs(case, make_setting("rehearse"))["step"].program
    batch = training.random_batch(program, case.model.vocab_size, 0)
    tokens, positions = batch["tokens"], np.asarray(batch["positions"])
    assert tokens.shape == (case.tokens // case.seq_len, case.seq_len)
    assert int(jnp.max(tokens)) < case.model.vocab_size
    np.testing.assert_array_equal(batch["targets"][:, :-1], tokens[:, 1:])
    for segments, place in zip(np.asarray(batch["segments"]), positions, strict=True):
        assert set(segments) == {0, 1}
        np.testing.assert_array_equal(
            np.where(np.diff(segments))[0] + 1, np.where(place == 0)[0][1:]
        )
