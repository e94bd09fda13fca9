"""Limits, the judgement of rounds, and the null model of drift."""

import itertools
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from mjax.hardware.gpus import GPUS
from mjax.health.burn import limits as burn_limits
from mjax.health.burn import result as burn_result
from mjax.health.burn.judging import Round, drift, judge
from mjax.health.burn.limits import Limit, Others
from mjax.health.burn.measurements import KINDS, Measured, Outcome, is_within, unit_of
from mjax.health.burn.result import Check, Result
from mjax.health.findings import State

NO_OTHERS = Others(values={}, fraction=0.9)
H100 = "NVIDIA H100 80GB HBM3"


def value(name: str, number: float) -> Measured:
    return Measured(name=name, outcome="value", value=number, unit=unit_of(name))


def said(name: str, outcome: Outcome, note: str = "a note") -> Measured:
    return Measured(name=name, outcome=outcome, note=note)


def rounds(*each: list[Measured], hardware: str = "model") -> list[Round]:
    return [
        Round(begin_s=60.0 * i, seconds=60.0, hardware=hardware, results=tuple(results))
        for i, results in enumerate(each)
    ]


def check_of(name: str, *each: list[Measured], limit: float | None = None) -> Check:
    """Judge rounds with one limit and return one check."""
    limits = [] if limit is None else [Limit(value=limit, text="a limit")]
    checks = judge(rounds(*each), lambda _: (limits, "no baseline"), None)
    return {check.name: check for check in checks}[name]


def test_a_value_with_no_limit_is_unknown_and_never_ok():
    check = check_of("disk.write", [value("disk.write", 1e9)])
    assert (check.state, check.value, check.limit) == ("unknown", 1e9, None)
    assert check.reason == "no baseline"


def test_a_value_at_its_limit_is_ok_and_just_below_it_fails():
    assert check_of("pair.a.b", [value("pair.a.b", 5.0)], limit=5.0).state == "ok"
    check = check_of("pair.a.b", [value("pair.a.b", 4.999)], limit=5.0)
    assert (check.state, check.limit) == ("failed", 5.0)
    assert check.reason == "4.999 is below 5, a limit"


def test_one_bad_round_fails_the_burn_and_is_named():
    each = [[value("memory.copy", 10.0)] for _ in range(20)]
    each[6] = [value("memory.copy", 4.0)]
    check = check_of("memory.copy", *each, limit=5.0)
    assert (check.state, check.value) == ("failed", 4.0)
    assert check.reason == (
        "1 of 20 rounds, the worst is round 7: 4 is below 5, a limit"
    )


@pytest.mark.parametrize("outcome", ["wrong", "error"])
def test_wrong_bytes_in_one_round_fail_whatever_the_other_rounds_reach(
    outcome: Outcome,
):
    name = "bits.int8"
    each = [[said(name, "right")], [said(name, outcome, "gpu3")], [said(name, "right")]]
    check = check_of(name, *each)
    assert (check.state, check.reason) == ("failed", "round 2 of 3: gpu3")


def test_a_fast_copy_with_wrong_bytes_fails():
    bad = Measured(name="pair.a.b", outcome="wrong", value=9.0, unit="GB/s", note="b")
    check = check_of("pair.a.b", [bad], limit=1.0)
    assert (check.state, check.value, check.reason) == ("failed", 9.0, "b")


def test_correctness_alone_can_be_ok():
    assert check_of("memory.pattern", [said("memory.pattern", "right")]).state == "ok"


