"""The closed-form step time: known limits, and monotonicity."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.estimate.formulas.memory import layer_bytes, layers_in_flight, memory
from mjax.estimate.formulas.step_time import mfu, simulate
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.model import counts
from mjax.model.config import ModelConfig
from mjax.pipeline import schedule
from tests.layers.test_block import equations
from tests.training import LENGTH, ROWS, TINY, Layout, make_program

# Sums and products of a few float64 numbers.
EXACT = 1e-12

DEVICE = Device(
    peak_flops_per_s=312e12,
    memory_bytes_per_s=2e12,
    node_link_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
)
IDEAL = Constants(
    product_efficiency=1.0,
    attention_efficiency=1.0,
    memory_efficiency=1.0,
    node_link_efficiency=1.0,
    network_efficiency=1.0,
    kernel_s=0.0,
    hop_s=0.0,
)
GPT = Case(
    layers=96,
    d_model=12288,
    d_ff=49152,
    heads=128,
    head_width=96,
    kv_heads=128,
    gated=False,
    parallel=False,
    vocab_size=64000,
    seq_len=2048,
    sizes=AxisSizes(pp=8, dp_replicate=1, dp_shard=4, tp=8),
    chunks=6,
    microbatches=192,
    tp_chunks=8,
)


def with_sizes(case: Case, **sizes: int) -> Case:
    """Change axes; a run with one stage has one virtual stage."""
    changed = dataclasses.replace(case.sizes, **sizes)
    chunks = case.chunks if changed.pp > 1 else 1
    return dataclasses.replace(case, sizes=changed, chunks=chunks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a small run on a mesh of any shape."""
    size = st.sampled_from([1, 2, 4, 16])
    pp, heads = draw(size), draw(st.sampled_from([4, 8]))
    return Case(
        layers=draw(st.integers(1, 40)),
        d_model=64 * heads,
        d_ff=256 * heads,
        heads=heads,
        head_width=64,
        kv_heads=draw(st.sampled_from([1, heads])),
        gated=draw(st.booleans()),
        parallel=draw(st.booleans()),
        vocab_size=draw(st.integers(100, 100_000)),
        seq_len=draw(st.sampled_from([128, 4096])),
        sizes=AxisSizes(
            pp=pp, dp_replicate=draw(size), dp_shard=draw(size), tp=draw(size)
        ),
        chunks=draw(st.integers(1, 4)) if pp > 1 else 1,
        microbatches=draw(st.integers(1, 64)),
        tp_chunks=draw(st.sampled_from([1, 2])),
        rows=draw(st.integers(1, 4)),
        remat=draw(st.sampled_from(["none", "attention", "core", "dots", "full"])),
        zero=draw(st.integers(0, 2 if pp > 1 else 3)),
        grad_bytes=draw(st.sampled_from([2, 4])),
    )


shares = st.floats(0.05, 1.0)
constants = st.builds(
    Constants,
    product_efficiency=shares,
    attention_efficiency=shares,
    memory_efficiency=shares,
    node_link_efficiency=shares,
    network_efficiency=shares,
    tp_overlap=st.floats(0, 1),
    dp_overlap=st.floats(0, 1),
    pp_overlap=st.floats(0, 1),
    elementwise_passes=st.floats(1, 3),
    kernel_s=st.floats(0, 1e-5),
    hop_s=st.floats(0, 1e-5),
    fixed_s=st.floats(0, 2),
)


@given(cases(), constants)
def test_the_bubble_is_that_of_the_interleaved_schedule(case: Case, reached: Constants):
    time = simulate(case, DEVICE, reached)
    expected = (case.sizes.pp - 1) / (case.chunks * case.microbatches)
    assert time.bubble == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 4])
def test_bubble_and_memory_are_those_of_the_schedule_that_runs(
    stages: int, chunks: int, rounds: int
):
    microbatches = rounds * stages
    built = schedule.build(
        "interleaved-1f1b" if chunks > 1 else "1f1b",
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
    )
    case = dataclasses.replace(
        with_sizes(GPT, pp=stages),
        layers=stages * chunks,
        chunks=chunks,
        microbatches=microbatches,
    )
    assert simulate(case, DEVICE, IDEAL).bubble == pytest.approx(built.bubble)
    # One layer per virtual stage.
    assert layers_in_flight(case) == max(built.in_flight)


