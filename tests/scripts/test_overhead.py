"""Tables of the page of overhead, from known times."""

from scripts.speed import bench_overhead, overhead
from scripts.speed.bench_overhead import Compared
from scripts.speed.host_time import HostTimes


def test_the_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    times = {"mjax": [(1.0, 4.0), (9.0, 2.0), (4.0, 3.0)], "bare": [(2.0, 1.0)] * 3}
    rows = bench_overhead.rows(
        Compared(gflops={"mjax": 1.0}, temp_mib={"mjax": 1.0}, times=times)
    )
    assert rows[2] == ["mjax / bare, s", "0.500", "2.000", "4.500"]
    assert rows[3] == ["mjax step, CPU-s", "2.000", "3.000", "4.000"]


def test_host_times_of_other_devices_share_a_table_and_a_missing_one_is_empty():
    def times(**rows):
        return HostTimes(times_ms=rows, num_inputs=42, num_outputs=43)

    table = overhead.host_table({8: times(a=[1, 2, 6], b=[3]), 1: times(a=[4])})
    assert table.header[1] == "8 devices, min"
    assert table.header[-1] == "1 device, max"
    assert "42 and 43 with 8 devices and 42 and 43 with 1 device." in table.text
    assert table.rows == [
        ["a", "1.000", "2.000", "6.000", "4.000", "4.000", "4.000"],
        ["b", "3.000", "3.000", "3.000", "", "", ""],
    ]


def test_the_cpu_time_of_a_process_is_counted_without_the_first():
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    times_s = overhead.import_times_s(("-c", busy), 2)
    assert len(times_s) == 2
    assert min(times_s) >= 0.15
