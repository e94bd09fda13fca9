"""Known bytes: every planted difference is seen, and a healthy device passes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.health.burn import gemm_workloads, host_workloads, link_workloads, patterns
from mjax.health.burn.device_bench import AXIS, Bench, check_place
from mjax.health.burn.measurements import Task


def product(n: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b = patterns.small_factor(n, 1), patterns.small_factor(n, 2)
    return a, b, (a.astype(np.int64) @ b.astype(np.int64).T).astype(np.float32)


def test_an_exact_product_passes():
    assert patterns.wrong_rows(*product()) is None


def test_a_wrong_entry_of_any_size_is_seen_and_its_row_named():
    for delta in (1, -1, 64):
        a, b, found = product()
        found[5, 7] += delta
        assert patterns.wrong_rows(a, b, found) == (
            "has 1 of 32 rows wrong, the first is 5"
        )


def test_a_wrong_entry_is_seen_in_every_column():
    for column in range(32):
        a, b, found = product()
        found[0, column] -= 1
        assert "1 of 32 rows wrong" in (patterns.wrong_rows(a, b, found) or "")


def test_right_numbers_in_a_wrong_place_are_seen():
    a, b, found = product()
    for wrong in (found.T, found[::-1], np.roll(found, 1, axis=1)):
        assert "rows wrong" in (patterns.wrong_rows(a, b, wrong) or "")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (np.nan, "not integers"),
        (np.inf, "not integers"),
        (0.5, "not integers"),
        (1e6, "too large"),
    ],
)
def test_numbers_that_cannot_be_are_seen(number: float, says: str):
    a, b, found = product()
    found[0, 0] = number
    assert says in (patterns.wrong_rows(a, b, found) or "")


def test_a_device_with_other_bits_is_named():
    counts = {"gpu0": {"x": 9}, "gpu1": {"y": 9}, "gpu2": {"x": 9}}
    text = patterns.different_bits(counts)
    assert text == "gpu1 differ from the other devices"


def test_a_device_that_changes_its_mind_is_named_though_it_is_alone():
    assert patterns.different_bits({"gpu0": {"x": 8, "y": 1}}) == (
        "gpu0 gave 2 different results in 9 runs"
    )


def test_two_devices_that_differ_are_both_named():
    text = patterns.different_bits({"gpu0": {"x": 9}, "gpu1": {"y": 9}})
    assert text == "gpu0, gpu1 differ, and no result has a majority"


def test_equal_bits_pass_and_no_bits_do_not():
    assert patterns.different_bits({"gpu0": {"x": 9}, "gpu1": {"x": 9}}) is None
    for nothing in ({}, {"gpu0": {}}):
        assert patterns.different_bits(nothing) == "no results to compare"


def test_healthy_memory_passes_and_a_stuck_bit_is_seen_at_its_offset():
    words = np.empty(1000, np.uint64)
    assert patterns.memory_fault(words) is None
    for stuck in (np.uint64(1 << 63), np.uint64(1)):

        def read(words: np.ndarray, stuck: np.uint64 = stuck) -> np.ndarray:
            found = words.copy()
            found[123] |= stuck
            return found

        fault = patterns.memory_fault(words, read)
        assert fault is not None
        assert fault.endswith(
            "1 of 1000 words differ from the pattern 0000000000000000, at offsets 0x3d8"
        )


def test_words_that_come_from_another_address_are_seen():
    words = np.empty(1000, np.uint64)
    fault = patterns.memory_fault(words, lambda words: np.roll(words, 1))
    assert fault is not None
    assert "pattern address" in fault


def test_blocks_in_another_order_or_changed_are_seen():
    assert patterns.wrong_blocks([b"a", b"b", b"c"], [b"a", b"b", b"c"]) is None
    text = patterns.wrong_blocks([b"a", b"b", b"c"], [b"a", b"c", b"b"])
    assert text == "2 of 3 blocks differ from what was written: 1, 2"


def test_a_disk_that_returns_other_bytes_fails(tmp_path, monkeypatch):
    task = Task(kinds=(), form="quick", disk_dir=str(tmp_path), disk_mib=8)
    assert [one.outcome for one in host_workloads.disk(task)] == ["value", "value"]
    read = host_workloads.os.preadv

    def spoiled(descriptor, buffers, offset):
        count = read(descriptor, buffers, offset)
        buffers[0][4097] ^= 1
        return count

    monkeypatch.setattr(host_workloads.os, "preadv", spoiled)
    found = {one.name: one for one in host_workloads.disk(task)}
    assert found["disk.read"].outcome == "wrong"
    assert found["disk.read"].note.startswith("1 of 1 blocks differ")
    assert [*tmp_path.iterdir()] == []


def test_a_disk_without_room_is_unknown(tmp_path):
    task = Task(kinds=(), form="quick", disk_dir=str(tmp_path), disk_mib=2**24)
    (full,) = host_workloads.disk(task)
    assert (full.outcome, "MiB free" in full.note) == ("absent", True)


def bench(count: int = 2) -> Bench:
    devices = {f"cpu{i}": jax.devices()[i] for i in range(count)}
    return Bench(devices, Task(kinds=(), form="quick"))


def test_every_dtype_has_right_bits_on_healthy_devices():
    for dtype in ("int8", "float8_e4m3fn"):
        (found,) = gemm_workloads.bits(bench(), dtype)
        assert found.outcome == "right", found
        assert found.note.endswith("equal results on each of cpu0, cpu1")


def test_a_device_that_computes_one_wrong_bit_fails_by_name(monkeypatch):
    """The wrong number is in one place, on one of three devices, in the last bit."""
    right = gemm_workloads._product

    def wrong(x: jax.Array, y: jax.Array) -> jax.Array:
        found = right(x, y)
        try:
            is_bad = jax.lax.axis_index(AXIS) == 1
        except NameError:  # on one device by itself: healthy
            return found
        bits = jax.lax.bitcast_convert_type(found, jnp.uint32)
        bits = bits.at[3, 4].set(bits[3, 4] ^ is_bad.astype(jnp.uint32))
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    monkeypatch.setattr(gemm_workloads, "_product", wrong)
    (found,) = gemm_workloads.bits(bench(3), "bfloat16")
    assert (found.outcome, found.note) == (
        "wrong",
        "cpu1 differ from the other devices",
    )


def test_devices_that_are_all_wrong_alike_fail_by_the_exact_product(monkeypatch):
    right = gemm_workloads._product
    monkeypatch.setattr(
        gemm_workloads, "_product", lambda x, y: right(x, y).at[0, 0].add(1)
    )
    (found,) = gemm_workloads.bits(bench(), "float32")
    assert found.outcome == "wrong"
    assert "cpu0 has 1 of 512 rows wrong, the first is 0; cpu1 has 1" in found.note


def test_a_digest_changes_with_each_bit_and_with_places():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    digest = np.asarray(gemm_workloads._digest(x))
    swapped = x.at[0, 0].set(x[7, 7]).at[7, 7].set(x[0, 0])
    for other in (x.T, x[::-1], swapped, x.at[3, 3].set(-x[3, 3])):
        assert not np.array_equal(np.asarray(gemm_workloads._digest(other)), digest)


def test_each_gemm_is_timed_on_the_device_of_its_name(monkeypatch):
    places = []
    monkeypatch.setattr(
        gemm_workloads, "check_place", lambda x, d: places.append((*x.devices(), d))
    )
    found = gemm_workloads.gemm(bench(), "int8")
    assert [one.name for one in found] == ["gemm.int8.cpu0", "gemm.int8.cpu1"]
    assert places == [(d, d) for d in jax.devices()[:2]]
    with pytest.raises(RuntimeError, match="computed on"):
        check_place(jnp.ones(1, device=jax.devices()[1]), jax.devices()[0])


@pytest.fixture
def small(monkeypatch):
    """Buffers that cost no time."""
    monkeypatch.setattr(link_workloads, "_CPU_BYTES", 2**14)
    monkeypatch.setattr(link_workloads, "_CPU_COPY_BYTES", 2**14)


@pytest.mark.usefixtures("small")
def test_links_of_healthy_devices_have_values_and_name_both_ends():
    found = [
        *link_workloads.device_memory(bench()),
        *link_workloads.transfers(bench(), "host_to_device"),
        *link_workloads.transfers(bench(), "device_to_host"),
        *link_workloads.pair(bench(3)),
        *link_workloads.all_to_all(bench(3)),
        *link_workloads.all_reduce(bench(3)),
    ]
    assert {one.outcome for one in found} == {"value"}
    assert [one.name for one in found[6:]] == [
        *("pair.cpu0.cpu1", "pair.cpu0.cpu2", "pair.cpu1.cpu0", "pair.cpu1.cpu2"),
        *("pair.cpu2.cpu0", "pair.cpu2.cpu1", "all_to_all.3", "all_reduce.3"),
    ]


@pytest.mark.usefixtures("small")
def test_one_device_has_no_links():
    for measure in (
        link_workloads.pair,
        link_workloads.all_to_all,
        link_workloads.all_reduce,
    ):
        (found,) = measure(bench(1))
        assert (found.outcome, found.note) == ("absent", "there is only one device")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "broken", "measure"),
    [
        ("all_to_all", lambda x, *_: x, link_workloads.all_to_all),
        ("psum", lambda x, _: x, link_workloads.all_reduce),
    ],
)
def test_a_collective_that_delivers_the_wrong_words_fails_by_device(
    monkeypatch, name, broken, measure
):
    monkeypatch.setattr(jax.lax, name, broken)
    (found,) = measure(bench())
    assert found.outcome == "wrong"
    assert "words are wrong on cpu0; " in found.note
    assert found.note.endswith("words are wrong on cpu1")


@pytest.mark.usefixtures("small")
def test_a_copy_that_arrives_shifted_fails_at_its_destination(monkeypatch):
    put = jax.device_put

    def shifted(x, to):
        return put(jnp.roll(x, 1), to)

    monkeypatch.setattr(link_workloads.jax, "device_put", shifted)
    found = link_workloads.pair(bench())
    assert [one.outcome for one in found] == ["wrong", "wrong"]
    assert found[0].note == "4096 words are wrong on cpu1"


@pytest.mark.parametrize("n", [2, 1024, 4851, 16_384])
def test_a_sum_over_devices_is_exact_in_float32_in_every_order(n):
    index = np.array([0, 1, 511, 512, 1023, 2**28 - 1], np.int32)
    terms = link_workloads.summands(index[:, None], np.arange(n, dtype=np.int32), n)
    exact = terms.sum(axis=1, dtype=np.int64)
    np.testing.assert_array_equal(link_workloads.totals(index, n), exact)
    # No partial sum, of whichever terms, exceeds the integers of float32.
    assert terms.min() >= 0
    assert exact.max() <= 2**24
    assert len(np.unique(terms[0])) == min(n, 2**23 // n, 1024)  # devices differ
    shuffled = np.random.default_rng(0).permutation(n)
    for order in (np.arange(n), np.arange(n)[::-1], shuffled):
        x = terms[:, order].astype(np.float32)
        np.testing.assert_array_equal(x.cumsum(axis=1)[:, -1], exact)  # a ring
        while x.shape[1] > 1:  # a tree
            x = np.pad(x, ((0, 0), (0, x.shape[1] % 2)))
            x = x[:, ::2] + x[:, 1::2]
        np.testing.assert_array_equal(x[:, 0], exact)


def test_bus_bandwidth_follows_the_formulas_of_nccl_tests(monkeypatch):
    """S/t times 2 (n-1)/n, and (n-1)/n, with a time of one second."""
    monkeypatch.setattr(Bench, "time", lambda *_: 1.0)
    n, size = 4, link_workloads._CPU_BYTES
    (total,) = link_workloads.all_reduce(bench(n))
    assert total.value == pytest.approx(size * 2 * 3 / 4 / 1e9)
    (exchange,) = link_workloads.all_to_all(bench(n))
    assert exchange.value == pytest.approx(size * 3 / 4 / 1e9)
    found = gemm_workloads.gemm(bench(1), "float32")
    assert found[0].value == pytest.approx(2 * 512**3 / 1e12)


def test_a_processor_without_a_name_is_its_architecture(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name\t: Fast CPU\nmodel name : Other\n")
    assert host_workloads.processor(path) == "cpu (Fast CPU)"
    assert host_workloads.processor(tmp_path / "none").startswith("cpu (")
    assert json.dumps(host_workloads.processor()).isprintable()