@given(cases(), constants)
def test_an_axis_of_size_one_takes_no_time(case: Case, reached: Constants):
    one = with_sizes(case, tp=1)
    assert simulate(one, DEVICE, reached).tp_s == 0
    one = with_sizes(case, dp_replicate=1, dp_shard=1)
    assert simulate(one, DEVICE, reached).dp_s == 0
    one = with_sizes(case, pp=1)
    assert simulate(one, DEVICE, reached).pp_s == 0
    assert simulate(one, DEVICE, reached).bubble_s == 0


@given(cases(), constants)
def test_the_parts_add_up_to_the_step(case: Case, reached: Constants):
    time = simulate(case, DEVICE, reached)
    parts = dataclasses.asdict(time)
    assert all(0 <= seconds < math.inf for seconds in parts.values())
    assert time.total_s == pytest.approx(math.fsum(parts.values()), rel=EXACT)
    later = dataclasses.replace(reached, fixed_s=reached.fixed_s + 1)
    assert simulate(case, DEVICE, later).total_s == pytest.approx(time.total_s + 1)


@given(
    cases(),
    constants,
    st.sampled_from([f.name for f in dataclasses.fields(Device) if "per_s" in f.name]),
    st.floats(1, 100),
)
def test_a_faster_device_is_never_slower(
    case: Case, reached: Constants, rate: str, factor: float
):
    faster = dataclasses.replace(DEVICE, **{rate: factor * getattr(DEVICE, rate)})
    # Faster matmuls overlap less of the transfers, but the total never grows.
    before = simulate(case, DEVICE, reached).total_s
    assert simulate(case, faster, reached).total_s <= before * (1 + EXACT)


@given(cases(), constants, st.sampled_from(["tp", "dp", "pp"]), st.floats(0, 1))
def test_more_overlap_is_never_slower_and_hides_no_more_than_there_is(
    case: Case, reached: Constants, axis: str, overlap: float
):
    name = f"{axis}_overlap"
    open_, some, full = (
        simulate(case, DEVICE, dataclasses.replace(reached, **{name: share}))
        for share in (0.0, overlap, 1.0)
    )
    slack = 1 + EXACT
    assert full.total_s <= some.total_s * slack
    assert some.total_s <= open_.total_s * slack
    hidden = getattr(open_, f"{axis}_s") - getattr(full, f"{axis}_s")
    assert hidden <= (full.products_s + full.attention_s) * slack


@given(cases(), constants)
def test_mfu_is_bounded_by_the_best_efficiency(case: Case, reached: Constants):
    case = dataclasses.replace(case, layers=case.sizes.pp * case.chunks)
    weights = case.layers * case.layer_weights + case.vocab_size * case.d_model
    scores = case.layers * case.heads * case.head_width * case.keys
    flops = 3 * (2 * weights + 4 * scores)
    time = simulate(case, DEVICE, reached)
    best = max(reached.product_efficiency, reached.attention_efficiency)
    assert 0 < mfu(case, DEVICE, time.total_s, flops) <= best * (1 + EXACT)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("window", [None, 512])
def test_the_flops_that_take_time_are_those_that_are_counted(
    gated: bool, window: int | None
):
    model = ModelConfig(
        layers=4,
        d_model=512,
        heads=8,
        kv_heads=2,
        d_ff=2048,
        vocab_size=1000,
        window=(window,),
        activation="swiglu" if gated else "gelu",
    )
    case = Case(
        layers=4,
        d_model=512,
        d_ff=2048,
        heads=8,
        head_width=64,
        kv_heads=2,
        gated=gated,
        parallel=True,
        vocab_size=1000,
        seq_len=2048,
        visible_keys=counts.visible_pairs(2048, window) / 2048,
        sizes=AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=4),
        microbatches=3,
    )
    without_memory = dataclasses.replace(DEVICE, memory_bytes_per_s=math.inf)
    time = simulate(case, without_memory, IDEAL)
    # The backward pass of the kernel recomputes the scores: 3.5 passes instead of 3.
    busy_s = time.products_s + time.head_s + time.attention_s * 3 / 3.5
    flops = counts.flops_per_token(model, case.seq_len)
    assert mfu(case, DEVICE, busy_s, flops) == pytest.approx(1.0, rel=EXACT)