@pytest.mark.parametrize(
    ("other", "state"),
    [
        ([], "incomplete"),
        ([said("disk", "incomplete", "hung")], "incomplete"),
        ([said("disk", "absent", "full")], "unknown"),
        ([said("disk", "error", "I/O error")], "failed"),
    ],
)
def test_a_burn_with_a_round_that_did_not_measure_is_not_ok(
    other: list[Measured], state: str
):
    good = [value("disk.write", 10.0)]
    found = judge(
        rounds(good, other, good), lambda _: ([Limit(value=5.0, text="t")], ""), None
    )
    states = [check.state for check in found]
    assert state in states
    assert not burn_result.is_passed(found, ["disk"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_number_that_is_no_rate_cannot_be_a_value(number: float):
    with pytest.raises(ValueError, match=r"disk\.read must be a positive number, got"):
        value("disk.read", number)


def devices(count: float, outcome: Outcome = "right") -> list[Measured]:
    return [Measured(name="devices", outcome=outcome, value=count, note="n x model")]


def test_devices_are_ok_only_if_their_number_is_known_and_right():
    for expected, state in ((8, "ok"), (None, "unknown"), (9, "failed")):
        (check,) = judge(rounds(devices(8.0)), lambda _: ([], ""), expected)
        assert check.state == state, expected


def test_a_device_lost_between_rounds_fails_though_no_number_was_expected():
    each = rounds(devices(8.0), devices(7.0))
    (check,) = judge(each, lambda _: ([], ""), None)
    assert (check.state, check.value) == ("failed", 7.0)


def test_other_hardware_in_a_later_round_fails():
    each = [*rounds(devices(1.0), hardware="gpu"), *rounds(devices(1.0))]
    (check,) = judge(each, lambda _: ([], ""), 1)
    assert check.state == "failed"
    assert check.reason == "round 2 found model, the first gpu"


def test_checks_come_in_the_order_of_the_kinds():
    names = ["disk.read", "bits.int8", "gemm.int8.a", "gemm.bfloat16.b", "devices"]
    each = rounds([said(name, "absent") for name in names])
    found = [check.name for check in judge(each, lambda _: ([], ""), None)]
    assert found == [names[4], names[3], names[2], names[1], names[0]]


def test_the_null_model_of_drift_is_what_random_orders_give():
    source = random.Random(3)
    times = [60.0 * i for i in range(12)]
    values = [source.lognormvariate(3, 0.1) for _ in times]
    slopes = []
    for _ in range(4000):
        order = source.sample(values, len(values))
        found = drift(times, order)
        assert found is not None
        slopes.append(abs(found[0]))
    null = drift(times, values)
    assert null is not None
    # 4000 orders give the 95% quantile within about 3%; the normal law with 12 values
    # within a few percent more.
    assert null[1] == pytest.approx(statistics.quantiles(slopes, n=20)[18], rel=0.1)


def test_the_variance_of_the_null_model_is_that_of_all_orders():
    times, values = np.arange(8.0), np.array([9.0, 4.0, 7.0, 1.0, 8.0, 2.0, 6.0, 5.0])
    orders = np.array([*itertools.permutations(values)])
    centred = times - times.mean()
    slopes = orders @ centred / (centred @ centred)
    found = drift([*times], [*values])
    assert found is not None
    expected = 1.96 * slopes.std() * 7 / values.mean() * 100
    assert found[1] == pytest.approx(expected)  # exact but for rounding


def test_steady_noise_is_called_drift_in_about_5_of_100_burns():
    source, found = random.Random(5), 0
    for _ in range(1000):
        values = [source.gauss(100, 5) for _ in range(20)]
        percent, null = drift([float(i) for i in range(20)], values) or (0.0, 0.0)
        found += abs(percent) > null
    assert 25 <= found <= 75  # 5%: 50, standard deviation 7


def test_a_burn_that_slows_down_is_said_to_drift():
    each = [[value("memory.copy", 10.0 - 0.1 * i + 0.01 * (i % 3))] for i in range(11)]
    check = check_of("memory.copy", *each, limit=1.0)
    assert check.state == "ok"
    assert "min 9.01, median 9.52 of 11 rounds" in check.reason
    assert "drift -10." in check.reason
    assert "more than noise" in check.reason


def test_few_rounds_say_nothing_about_drift():
    assert drift([float(i) for i in range(7)], [9.0 - i for i in range(7)]) is None


@pytest.mark.parametrize(
    ("states", "required", "passed"),
    [
        (["ok", "unknown"], [], True),
        (["ok", "unknown"], ["x"], False),
        (["ok", "failed"], [], False),
        (["ok", "incomplete"], [], False),
        (["unknown", "unknown"], [], False),
        ([], [], False),
    ],
)
def test_a_host_passes_only_if_something_is_ok_and_nothing_else_speaks_against_it(
    states: list, required: list[str], passed: bool
):
    checks = [
        Check(name=name, state=State(state), value=None, limit=None, reason="", unit="")
        for name, state in zip(("a", "x.gpu0"), states, strict=False)
    ]
    assert burn_result.is_passed(checks, required) is passed


def limits(name: str, hardware: str, others: Others = NO_OTHERS):
    return burn_limits.limits(
        value(name, 1.0), hardware, burn_limits.read_baselines(), others
    )


def test_the_packaged_baselines_give_a_part_of_the_dense_peak():
    (limit,), missing = limits("gemm.bfloat16.gpu7", H100)
    assert limit.value == pytest.approx(0.6 * 989.4)
    assert limit.text == f"0.6 of the peak 989.4 of {H100}"
    assert "0 other hosts" in missing


def test_peaks_follow_from_the_hardware_of_the_same_name_alone():
    for hardware in (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
        "cpu",
    ):
        assert limits("gemm.bfloat16.gpu0", hardware)[0] == []


def test_every_peak_of_a_gpu_is_above_its_slower_neighbours():
    """A unit or a factor of two for sparsity gone wrong would break these orders."""
    for one in burn_limits.read_baselines().hardware:
        peak = one.peak
        assert peak["gemm.int8"] == pytest.approx(2 * peak["gemm.bfloat16"], rel=1e-3)
        assert peak["gemm.float16"] == peak["gemm.bfloat16"]
        assert 100 < peak["gemm.bfloat16"] < 1e4
        assert 1000 < peak["device_memory"] < 1e4
        assert peak["pair"] < peak["device_memory"]
        assert peak.get("host_to_device", 0.0) < peak["pair"]


def test_the_peaks_are_those_that_plans_and_utilization_are_made_with():
    """Health imports no other part; so both tables are compared here."""
    gpus = {gpu.device_kind: gpu for gpu in GPUS.values()}
    for one in burn_limits.read_baselines().hardware:
        gpu = gpus.pop(one.device_kind)
        assert one.peak["gemm.bfloat16"] * 1e12 == gpu.peak_bf16_flops_per_s
        # Memory is given to whole GB/s.
        assert one.peak["device_memory"] == gpu.memory_bytes_per_s // 10**9
        for link in ("pair", "all_to_all", "all_reduce"):
            assert one.peak[link] * 1e9 == gpu.node_link_bytes_per_s
    assert not gpus


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fraction = {gemm_int8 = 1.0}", "unknown measurement gemm_int8; the nearest"),
        ("fraction = {pair = 1.5}", "fraction of pair must be in (0, 1], got 1.5"),
        ("fraction = {pair = 'x'}", "fraction.pair must be a number, got 'x'"),
        ("fraction = {pair = nan}", "fraction of pair must be in (0, 1], got nan"),
        ("[fraction", "Expected"),
        ("", "an object with fraction"),
    ],
)
def test_bad_baselines_are_refused_with_the_name_of_the_file(
    tmp_path: Path, text: str, says: str
):
    path = tmp_path / "site.toml"
    path.write_text("hardware = []\n" * bool(text) + text)
    with pytest.raises(ValueError, match=r"site\.toml") as error:
        burn_limits.read_baselines(path)
    assert says in str(error.value)