def test_recomputing_all_leaves_out_the_last_product():
    """24 D^2 FLOPs per token forward; 8 D^2 of these are the last matmul."""
    kept, again = (
        simulate(dataclasses.replace(GPT, remat=remat), DEVICE, IDEAL)
        for remat in ("none", "full")
    )
    assert again.products_s == pytest.approx(11 / 9 * kept.products_s, rel=EXACT)
    assert again.attention_s == pytest.approx(4.5 / 3.5 * kept.attention_s, rel=EXACT)


def test_copies_cost_their_bytes():
    """Copies of residuals, of chunks over tp, and of weights in each microbatch."""
    case = dataclasses.replace(GPT, remat="core", parallel=True)
    runs, rate = case.microbatches * case.layers_per_gpu, DEVICE.memory_bytes_per_s

    def more(**changes: float) -> float:
        constants = dataclasses.replace(IDEAL, **changes)
        copied = simulate(case, DEVICE, constants).elementwise_s
        return copied - simulate(case, DEVICE, IDEAL).elementwise_s

    kept = runs * layer_bytes(case)
    # Forward, twice backward, and forward again.
    crossing = runs * 4 * case.tokens * case.d_model * case.param_bytes
    weights = case.microbatches * case.gpu_weights
    assert more(stash_passes=4.0) == pytest.approx(4 * kept / rate, rel=1e-9)
    assert more(chunk_passes=3.0) == pytest.approx(3 * crossing / rate, rel=1e-9)
    assert more(visit_bytes=28.0) == pytest.approx(28 * weights / rate, rel=1e-9)


def test_a_plain_step_of_one_microbatch_adds_no_gradients():
    case = dataclasses.replace(with_sizes(GPT, pp=1), microbatches=1)
    copying = dataclasses.replace(IDEAL, visit_bytes=28.0)
    assert simulate(case, DEVICE, copying) == simulate(case, DEVICE, IDEAL)


def test_the_parallel_block_has_half_the_collectives_over_tp():
    serial, parallel = (
        simulate(dataclasses.replace(GPT, parallel=parallel), DEVICE, IDEAL)
        for parallel in (False, True)
    )
    assert parallel.tp_s == pytest.approx(serial.tp_s / 2, rel=EXACT)


@pytest.mark.parametrize(
    ("block", "remat", "tp_chunks"),
    [
        *itertools.product(
            ["serial", "parallel"], ["none", "core", "dots", "full"], [1]
        ),
        # With remat full the trace gathers chunks twice; XLA merges them into one
        # gather.
        *(("serial", remat, 4) for remat in ("none", "attention", "core")),
    ],
)
def test_collectives_over_tp_are_those_of_the_layer(block, remat, tp_chunks):
    """Count the bytes that a device sends in the traced loops over layers."""
    model = dataclasses.replace(TINY, layers=5, block=block, remat=remat)
    program = make_program(Layout((1, 1, 1, 4), 0, tp_chunks=tp_chunks), model)
    trace = program.trace()
    loops = (e for e in equations(trace.jaxpr.jaxpr) if e.primitive.name == "scan")
    # A ring sends this part of an operand; a permute sends all of it.
    shares = {"all_gather": 3, "reduce_scatter": 3 / 4, "ppermute": 1}
    sent = sum(
        shares[e.primitive.name] * e.invars[0].aval.size
        for loop in loops
        for e in equations(loop.params["jaxpr"].jaxpr)
        if e.primitive.name in shares
    )
    case = dataclasses.replace(
        with_sizes(GPT, pp=1, dp_shard=1, tp=4),
        **{"layers": 1, "microbatches": 1, "remat": remat, "tp_chunks": tp_chunks},
        **{"parallel": block == "parallel", "d_model": TINY.d_model},
        **{"seq_len": LENGTH, "rows": ROWS},
    )
    by_model = simulate(case, DEVICE, IDEAL).tp_s * DEVICE.node_link_bytes_per_s
    assert by_model == pytest.approx(sent * case.param_bytes, rel=EXACT)
    # Gathered arrays are kept for the backward pass only if not gathered again.
    is_kept = f"f32[5,1,{ROWS},{LENGTH},{TINY.d_model}]" in str(trace.jaxpr)
    again = layer_bytes(dataclasses.replace(case, tp_chunks=4))
    assert is_kept is (layer_bytes(case) > again)


def test_the_reduction_of_hsdp_crosses_nodes_with_its_shard_only():
    """2 nodes of 8: per GPU half of 1/8 of the gradients, twice, at 25 GB/s."""
    case = dataclasses.replace(
        with_sizes(GPT, pp=1, tp=1, dp_shard=8, dp_replicate=2), layers=2
    )
    slow = dataclasses.replace(DEVICE, node_link_bytes_per_s=math.inf)
    grads_bytes = 2 * (4 * 12288**2 + 2 * 12288 * 49152) * 4
    by_hand = 2 * (grads_bytes / 8) / 2 / 25e9
    assert simulate(case, slow, IDEAL).dp_s == pytest.approx(by_hand, rel=EXACT)


def test_a_group_across_nodes_uses_the_card_of_each_of_its_members():
    """ZeRO-2 over 16 GPUs in 2 nodes: 8 cards of 25 GB/s, gather and scatter."""
    case = dataclasses.replace(with_sizes(GPT, pp=1, tp=1, dp_shard=16), layers=1)
    weights = 4 * 12288**2 + 2 * 12288 * 49152
    by_hand = 15 / 16 * weights * (2 + 4) / (8 * 25e9)
    assert simulate(case, DEVICE, IDEAL).dp_s == pytest.approx(by_hand, rel=EXACT)


def test_two_steps_cross_nodes_with_the_part_of_a_shard():
    """2 nodes of 8: half of 1/8 of the arrays between nodes, 7/8 of them inside."""
    case = dataclasses.replace(
        with_sizes(GPT, pp=1, tp=1, dp_node=2, dp_shard=8), layers=1
    )
    weights = 4 * 12288**2 + 2 * 12288 * 49152
    inside = 7 / 8 / DEVICE.node_link_bytes_per_s
    by_hand = weights * (2 + 4) * (1 / 2 / 8 / 25e9 + inside)
    assert simulate(case, DEVICE, IDEAL).dp_s == pytest.approx(by_hand, rel=EXACT)
    hops = dataclasses.replace(IDEAL, hop_s=1.0)
    num_hops = simulate(case, DEVICE, hops).dp_s - by_hand
    assert num_hops == pytest.approx(2 * (1 + 7), rel=EXACT)