def test_a_peak_must_be_positive_and_a_model_is_there_once(tmp_path: Path):
    path = tmp_path / "site.toml"
    one = '[[hardware]]\ndevice_kind = "x"\nsource = "s"\npeak = {pair = %s}\n'
    for text, says in (
        (one % "-1", "peak of pair must be positive, got -1.0 for x"),
        (one % "1" + one % "2", "device_kind x is listed twice"),
    ):
        path.write_text(f"{text}[fraction]\n")
        with pytest.raises(ValueError, match=says):
            burn_limits.read_baselines(path)


def result(host: str, numbers: dict[str, float], hardware: str = "cpu", unit=None):
    checks = tuple(
        Check(
            name=name,
            state=State.UNKNOWN,
            value=number,
            limit=None,
            reason="",
            unit=unit or unit_of(name),
        )
        for name, number in numbers.items()
    )
    return Result(ok=True, host=host, hardware=hardware, checks=checks)


def gathered(*found: Result) -> Others:
    return burn_limits.others(found, "me", "cpu", 0.9)


def test_the_limit_is_a_part_of_the_median_of_three_others():
    others = gathered(
        *(
            result(h, {"disk.read": v})
            for h, v in zip("abc", (1.0, 5.0, 2.0), strict=True)
        )
    )
    (limit,), _ = limits("disk.read", "cpu", others)
    assert limit.value == pytest.approx(0.9 * 2.0)
    assert limit.text == "0.9 of the median 2 of 3 hosts"


def test_two_others_are_too_few():
    others = gathered(*(result(h, {"disk.read": 1.0}) for h in "ab"))
    found, missing = limits("disk.read", "cpu", others)
    assert found == []
    assert "2 other hosts to compare with, 3 are needed" in missing


def test_this_host_and_other_hardware_do_not_count():
    names = ["a", "b", "me"]
    others = gathered(
        *(result(h, {"disk.read": 1.0}) for h in names),
        result("c", {"disk.read": 1.0}, hardware="gpu"),
    )
    found, missing = limits("disk.read", "cpu", others)
    assert found == []
    assert "(1 have other hardware)" in missing


def test_a_device_is_compared_with_the_same_device_of_the_others():
    numbers = {"gemm.int8.cpu0": 10.0, "gemm.int8.cpu1": 1.0}
    others = gathered(*(result(h, numbers) for h in "abc"))
    for name, number in numbers.items():
        assert limits(name, "cpu", others)[0][0].value == pytest.approx(0.9 * number)


def test_both_limits_must_be_reached():
    others = Others(values={"gemm.bfloat16.gpu0": [800.0] * 3}, fraction=0.9)
    found, _ = limits("gemm.bfloat16.gpu0", H100, others)
    one = [value("gemm.bfloat16.gpu0", 700.0)]  # above 593.6, below 720
    (check,) = judge(rounds(one), lambda _: (found, ""), None)
    assert (check.state, check.limit) == ("failed", 720.0)
    assert "of the median 800 of 3 hosts" in check.reason


def test_a_host_twice_or_in_another_unit_is_refused():
    with pytest.raises(ValueError, match="has host a twice"):
        burn_limits.check_results([result("a", {}), result("a", {})])
    with pytest.raises(
        ValueError, match=r"disk\.read of a is in TFLOP/s, expected GB/s"
    ):
        burn_limits.check_results([result("a", {"disk.read": 1.0}, unit="TFLOP/s")])


def test_names_are_within_their_kinds_and_no_kind_is_within_another():
    assert is_within("all_reduce.8", "all_reduce")
    assert not is_within("all_reduce_hosts.8", "all_reduce")
    assert not [(a, b) for a in KINDS for b in KINDS if a != b and is_within(a, b)]