@pytest.mark.parametrize(("zero", "volume"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_each_zero_level_moves_its_volume(zero: int, volume: int):
    """In units of the parameter array, with equal dtypes; see docs/parallelism.md."""
    case = dataclasses.replace(
        with_sizes(GPT, pp=1, tp=1, dp_shard=8),
        layers=1,
        microbatches=1,
        zero=zero,
        grad_bytes=2,
    )
    one = 7 / 8 * case.layer_weights * 2 / 300e9
    assert simulate(case, DEVICE, IDEAL).dp_s == pytest.approx(volume * one, rel=EXACT)


def test_uneven_layers_cost_what_the_fullest_stage_has():
    even, uneven = (
        dataclasses.replace(GPT, layers=layers, chunks=1) for layers in (96, 89)
    )
    assert uneven.layers_per_gpu == even.layers_per_gpu == 12


# ------------------------------------------------------------------------- memory


def test_a_layer_keeps_what_korthikanti_et_al_count():
    """34 bytes per token and width, without the statistics of the scores.

    Less 2 of dropout masks, and 2 more of the output of attention, which we keep twice.
    """
    sums = 4 * GPT.heads * GPT.tokens / 8
    assert layer_bytes(GPT) - sums == 34 * GPT.seq_len * GPT.d_model / 8


def test_interleaving_keeps_what_korthikanti_et_al_count():
    stages, chunks = 8, 6
    expected = 96 * (1 + (stages - 1) / (stages * chunks))
    assert layers_in_flight(GPT) == pytest.approx(expected, rel=EXACT)


@given(cases())
def test_computing_more_again_keeps_less_of_a_layer(case: Case):
    kept = [
        layer_bytes(dataclasses.replace(case, remat=remat))
        for remat in ("none", "attention", "core", "dots", "full")
    ]
    assert kept == sorted(kept, reverse=True)


@given(cases())
def test_a_higher_zero_level_holds_no_more_state(case: Case):
    case = dataclasses.replace(
        with_sizes(case, pp=1, dp_shard=16), layers=8, microbatches=2
    )
    held = [memory(dataclasses.replace(case, zero=zero)) for zero in range(4)]
    assert held[1].optimizer_bytes == held[0].optimizer_bytes / 16
    assert held[2].grads_bytes == held[1].grads_bytes  # unsharded while they accumulate
    assert held[3].grads_bytes == held[2].grads_bytes / 16
    totals = [one.total_bytes for one in held]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("zero", "microbatches", "pp", "shards"),
    [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 1, 4), (2, 2, 1, 1), (2, 1, 8, 1)],
)
def test_gradients_of_layers_are_whole_only_while_they_add_up(
    zero: int, microbatches: int, pp: int, shards: int
):
    case = dataclasses.replace(
        with_sizes(GPT, pp=pp), zero=zero, microbatches=microbatches
    )
    tables = 2 * GPT.vocab_size * GPT.d_model / 8
    by_hand = 4 * (case.gpu_weights / shards + tables)
    assert memory(case).grads_bytes == pytest.approx(by_hand, rel=EXACT)


def test_what_crossed_tp_at_once_is_kept_whole():
    """For both inputs of a serial layer, 7/8 in addition to the 1/8 of chunks."""
    at_once = dataclasses.replace(GPT, tp_chunks=1)
    more = 2 * 2 * GPT.seq_len * GPT.d_model * 7 / 8
    assert layer_bytes(at_once) - layer_bytes(GPT) == more
    one = with_sizes(at_once, tp=1)
    assert layer_bytes(one) == layer_bytes(with_sizes(GPT, tp=1))


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"zero": 4}, "zero must be from 0 to 3, got 4"),
        ({"zero": 3}, "pp must be 1 with zero 3, .*, got 8; use zero 2, or pp 1"),
        ({"visible_keys": 4000.0}, "from 1 to seq_len 2048, got 4000"),
        (
            {"sizes": AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)},
            "chunks must be 1 .*, got",
        ),
    ],
)
def test_a_case_that_cannot_be_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPT, **changes)


def test_a_device_takes_each_rate_of_its_description():
    gpu = GPUS["h200"]
    device = Device.of(gpu, gpus_per_node=4)
    assert device.peak_flops_per_s == gpu.peak_bf16_flops_per_s
    rates = ("memory_bytes_per_s", "node_link_bytes_per_s", "network_bytes_per_s")
    assert [getattr(device, rate) for rate in rates] == [
        getattr(gpu, rate) for rate in rates
    ]
    assert device.gpus_per_node == 4


def test_constants_and_devices_outside_of_their_range_are_refused():
    with pytest.raises(
        ValueError, match="product_efficiency must be above 0 and at most 1"
    ):
        Constants(product_efficiency=1.1)
    with pytest.raises(ValueError, match=r"tp_overlap must be from 0 to 1, got -0\.1"):
        Constants(tp_overlap=-0.1)
    with pytest.raises(ValueError, match="fixed_s must be at least 0, got -1"):
        Constants(fixed_s=-1.0)
    with pytest.raises(ValueError, match="network_bytes_per_s must be positive, got 0"):
        dataclasses.replace(DEVICE, network_bytes_per_s=0.0)
